"""The check `corpus` of `make gpu`: a model that counts, the ceiling of the device, and what the check finds."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import corpus
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from benchmarks.gpu.corpus import (
    TOKENIZER,
    Lengths,
    carried_rows,
    ceiling_s,
    chain,
    check_corpus,
    counting_model,
    counting_requests,
    right_answer,
)
from benchmarks.gpu.method_checks import SMALL_GROUPED
from benchmarks.gpu_check import TINY, TINY_GROUPED
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.generate import generate
from skipdecode.families import config_of, released
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth
from tests.support.graphs import cpu_as_cuda

SIZES = {"rows": (2, 4), "cache_bytes": 1 << 20, "corpus_prompts": (3, 12), "corpus_answers": (2, 20), "is_dry": True}
H100 = Ceilings(746e12, 2.66e12, 1e-6)


def context(raw: dict[str, object] = TINY) -> CheckContext:
    return CheckContext(torch.device("cpu"), config_of(raw), **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [TINY, TINY_GROUPED, TINY_GROUPED | {"tie_word_embeddings": True}])
def test_the_model_counts_to_its_eos(raw: dict[str, object]) -> None:
    """At any depth, by torch's operators in bfloat16, for every length of an answer."""
    config = config_of(raw)
    model = counting_model(config, 20, device="cpu", dtype=torch.bfloat16)
    requests = counting_requests(context(raw), config, 40)
    lengths = {len(right_answer(config, request)) for request in requests}
    assert min(lengths) == 2
    assert max(lengths) == 20
    for schedule in (
        FullDepth(3),
        make_schedule({"method": "skipdecode", "speedup": 2}, num_layers=3, max_new_tokens=20),
    ):
        for request, made in zip(requests, generate(model, requests, schedule).completions, strict=True):
            assert made.tokens == right_answer(config, request)
            assert made.finish_reason == "stop"


def test_a_vocabulary_too_small_to_count() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 16 tokens has no chain of 20"):
        counting_requests(context(), config_of(TINY | {"vocab_size": 16}), 1)


def test_the_ceiling_by_hand() -> None:
    """OPT-1.3B: 2.63 GB of weights, read once per step of all rows that fit; 196,608 bytes of keys and values a token,
    read by each row; 2.6 GFLOP a prompt token."""
    lengths, room = Lengths([576] * 1000, [321] * 1000), 40 * 10**9
    found = ceiling_s(released("opt-1.3b"), lengths, H100, room, 2)
    seen = 576 + 161
    rows = room / (196_608 * seen)
    step = (2.63e9 + rows * seen * 196_608) / 2.66e12
    prompts = 1000 * 576 * 2.42e9 / 746e12
    assert found == pytest.approx(prompts + 320_000 / rows * step, rel=0.04)
    twice = replace(H100, bytes_per_s=2 * H100.bytes_per_s)
    assert found / 2 < ceiling_s(released("opt-1.3b"), lengths, twice, room, 2) < 0.62 * found, "prompts are products"
    assert ceiling_s(released("opt-1.3b"), lengths, H100, room // 10, 2) > 1.3 * found, "fewer rows share the weights"
    assert ceiling_s(released("opt-1.3b"), Lengths([576], [1]), H100, room, 2) == pytest.approx(
        prompts / 1000, rel=0.05
    )


def test_rows_that_are_carried() -> None:
    """As in `StaticBatch`, which drops what has ended once half of a batch has."""
    assert carried_rows([5, 5, 2, 2, 1]) == [5, 2, 2, 2]
    assert carried_rows([4]) == [1, 1, 1]
    assert carried_rows([1, 1]) == []


@pytest.mark.parametrize("name", ["opt-1.3b", "smollm2-1.7b", "llama-3.1-8b"])
def test_released_shapes_have_a_chain_and_a_tokenizer(name: str) -> None:
    config = released(name)
    Tokenizer(TOKENIZER, config)
    tokens = chain(config, 512)
    assert len(set(tokens)) == 513
    assert tokens[-1] in config.eos_token_ids
    assert config.max_position_embeddings >= 1024 + 512


@pytest.mark.parametrize("raw", [TINY, pytest.param(TINY_GROUPED, marks=pytest.mark.slow)])
def test_a_corpus_on_the_cpu(raw: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CUDA back end with torch's operators: right answers, sane shares; a wrong answer is found."""
    monkeypatch.setattr("benchmarks.gpu.check_context.measure_ceilings", lambda *_: H100)
    notes: list[Found] = []
    with cpu_as_cuda():
        tried = replace(context(raw), note=lambda found: notes.append(dict(found)))
        found = check_corpus(tried)
        assert notes[0]["schedules"] is found["schedules"]
        assert set(notes[0]["predicted_tokens_per_s"]) == {"full", "2x"}, "written before anything runs"  # type: ignore[call-overload]
        assert found["rows"] == 12
        for one in found["schedules"].values():  # type: ignore[attr-defined]
            assert one["wrong_rows"] == one["splits"] == 0
            assert 0 < one["share_of_prompts"] < 1
            assert 0.3 < one["useful_rows"] <= 1
            assert 1 <= one["rows_per_step"] <= 4
            assert "after loading" not in one["graphs"]
        monkeypatch.setattr(corpus, "right_answer", lambda config, request: [7] * 3)
        with pytest.raises(CheckFailed, match="full: 12 of 12 answers are wrong"):
            check_corpus(context(raw))


def test_grouped_heads_are_grouped() -> None:
    config = config_of(SMALL_GROUPED)
    assert config.num_kv_heads < config.num_attention_heads
