"""Llama and its relatives against Hugging Face (all layers, and some) and against a naive decoder (every method).

Random narrow models in float32: tokens are equal, logits within 1e-4. Kernels of every back end that this machine has.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import FullDepth, Schedule, SwiftKVPrefill
from tests.support.cpu_backends import NAMES, forced
from tests.support.families import FAMILY_MODELS, L, family_config
from tests.support.forward import feed, left_pad
from tests.support.naive import FFNRule, greedy, requests_for, tokens_of
from tests.support.naive_llama import naive_llama
from tests.support.schedules import schedules

TOLERANCE = 1e-4
QUICK = ["llama, one head of keys for 8, llama3 scaling", "qwen3", "stablelm", "gemma3_text"]  # what differs most
SCHEDULES = schedules(L)
SKIP = SCHEDULES["skipdecode"]
LENGTHS, NEW = [5, 17, 1, 9], 20
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder as Hugging Face saves it, of one of FAMILY_MODELS, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("family")
            torch.manual_seed(len(kind))
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family_config(kind))).eval()
            for name, parameter in model.named_parameters():
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.12)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def make_swiftkv(make_folder: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The same with SwiftKV's weights, which differ from the model's own."""

    @cache
    def make(kind: str, group_size: int) -> Path:
        model = load_model(make_folder(kind)).with_swiftkv(2, group_size)
        torch.manual_seed(3)
        assert model.swiftkv is not None
        for parameter in model.swiftkv.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp("swiftkv")
        save_model(model, folder)
        return folder

    return make


@pytest.fixture(params=list(FAMILY_MODELS))
def any_folder(request: pytest.FixtureRequest, make_folder: Make) -> Path:
    return make_folder(request.param)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, 320, (n,), generator=generator).tolist() for n in lengths]


def decoded(model: Decoder, prompts: list[list[int]], schedule: Schedule, num_new: int = NEW) -> list[list[int]]:
    return tokens_of(generate(model, requests_for(prompts, greedy(num_new)), schedule))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.grid
def test_full_depth_is_hugging_face(any_folder: Path, is_packed: bool) -> None:
    model = load_model(any_folder)
    made = decoded(model.pack() if is_packed else model, prompts_of(LENGTHS), FullDepth(L), 24)
    assert made == hugging_faces(any_folder)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", *NAMES])
def test_full_depth_is_hugging_face_on_every_back_end(any_folder: Path, backend: str) -> None:
    with forced(backend):
        model = load_model(any_folder).pack()
        made = decoded(model, prompts_of(LENGTHS), FullDepth(L), 24)
        rows = generate_continuous(model, requests_for(prompts_of(LENGTHS), greedy(24)), FullDepth(L), max_rows=3)
    assert made == tokens_of(rows) == hugging_faces(any_folder)


def hugging_faces(folder: Path) -> list[list[int]]:
    """24 tokens behind each prompt."""
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    made = []
    for prompt in prompts_of(LENGTHS):
        with torch.inference_mode():
            row = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
        made.append(row.tolist()[len(prompt) :])
    return made


def test_logits_are_hugging_faces(any_folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(any_folder)
    pairs = [(prompt, answer) for prompt, answer in zip(prompts_of(LENGTHS), prompts_of([7, 3, 9, 5], 1), strict=True)]
    with torch.inference_mode():
        made = teacher_forced_logits(load_model(any_folder), teacher_batch(pairs, 0), FullDepth(L))
        for (prompt, answer), logits in zip(pairs, made, strict=True):
            wanted = theirs(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            assert (logits[: len(answer)] - wanted).abs().max() <= TOLERANCE


def test_what_we_save_opens_in_hugging_face(any_folder: Path, tmp_path: Path) -> None:
    model = load_model(any_folder)
    save_model(model, tmp_path)
    assert read_config(tmp_path) == model.config
    theirs, again = AutoModelForCausalLM.from_pretrained(any_folder), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    tokens = torch.tensor([prompts_of([30])[0]])
    with torch.inference_mode():
        ours, wanted = again(tokens).logits, theirs(tokens).logits
    if family_of(model) in ("gemma3_text", "granite"):  # whose multipliers and offsets are folded into weights
        assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    else:
        assert torch.equal(ours, wanted)


def family_of(model: Decoder) -> str:
    return model.config.model_type


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.grid
def test_every_schedule_is_the_naive_decoder(any_folder: Path, schedule: Schedule) -> None:
    prompts = prompts_of(LENGTHS)
    eos = set(read_config(any_folder).eos_token_ids)
    wanted = [naive_llama(any_folder, prompt, schedule, NEW, eos)[0] for prompt in prompts]
    assert decoded(load_model(any_folder), prompts, schedule) == wanted
    assert decoded(load_model(any_folder).pack(), prompts, schedule) == wanted


@pytest.mark.parametrize("layers", [(0, 2, 3), (1, 5), (4,)], ids=str)
@pytest.mark.grid
def test_a_plan_is_the_shortened_model(any_folder: Path, layers: tuple[int, ...]) -> None:
    """Prompt and decode steps under one plan: Hugging Face's model of just those layers."""
    short = AutoModelForCausalLM.from_pretrained(any_folder)
    short.model.layers = torch.nn.ModuleList(short.model.layers[layer] for layer in layers)
    for at, layer in enumerate(short.model.layers):
        layer.self_attn.layer_idx = at
    short.config.num_hidden_layers = len(layers)
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = [short.config.layer_types[layer] for layer in layers]
    prompts, answers = prompts_of(LENGTHS), prompts_of([4] * len(LENGTHS), 1)
    model, plan = load_model(any_folder), LayerPlan.of_layers(layers, L)
    tokens, _, num_pad = left_pad(prompts)
    logits, cache = feed(model, tokens, num_pad, plan)
    made = [logits]  # [B, V] behind the prompt, and behind each token of the answer
    with torch.inference_mode():
        for column in torch.tensor(answers).T:
            made.append(model(column[:, None], (cache.length - num_pad)[:, None], cache, plan))
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            wanted = short(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :]
            assert (torch.stack([logits[row] for logits in made]) - wanted).abs().max() <= TOLERANCE


def some_threshold(folder: Path) -> float:
    """Half of the blocks that are looked at leave the state that much alike."""
    cosines = sorted(naive_llama(folder, prompts_of(LENGTHS)[0], FullDepth(L), 20, skip=FFNRule(2.0, 1, 1, 0))[2])
    return (cosines[len(cosines) // 2] + cosines[len(cosines) // 2 + 1]) / 2


Skipping = tuple[Callable[[Schedule], Schedule], dict[str, Any]]
"""What is put on a schedule, and what the naive decoder is told."""


def skipping(mode: str, folder: Path) -> Skipping:
    """FFN-SkipLLM by its definition."""
    if mode == "row":
        threshold = some_threshold(folder)
        return lambda base: SkipSaturated(base, 2, 1, 1, threshold), {"skip": FFNRule(threshold, 1, 1, 2)}
    return lambda base: SkipBand(base, 3, (2, 4)), {"skipped": lambda k: {2, 4} if k >= 3 else set()}


@pytest.mark.parametrize("mode", ["row", "band"])
@pytest.mark.grid
def test_skipped_blocks_are_those_of_the_naive_decoder(any_folder: Path, mode: str) -> None:
    make, naive = skipping(mode, any_folder)
    assert_skips(any_folder, make(SKIP), naive)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["row", "band"])
@pytest.mark.parametrize("base", [base for base in SCHEDULES.values() if base != SKIP], ids=str)
@pytest.mark.grid
def test_skipped_blocks_on_every_schedule(make_folder: Make, mode: str, base: Schedule) -> None:
    make, naive = skipping(mode, make_folder("qwen3"))
    assert_skips(make_folder("qwen3"), make(base), naive)


@pytest.mark.parametrize("mode", ["row", "band"])
def test_skipped_blocks_above_swiftkv(make_swiftkv: Callable[[str, int], Path], mode: str) -> None:
    folder = make_swiftkv("qwen3", 2)
    make, naive = skipping(mode, folder)
    assert_skips(folder, make(SwiftKVPrefill(SKIP, 2)), naive, has_swiftkv=True)


def assert_skips(folder: Path, schedule: Schedule, naive: dict[str, Any], has_swiftkv: bool = False) -> None:
    prompts, eos = prompts_of(LENGTHS), set(read_config(folder).eos_token_ids)
    wanted = [naive_llama(folder, prompt, schedule, NEW, eos, has_swiftkv=has_swiftkv, **naive) for prompt in prompts]
    for model in (load_model(folder), load_model(folder).pack()):
        result = generate(model, requests_for(prompts, greedy(NEW)), schedule)
        assert tokens_of(result) == [tokens for tokens, _, _ in wanted]
        assert [c.ffns_run for c in result.completions] == [ran for _, ran, _ in wanted]


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("kind", sorted({kind.partition(",")[0] for kind in FAMILY_MODELS}))
@pytest.mark.grid
def test_swiftkv_is_the_naive_decoder(make_swiftkv: Callable[[str, int], Path], kind: str, group_size: int) -> None:
    folder, prompts = make_swiftkv(kind, group_size), prompts_of(LENGTHS)
    for base in (FullDepth(L), SKIP):
        wanted = [naive_llama(folder, prompt, base, 20, {2}, has_swiftkv=True)[0] for prompt in prompts]
        for model in (load_model(folder), load_model(folder).pack()):
            assert decoded(model, prompts, SwiftKVPrefill(base, 2)) == wanted


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), SwiftKVPrefill(SKIP, 2)], ids=str)
@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(k, marks=pytest.mark.slow) for k in FAMILY_MODELS if k not in QUICK)]
)
@pytest.mark.grid
def test_rows_of_different_ages_and_one_forced_pass_are_decoding(
    make_swiftkv: Callable[[str, int], Path], kind: str, schedule: Schedule
) -> None:
    folder, prompts = make_swiftkv(kind, 2), prompts_of([5, 17, 1, 9, 3, 12])
    wanted = decoded(load_model(folder), prompts, schedule)
    for model in (load_model(folder), load_model(folder).pack()):
        made = generate_continuous(model, requests_for(prompts, greedy(NEW)), schedule, max_rows=3).completions
        assert [completion.tokens for completion in made] == wanted
    with torch.inference_mode():
        batch = teacher_batch(list(zip(prompts, wanted, strict=True)), 0)
        forced: Tensor = teacher_forced_logits(load_model(folder), batch, schedule)
    assert [row[: len(tokens)].argmax(-1).tolist() for row, tokens in zip(forced, wanted, strict=True)] == wanted


def test_several_tokens_end_a_row(make_folder: Make) -> None:
    folder = make_folder("llama, linear scaling, several ends")
    rows = decoded(load_model(folder), prompts_of([6] * 12, 4), FullDepth(L), 60)
    ends = {row[-1] for row in rows if len(row) < 60}
    assert len(ends) > 1
    assert ends <= {2, 7, 9, 31}


def test_generation_config_says_what_ends_a_text(make_folder: Make, tmp_path: Path) -> None:
    raw = json.loads((make_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        read_config(tmp_path)
