"""Models of transformers: tokens are those of `generate` at full depth, and of the definition under schedules."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from skipdecode.backends.torch_sampling import NO_TOKEN
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.results import LosslessStats
from skipdecode.families import FAMILIES
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.from_config import listed_schedule, make_schedule
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth
from skipdecode.speculative.generate_lossless import generate_lossless
from tests.support.naive import requests_for, tokens_of
from tests.support.schedules import decodes
from tests.support.wrapped_models import INSTALLED_TYPES, MODEL_TYPES, L, naive_logits, save

NUM_NEW = 9
FAST = ("gemma3_text", "gpt_neox", "gpt_oss", "mistral", "phi3", "phimoe", "qwen3_moe")
"""Windows, soft caps, sinks, fused projections, parallel blocks, rules in the mask alone, experts."""
KINDS = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in INSTALLED_TYPES]
WHOLE_LAYERS = ("codegen", "cohere", "cohere2", "gpt_neox", "gptj", "phi")
"""Types whose feed-forward block is beside the attention, so that layers run whole or not at all."""
PROMPTS = [
    torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 4, 6)
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Decoder]]:
    """`both(kind)`: a model of transformers, and ours of the folder it was saved in."""

    @cache
    def make(kind: str) -> tuple[PreTrainedModel, Decoder]:
        folder: Path = tmp_path_factory.mktemp(kind)
        reference = save(kind, folder)
        return reference, load_model(folder, implementation="transformers").pack()

    return make


def decoded(model: Decoder, method: str) -> list[list[int]]:
    schedule = make_schedule(decodes(L)[method], num_layers=L, max_new_tokens=NUM_NEW)
    sampling = Sampling(max_new_tokens=NUM_NEW, ignore_eos=True)
    return tokens_of(generate(model, requests_for(PROMPTS, sampling), schedule))


def greedy_text(reference: PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    """The tokens of transformers' `generate`, which no token ends."""
    ids = torch.tensor([prompt])
    made = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=-7
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]) -> None:
    reference, model = both(kind)
    assert model.config.implementation == "transformers"
    ours = decoded(model, "full")
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        assert tokens == greedy_text(reference, prompt, NUM_NEW)
    assert len({token for row in ours for token in row}) > 5


def test_what_is_no_token_can_be_fed(both: Callable[[str], tuple[PreTrainedModel, Decoder]]) -> None:
    """A device would be lost over an index out of range, and the host learns late that a row has no token."""
    _, model = both("mistral")
    with torch.inference_mode():
        assert model.embed(torch.tensor([[NO_TOKEN], [7]]), torch.tensor([[3], [3]])).shape[:2] == (2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_skip_as_defined(kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]) -> None:
    reference, model = both(kind)
    for method in ("skipdecode", "early_exit", "unified"):
        schedule = make_schedule(decodes(L)[method], num_layers=L, max_new_tokens=NUM_NEW)
        ours = decoded(model, method)
        requests = requests_for(PROMPTS, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
        assert tokens_of(generate_continuous(model, requests, schedule, max_rows=2)) == ours, method
        pairs = list(zip(PROMPTS, ours, strict=True))
        with torch.no_grad():
            forced = teacher_forced_logits(model, teacher_batch(pairs, 0), schedule)
        for row, (prompt, tokens) in enumerate(pairs):
            naive = naive_logits(reference, prompt, tokens, schedule)
            assert naive.argmax(-1).tolist() == tokens, method
            torch.testing.assert_close(forced[row], naive, rtol=1e-3, atol=1e-3)


def long_prompts() -> list[list[int]]:
    """Longer than the windows several times; the first, and the last two, have a prefix in common."""
    prompts = [PROMPTS[0] + PROMPTS[2] + PROMPTS[0][::-1], *PROMPTS[1:]]
    return prompts + [prompts[0][:16] + tail for tail in (PROMPTS[1], PROMPTS[2])]


LONG_SHARING = [[16], [], [], [16], [16]]
LONG_NEW = 17


@pytest.mark.parametrize(
    "kind", [kind if kind == "gpt_oss" else pytest.param(kind, marks=pytest.mark.slow) for kind in INSTALLED_TYPES]
)
def test_lossless_tokens_are_those_of_transformers(
    kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]
) -> None:
    """Of rows of unequal age with shared prefixes, whose prompts and answers are several times longer than windows,
    with drafts and without."""
    reference, model = both(kind)
    prompts = long_prompts()
    sharing = share_prefixes(prompts, LONG_SHARING)
    requests = requests_for(prompts, Sampling(max_new_tokens=LONG_NEW, ignore_eos=True))
    drafts = {**decodes(L)["skipdecode"], "lossless": True, "draft_tokens": 3}
    lossless = make_schedule(drafts, num_layers=L, max_new_tokens=LONG_NEW)
    assert isinstance(lossless, Lossless)
    wanted = [greedy_text(reference, prompt, LONG_NEW) for prompt in prompts]
    made = generate_lossless(model, requests, lossless, max_rows=3, sharing=sharing)
    assert tokens_of(made) == wanted
    assert isinstance(made.stats, LosslessStats)
    assert sum(made.stats.drafted_at) > 20
    full = FullDepth(L)
    assert tokens_of(generate_continuous(model, requests, full, max_rows=3, sharing=sharing)) == wanted


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gemma2", "gpt_neox") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in INSTALLED_TYPES
    ],
)
def test_feed_forward_blocks_are_left_out_as_defined(
    kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]
) -> None:
    """Of chosen layers, after a step that skips nothing; where a layer has no such block behind its attention, that is
    refused."""
    reference, model = both(kind)
    decode = {**decodes(L)["skipdecode"], "ffn_skip": {"mode": "fixed", "layers": [1, 2, 4], "warmup_tokens": 1}}
    assert (model.config.why_whole_layers is not None) == (kind in WHOLE_LAYERS)
    if kind in WHOLE_LAYERS:
        with pytest.raises(ValueError, match=rf"decode.ffn_skip: layer 0 of model_type '{kind}'.* runs whole or not"):
            listed_schedule(model.config, decode, NUM_NEW)
        return
    schedule = listed_schedule(model.config, decode, NUM_NEW)
    requests = requests_for(PROMPTS, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
    made = generate(model, requests, schedule)
    ours = tokens_of(made)
    assert made.stats.ffns_run < made.stats.layers_run
    assert tokens_of(generate_continuous(model, requests, schedule, max_rows=2)) == ours
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        assert naive_logits(reference, prompt, tokens, schedule).argmax(-1).tolist() == tokens


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "phimoe"])
def test_prefixes_are_shared(kind: str, both: Callable[[str], tuple[PreTrainedModel, Decoder]]) -> None:
    """By copies of their keys and values; windows reach from a row's own tokens into the prefix."""
    _, model = both(kind)
    head = PROMPTS[0][:8]
    prompts = [head + tail for tail in (PROMPTS[1], PROMPTS[2], PROMPTS[1][:1])] + PROMPTS[1:]
    sharing = share_prefixes(prompts, [[len(head)]] * 3 + [[]] * 2)
    assert sharing is not None
    requests = requests_for(prompts, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
    schedule = make_schedule(decodes(L)["skipdecode"], num_layers=L, max_new_tokens=NUM_NEW)
    alone, shared = (tokens_of(generate(model, requests, schedule, sharing=one)) for one in (None, sharing))
    assert shared == alone


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).parents[4] / "docs/models.md").read_text(encoding="utf-8")
    foreign = [kind for kind in MODEL_TYPES if kind not in FAMILIES]
    for before, wanted in (
        ("Tests compare these types, with small random weights:", foreign),
        ("of the types above for", [kind for kind in foreign if kind in WHOLE_LAYERS]),
    ):
        assert re.findall("`([a-z0-9_]+)`", page.partition(before)[2].partition(".\n")[0]) == wanted
