"""Training models of transformers: loss and gradients are those of the definition, of transformers' layers alone, and
what is saved is what transformers saves."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.training.state import load_state, save_state
from actors.training.trainer import Hooks, train
from actors.training.workers import Pair
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import Schedule
from skipdecode.training.loss import ResponseLoss
from tests.support.schedules import decodes
from tests.support.train_configs import make_config
from tests.support.wrapped_models import INSTALLED_TYPES, VOCAB, L, logits_with_gradients, save

FAST = ("gemma2", "gpt_oss", "qwen3_moe")
"""Soft caps and norms behind blocks, sinks and windows, experts."""
KINDS = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in INSTALLED_TYPES]


def random_pair(seed: int, prompt: int, response: int) -> Pair:
    tokens = torch.randint(5, VOCAB, (prompt + response,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens[:prompt], tokens[prompt:]


PAIRS = [random_pair(0, 9, 8), random_pair(1, 3, 5), random_pair(2, 6, 1)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Decoder]]:
    """`both(kind)`: a model of transformers, and ours of the folder it was saved in, to be trained."""

    @cache
    def make(kind: str) -> tuple[PreTrainedModel, Decoder]:
        folder: Path = tmp_path_factory.mktemp(kind)
        reference = save(kind, folder)
        return reference, load_model(folder, implementation="transformers").train().requires_grad_(True)

    return make


def schedules_of(*methods: str) -> list[Schedule]:
    return [make_schedule(decodes(L)[method], num_layers=L, max_new_tokens=9) for method in methods]


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_products_are_in_bfloat16_where_training_is(
    kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]
) -> None:
    """As `train.precision` has it by default; gradients stay close to those of float32."""
    model = both(kind)[1]
    gradients: dict[bool, dict[str, Tensor]] = {}
    products: list[torch.dtype] = []
    hooks = [
        module.register_forward_hook(lambda _module, _given, made: products.append(made.dtype))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    for is_bfloat16 in (False, True):
        products.clear()
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bfloat16):
            loss = ResponseLoss(model)(teacher_batch(PAIRS, 0), *schedules_of("full", "skipdecode"))
        loss.sum().backward()
        assert set(products) == {torch.bfloat16 if is_bfloat16 else torch.float32}
        gradients[is_bfloat16] = {n: p.grad.flatten() for n, p in model.named_parameters() if p.grad is not None}
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    for name, exact in gradients[False].items():
        if exact.norm() > 1e-6:
            assert F.cosine_similarity(exact, gradients[True][name], dim=0) > 0.99, name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_definition(
    kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]
) -> None:
    """Of one schedule, and of several that share their prompts, whose layers are recomputed for the gradients."""
    reference, model = both(kind)
    for methods, recompute in ((["skipdecode"], False), (["full", "skipdecode", "unified"], True)):
        schedules = schedules_of(*methods)
        loss = ResponseLoss(model, recompute=recompute)(teacher_batch(PAIRS, 0), *schedules)
        losses = [
            sum(
                F.cross_entropy(logits_with_gradients(reference, *pair, one), torch.tensor(pair[1]), reduction="sum")
                for pair in PAIRS
            )
            for one in schedules
        ]
        torch.testing.assert_close(loss, torch.stack(losses), rtol=1e-4, atol=1e-4)
        for module, total in ((model, loss.sum()), (reference, sum(losses))):
            module.zero_grad()
            total.backward()
        for name, wanted in reference.named_parameters():
            found = model.model.get_parameter(name).grad
            assert (found is None) == (wanted.grad is None), name
            if found is not None:
                scale = max(1.0, float(wanted.grad.abs().max()))
                torch.testing.assert_close(
                    found, wanted.grad, rtol=1e-3, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}"
                )


def names_in(folder: Path) -> dict[str, list[int]]:
    """The tensors of a folder by name, with their shapes."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_transformers_own(kind: str, tmp_path: Path) -> None:
    """Its tensors have the names that its type has in files, and both load it."""
    first, second = tmp_path / "first", tmp_path / "second"
    save(kind, first, tie_word_embeddings=kind == "gemma2")
    raw = json.loads((first / "config.json").read_text())
    stale = {"skip_decode": {"method": "skipdecode", "speedup": 3}, "ffn_skip": {"layers": [1]}}
    (first / "config.json").write_text(json.dumps(raw | stale))
    model = load_model(first, implementation="transformers")
    schedule = {"method": "skipdecode", "speedup": 2, "horizon": 8}
    model.config = replace(model.config, skip_decode=schedule, ffn_skip=None, trained_schedules=[schedule])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    save_model(model, second, dtype=torch.bfloat16)
    assert names_in(second) == names_in(first)
    assert {path.name for path in second.iterdir()} == {"config.json", "model.safetensors"}
    theirs, found = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    assert theirs.config.skip_decode == schedule
    again = load_model(second, implementation="transformers")
    for name, wanted in model.model.named_parameters():
        for loaded in (theirs, again.model):
            assert torch.equal(loaded.get_parameter(name), wanted.to(torch.bfloat16).float()), name
    changed = {name for name, value in vars(again.config).items() if value != getattr(model.config, name)}
    assert changed <= {"torch_dtype"}
    assert again.config.torch_dtype == "bfloat16"
    assert "ffn_skip" not in json.loads((second / "config.json").read_text())


@pytest.mark.parametrize("kind", ["gemma2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_resumed_training_makes_the_same_weights(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(kind, folder, tie_word_embeddings=True)
    pairs = [random_pair(seed, 4 + seed % 3, 2 + seed % 5) for seed in range(24)]
    config = make_config(epochs=2.0, batch_size=8, warmup_steps=1, validate_every=3, checkpoint_every=3)
    states: list[Path] = []
    kept: list[dict[str, Tensor]] = []

    def keep_state(state: dict[str, Any], record: dict[str, Any]) -> None:
        states.append(tmp_path / f"{record['step']}.pt")
        save_state(state, states[-1])

    hooks = Hooks(lambda _: None, lambda weights, _: kept.append(weights), keep_state)
    whole = load_model(folder, implementation="transformers")
    best = train(whole, pairs, pairs[:8], config, hooks)
    assert [path.stem for path in states] == ["3", "6"]
    assert best["validation_loss"].keys() == {"full", "skipdecode 2"}
    resumed = load_model(folder, implementation="transformers")
    quiet = Hooks(lambda _: None, lambda *_: None, lambda *_: None)
    assert train(resumed, pairs, pairs[:8], config, quiet, load_state(states[0]))["mean"] == best["mean"]
    for (name, wanted), found in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    assert kept
    save_model(resumed, tmp_path / "saved")
    again = load_model(tmp_path / "saved", implementation="transformers")
    for (name, wanted), found in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(found, wanted), name


def test_a_loss_of_routers_is_known(tmp_path: Path) -> None:
    """So that training, which does not add it, refuses the model."""
    save("qwen3_moe", tmp_path, output_router_logits=True)
    config = read_config(tmp_path)
    assert isinstance(config, WrappedConfig)
    assert config.has_router_loss
