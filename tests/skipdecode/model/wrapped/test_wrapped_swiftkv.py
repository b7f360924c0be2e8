"""SwiftKV in models of transformers: tokens are those of the definition, by transformers' own layers; weights are
fitted, saved and loaded; what cannot have them is refused by name."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import check_folder, load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.config.wrapped import SWIFTKV_FILE
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.model.decoder import Decoder
from skipdecode.model.swiftkv import SwiftKV
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import Schedule
from skipdecode.training.loss import ResponseLoss
from skipdecode.training.swiftkv_init import SwiftKVLeastSquares
from tests.support.naive import random_prompts, requests_for, tokens_of
from tests.support.schedules import decodes
from tests.support.wrapped_models import VOCAB, L, naive_logits, save

FIRST, NUM_NEW = 2, 9
PROMPTS = random_prompts([9, 4, 6], vocab=VOCAB)
KINDS = ["gemma2", "olmo2", "qwen3_moe", "starcoder2", "cohere2"]
"""Windows and soft caps; norms of heads and none before attention; experts; biases; blocks side by side."""
FAST = ("olmo2", "gemma2")


def with_swiftkv(folder: Path, group_size: int) -> tuple[Decoder, SwiftKV]:
    """A model in which SwiftKV's weights differ from the model's own."""
    model = load_model(folder, implementation="transformers").with_swiftkv(FIRST, group_size)
    assert model.swiftkv is not None
    generator = torch.Generator().manual_seed(3)
    for parameter in model.swiftkv.parameters():
        parameter.data += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model, model.swiftkv


@contextmanager
def projecting_from_one_state(reference: PreTrainedModel, added: SwiftKV) -> Iterator[None]:
    """Meanwhile layers from FIRST on project K and V of all positions from what enters layer FIRST."""
    layers = reference.model.layers
    norm = getattr(layers[FIRST], "input_layernorm", nn.Identity())
    shared: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        shared[:] = [norm(named["hidden_states"] if "hidden_states" in named else given[0])]

    # the layer itself may have been given another forward already, which cuts its input
    handles = [layers[FIRST].register_forward_pre_hook(note, with_kwargs=True)]
    kv, at = added.kv, 0
    for group in range((L - FIRST) // added.group_size):
        leader = layers[added.leader(group)].self_attn
        for name in ("k_proj", "v_proj"):
            rows = slice(at, at + getattr(leader, name).out_features)
            at = rows.stop
            for number in range(added.leader(group), added.leader(group) + added.group_size):

                def project(_: nn.Module, given: tuple[Tensor], made: Tensor, rows: slice = rows) -> Tensor:
                    x = shared[0][:, : given[0].shape[1]]
                    return F.linear(x, kv.weight[rows], None if kv.bias is None else kv.bias[rows])

                handles.append(getattr(layers[number].self_attn, name).register_forward_hook(project))
    for number in range(FIRST, L):
        query = added.query(number)
        handles.append(
            layers[number].self_attn.q_proj.register_forward_hook(lambda _m, given, _made, query=query: query(given[0]))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def naive(
    reference: PreTrainedModel, added: SwiftKV, prompt: Sequence[int], answer: Sequence[int], schedule: Schedule
) -> Tensor:
    with projecting_from_one_state(reference, added):
        return naive_logits(reference, prompt, answer, schedule)


@pytest.mark.parametrize(
    ("kind", "group_size"),
    [
        (kind, size) if kind in FAST else pytest.param(kind, size, marks=pytest.mark.slow)
        for kind in KINDS
        for size in (1, 2)
        # of Cohere 2 every fourth layer has no rotary positions: a group's keys are then those of its first layer
        if (kind, size) != ("cohere2", 2)
    ],
)
def test_tokens_are_those_of_the_definition(kind: str, group_size: int, tmp_path: Path) -> None:
    """In static and in continuous batches, with packed weights, and teacher-forced."""
    reference = save(kind, tmp_path)
    model, added = with_swiftkv(tmp_path, group_size)
    requests = requests_for(PROMPTS, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
    schedules = [
        make_schedule(decodes(L)[method], num_layers=L, max_new_tokens=NUM_NEW, swiftkv_from=FIRST)
        for method in ("full", "skipdecode", "unified")
    ]
    made: list[list[list[int]]] = []
    for schedule in schedules:
        ours = tokens_of(generate(model, requests, schedule))
        assert tokens_of(generate_continuous(model, requests, schedule, max_rows=2)) == ours
        pairs = list(zip(PROMPTS, ours, strict=True))
        with torch.no_grad():
            forced = teacher_forced_logits(model, teacher_batch(pairs, 0), schedule)
        for row, (prompt, tokens) in enumerate(pairs):
            wanted = naive(reference, added, prompt, tokens, schedule)
            assert wanted.argmax(-1).tolist() == tokens
            torch.testing.assert_close(forced[row], wanted, rtol=1e-3, atol=1e-3)
        made.append(ours)
    whole = make_schedule({"method": "full"}, num_layers=L, max_new_tokens=NUM_NEW)
    plain = tokens_of(generate(model, requests, whole))
    assert plain == tokens_of(generate(model.without_swiftkv(), requests, whole))
    assert made[0] != plain
    model.pack()
    assert [tokens_of(generate(model, requests, schedule)) for schedule in schedules] == made
    assert tokens_of(generate(model, requests, whole)) == plain


def test_the_teachers_weights_change_nothing_in_the_first_layer(tmp_path: Path) -> None:
    """Which projects the same state."""
    save("olmo2", tmp_path)
    model = load_model(tmp_path, implementation="transformers").with_swiftkv(L - 1)
    requests = requests_for(PROMPTS, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
    plain, shared = (
        make_schedule({"method": "full"}, num_layers=L, max_new_tokens=NUM_NEW, swiftkv_from=first)
        for first in (None, L - 1)
    )
    assert tokens_of(generate(model, requests, shared)) == tokens_of(generate(model, requests, plain))


def test_gradients_reach_its_weights_alone(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    model, added = with_swiftkv(tmp_path, 1)
    added.requires_grad_(True)
    schedule = make_schedule({"method": "full"}, num_layers=L, max_new_tokens=NUM_NEW, swiftkv_from=FIRST)
    batch = teacher_batch([(prompt, [9, 7, 8]) for prompt in PROMPTS], 0)
    found = []
    for recompute in (False, True):
        model.zero_grad()
        ResponseLoss(model, recompute=recompute)(batch, schedule).sum().backward()
        found.append([parameter.grad.clone() for parameter in added.parameters()])
        assert all(bool(grad.any()) for grad in found[-1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_least_squares_find_the_teachers_keys_of_the_first_layer(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    model, added = with_swiftkv(tmp_path, 1)
    fit = SwiftKVLeastSquares(model)
    for seed in range(12):
        prompts = random_prompts([30, 30], seed, VOCAB)
        fit.add(teacher_batch([(prompt, [9, 7, 8]) for prompt in prompts], 0))
    fit.solve()
    own = model.hollow.layers[FIRST].self_attn
    wanted = torch.cat([own.k_proj.weight, own.v_proj.weight])
    torch.testing.assert_close(added.kv.weight[: len(wanted)], wanted, rtol=0.02, atol=0.02)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """And transformers opens the folder; weights that do not fit are named."""
    plain, folder = tmp_path / "plain", tmp_path / "swiftkv"
    save("olmo2", plain)
    model, _ = with_swiftkv(plain, 2)
    save_model(model, folder)
    check_folder(folder)
    again = load_model(folder)
    assert again.config.swiftkv == model.config.swiftkv
    wanted, found = model.state_dict(), again.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    stored = load_file(folder / SWIFTKV_FILE)
    save_file({name: value for name, value in stored.items() if name != "q.1.weight"}, folder / SWIFTKV_FILE)
    with pytest.raises(
        ValueError, match=r"swiftkv.safetensors: tensor 'q.1.weight' is None, swiftkv in config.json asks"
    ):
        check_folder(folder)
    (folder / SWIFTKV_FILE).unlink()
    with pytest.raises(
        ValueError, match=r"swiftkv.safetensors: cannot be read, and swiftkv in config.json asks for it"
    ):
        check_folder(folder)


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "deepseek_v3"])
def test_other_layouts_are_refused_by_the_layer(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"swiftkv": {"kv_layers": FIRST}}))
    with pytest.raises(ValueError, match=rf"swiftkv needs projections .*, and layer 0 \w+ has no q_proj.*'{kind}'"):
        read_config(tmp_path, "transformers")
