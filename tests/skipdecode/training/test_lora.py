"""Training of LoRA adapters: A and B alone change, the loss falls under every schedule, and the folder that is saved
makes of the untouched model what was trained (logits within 1e-5 of the largest, float32)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.training.recipe import TrainConfig
from actors.training.state import load_state, save_state
from actors.training.trainer import Hooks, train
from actors.training.workers import Pair
from skipdecode.checkpoint.weights import load_model
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from skipdecode.training.lora import LoraShape, add_lora, linear_names, lora_modules, save_adapter
from skipdecode.training.loss import ResponseLoss

TOLERANCE = 1e-5
SCHEDULES = ({"method": "full"}, {"method": "skipdecode", "speedup": 2})
PAIRS: list[Pair] = [([2, token, 3], [token, token, 2]) for token in range(4, 20)]


@pytest.fixture(scope="module", params=["opt", "llama"])
def source(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "opt":
        return tiny_checkpoint
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    folder = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def recipe(**changes: Any) -> TrainConfig:
    base: dict[str, Any] = {"schedules": SCHEDULES, "horizon": 3, "epochs": 12, "batch_size": 8, "accumulate": 1}
    base |= {"learning_rate": 0.02, "final_learning_rate": 1e-3, "warmup_steps": 2, "betas": (0.9, 0.95)}
    base |= {"weight_decay": 0.01, "max_grad_norm": 1.0, "distill": 0.0, "temperature": 1.0, "hidden": 0.0}
    base |= {"trainable": "all", "draw": "one", "precision": "float32", "recompute": False, "parallel": "ddp"}
    base |= {"fit_pairs": 0}
    base |= {"log_every": 1, "validate_every": 8, "checkpoint_every": 1000, "validation_rows": 16, "seed": 0}
    return TrainConfig(**base | changes)


def with_lora(source: Path, targets: tuple[str, ...] = (), rank: int = 4) -> tuple[Decoder, LoraShape]:
    model = load_model(source)
    shape = LoraShape(rank, 6.0, targets or tuple(linear_names(model.config)))
    add_lora(model, shape, seed=1)
    return model, shape


def logits(model: Decoder, schedule: Schedule) -> Tensor:
    with torch.no_grad():
        return teacher_forced_logits(model, teacher_batch(PAIRS[:5], 1), schedule)


def run(
    model: Decoder, config: TrainConfig, folder: Path, resume: dict[str, Any] | None = None
) -> tuple[list[float], list[float], set[str]]:
    """Losses by step, mean validation losses, names of the weights that are kept. Checkpoints go into `folder`."""
    losses, validations, names = list[float](), list[float](), set[str]()

    def log(record: dict[str, Any]) -> None:
        (losses if "train_loss" in record else validations).append(record.get("train_loss", record.get("mean")))

    def checkpoint(state: dict[str, Any], record: dict[str, Any]) -> None:
        save_state(state, folder / f"{record['step']}.pt")

    train(model, PAIRS, PAIRS, config, Hooks(log, lambda weights, _: names.update(weights), checkpoint), resume)
    return losses, validations, names


def test_it_begins_as_the_model_itself(source: Path) -> None:
    model, _ = with_lora(source)
    plain = load_model(source)
    assert len(lora_modules(model)) == 4 * model.config.num_hidden_layers
    for schedule in (FullDepth(model.config.num_hidden_layers), SkipDecode(model.config.num_hidden_layers, 3, 2, 1, 3)):
        torch.testing.assert_close(logits(model, schedule), logits(plain, schedule), rtol=0, atol=0)


@pytest.mark.parametrize("targets", [(), ("v_proj", "fc1", "up_proj")], ids=["all", "some"])
def test_what_was_trained_is_what_is_merged(source: Path, tmp_path: Path, targets: tuple[str, ...]) -> None:
    known = linear_names(load_model(source).config)
    model, shape = with_lora(source, tuple(name for name in targets if name in known))
    _, losses, kept = run(model, recipe(), tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    assert {name.removeprefix("model.") for name in kept} == {n for n in model.state_dict() if ".lora." in n}
    before, after = load_model(source).state_dict(), model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(bool(value.any()) for name, value in after.items() if ".lora.b." in name), "every B has learnt"

    save_adapter(after, tmp_path, model.config, shape, "some/model")
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (keys["base_model_name_or_path"], keys["target_modules"]) == ("some/model", sorted(shape.targets))
    merged = load_model(source, adapter=tmp_path)
    for schedule in (FullDepth(model.config.num_hidden_layers), SkipDecode(model.config.num_hidden_layers, 3, 2, 1, 3)):
        ours, trained = logits(merged, schedule), logits(model, schedule)
        torch.testing.assert_close(ours, trained, rtol=0, atol=TOLERANCE * float(trained.abs().max()))
    full = FullDepth(model.config.num_hidden_layers)
    assert (logits(merged, full) - logits(load_model(source), full)).abs().max() > 0.1


@pytest.mark.parametrize("more", [{}, {"distill": 0.5, "recompute": True}], ids=["plain", "distilled, recomputed"])
def test_a_resumed_training_goes_on_as_it_would_have(
    tiny_checkpoint: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    config = recipe(epochs=4, checkpoint_every=3, validate_every=100, **more)
    model, _ = with_lora(tiny_checkpoint)
    losses, _, _ = run(model, config, tmp_path)
    state = load_state(tmp_path / "3.pt")
    assert all(".lora." in name for name in state["model"]), "a checkpoint is as small as the adapter"
    again, _ = with_lora(tiny_checkpoint)
    assert run(again, config, tmp_path, state)[0] == pytest.approx(losses[3:], abs=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=1e-6)


def test_autocast_trains_it_in_float32(tiny_checkpoint: Path) -> None:
    model, _ = with_lora(tiny_checkpoint)
    for one in lora_modules(model):
        one.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ResponseLoss(model).train()(teacher_batch(PAIRS, 1), SkipDecode(6, 3, 2, 1, 3)).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads.keys() == {name for name, _ in model.named_parameters() if ".lora." in name}
    assert all(grad.dtype == torch.float32 for grad in grads.values())


def test_frozen_weights_are_rounded_once_as_autocast_would_each_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, _ = with_lora(tiny_checkpoint)
    batch, full = teacher_batch(PAIRS, 1), FullDepth(model.config.num_hidden_layers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = ResponseLoss(model)(batch, full).item() / sum(len(response) for _, response in PAIRS)
    config = recipe(precision="bfloat16", schedules=({"method": "full"},), batch_size=len(PAIRS), epochs=1)
    losses, validations, _ = run(model, config, tmp_path)
    assert losses[0] == pytest.approx(before, rel=1e-4)
    assert validations[-1] < before
    weights = {name: value.dtype for name, value in model.state_dict().items()}
    assert {weights[name] for name in weights if ".lora." in name} == {torch.float32}
    assert weights["blocks.0.qkv.weight"] == torch.bfloat16
    assert weights["embed_tokens.weight"] == torch.float32, "the stream of states stays in float32"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_opens_it(source: Path, tmp_path: Path, hf: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model, shape = with_lora(source)
    run(model, recipe(epochs=2), tmp_path)
    save_adapter(model.state_dict(), tmp_path, model.config, shape, str(source))
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        prompt, response = PAIRS[3]
        reference = theirs(torch.tensor([prompt + response[:-1]])).logits[0, len(prompt) - 1 :]
        ours = teacher_forced_logits(model, teacher_batch([PAIRS[3]], 1), FullDepth(model.config.num_hidden_layers))
    torch.testing.assert_close(ours[0], reference, rtol=0, atol=TOLERANCE * float(reference.abs().max()))
