"""Logits processors against transformers', bit for bit in float32, and whole generations in every kind of batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skipdecode.config.sampling import RepetitionDetection, Sampling
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.logits_processor import LogitsProcessor
from skipdecode.engine.request import REPETITION, Request, Row
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import SkipDecode
from skipdecode.speculative.generate_lossless import generate_lossless
from tests.support.examples import examples
from tests.support.hf_tokens import FULL, L, Load, LoadHF
from tests.support.naive import random_prompts
from tests.support.processed import processing

VOCAB, EOS, CPU = 50, 2, torch.device("cpu")


def by_transformers(logits: Tensor, row: Row, drafted: list[int]) -> Tensor:
    """[V] by transformers' processors and, for OpenAI's two penalties, by their formula."""
    sampling, prompt = row.request.sampling, row.request.prompt_tokens
    text = [*row.tokens, *drafted]
    ids, scores = torch.tensor([[*prompt, *text]]), logits.float()[None]
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[t], float(bias)] for t, bias in sampling.logit_bias])(ids, scores)
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    counts = torch.tensor(text, dtype=torch.int64).bincount(minlength=VOCAB).float()
    scores = scores - (counts > 0).float() * sampling.presence_penalty - counts * sampling.frequency_penalty
    ends = [*([] if sampling.ignore_eos else [EOS]), *sampling.stop_token_ids]
    if sampling.min_new_tokens and ends:
        processor = MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, ends, device="cpu")
        scores = processor(ids, scores)
    if sampling.has_min_p:
        warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
        warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        warped = LogitsProcessorList([*warpers, MinPLogitsWarper(sampling.min_p)])(ids, scores)
        scores = scores.masked_fill(warped == -torch.inf, -torch.inf)
    return scores[0]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, list[int]]:
    tokens = st.integers(0, VOCAB - 1)
    sampling = Sampling(
        max_new_tokens=20,
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 7])),
        top_p=draw(st.sampled_from([1.0, 0.6])),
        ignore_eos=draw(st.booleans()),
        **draw(processing(20, VOCAB)),
    )
    row = Row(Request("", draw(st.lists(tokens, min_size=1, max_size=9)), sampling))
    row.tokens = draw(st.lists(tokens, max_size=9))
    return row, draw(st.lists(tokens, max_size=5))


@settings(max_examples=examples(100))
@given(some=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_logits_are_those_of_transformers(some: list[tuple[Row, list[int]]], seed: int) -> None:
    """Rows beside each other, with drafts that come and go, and tokens that are read in between."""
    processor, generator = LogitsProcessor([EOS], VOCAB, CPU), torch.Generator().manual_seed(seed)
    own = [row for row, _ in some]
    for _ in range(3):
        logits = torch.randn(len(some), VOCAB, generator=generator) * 3
        before = logits.clone()
        for drafts in ([drafted for _, drafted in some], [drafted[:2] for _, drafted in some], []):
            made = processor(logits, own, drafts)
            for at, row in enumerate(own):
                wanted = by_transformers(logits[at], row, drafts[at] if drafts else [])
                assert torch.equal(made[at], wanted), row.request.sampling
        assert torch.equal(logits, before), "the model's logits are wanted for log-probabilities"
        for row, drafted in some:
            row.tokens += drafted[:1]


def test_rows_that_ask_for_nothing_keep_the_logits() -> None:
    logits = torch.randn(2, VOCAB, dtype=torch.bfloat16)
    plain, asking = (Row(Request("", [1, 2], Sampling(**keys))) for keys in ({}, {"presence_penalty": 1.0}))
    processor = LogitsProcessor([EOS], VOCAB, CPU)
    assert processor(logits, [plain, plain]) is logits
    asking.tokens = [7]
    made = processor(logits, [plain, asking])
    assert torch.equal(made[0], logits[0].float())
    assert made[1, 7] == logits[1, 7].float() - 1


# Whole generations

GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8, "min_new_tokens": 12},
    {"logit_bias": ((5, 4.0), (211, -100.0)), "min_new_tokens": 3},
]


@pytest.mark.parametrize("keys", GREEDY)
def test_greedy_texts_are_those_of_hf_generate(
    ending_checkpoint: Callable[[str], Path], ours: Load, hf: LoadHF, keys: dict[str, Any]
) -> None:
    """In a static batch beside rows that ask for nothing, in a continuous one, and losslessly."""
    folder = ending_checkpoint("125m")
    model, reference = ours(folder), hf(folder)
    prompts, eos = random_prompts([5, 12, 3, 9], seed=4), list(model.config.eos_token_ids)
    options = dict(keys)
    if bias := options.pop("logit_bias", None):
        options["sequence_bias"] = [[[token], value] for token, value in bias]
    wanted = [
        reference.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False, eos_token_id=eos, **options)
        for p in prompts
    ]
    plain = [Request(f"plain-{i}", p, Sampling(20)) for i, p in enumerate(prompts)]
    asking = [Request(f"asking-{i}", p, Sampling(20, **keys)) for i, p in enumerate(prompts)]
    together = [request for pair in zip(plain, asking, strict=True) for request in pair]
    alone = [c.tokens for c in generate(model, plain, FULL).completions]
    batches = {
        "static": [c.tokens for c in generate(model, together, FULL).completions],
        "continuous": [c.tokens for c in generate_continuous(model, together, FULL, max_rows=3).completions],
        "lossless": [
            c.tokens for c in generate_lossless(model, together, Lossless(L, SkipDecode(L, 3, 3, 1, 1), 3)).completions
        ],
    }
    for name, made in batches.items():
        assert made[::2] == alone, name
        assert made[1::2] == [tokens[0, len(p) :].tolist() for tokens, p in zip(wanted, prompts, strict=True)], name
    assert batches["static"][1::2] != alone


def test_min_p_draws_among_what_transformers_leaves(
    ending_checkpoint: Callable[[str], Path], ours: Load, hf: LoadHF
) -> None:
    """Sampled rows with top_k, top_p and min_p: every first token is one that transformers' warpers leave."""
    folder, (prompt,) = ending_checkpoint("125m"), random_prompts([6], seed=1)
    model = ours(folder)
    sampling = Sampling(1, temperature=2.0, top_k=20, top_p=0.9, min_p=0.3)
    requests = [Request(str(i), prompt, sampling) for i in range(300)]
    made = {c.tokens[0] for c in generate(model, requests, FULL).completions}
    scores = hf(folder)(torch.tensor([prompt])).logits[:, -1].float()
    warpers = [TemperatureLogitsWarper(2.0), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.3)]
    left = LogitsProcessorList(warpers)(torch.tensor([prompt]), scores)[0].softmax(-1)
    assert made <= set(left.nonzero()[:, 0].tolist())
    assert made >= set((left > 0.05).nonzero()[:, 0].tolist())
    assert len(made) > 1


# What ends a row


def repeats(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """vLLM's definition: the end of the text is `min_count` times one pattern."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        end = list(tokens[-size * detection.min_count :])
        if len(end) == size * detection.min_count and end == end[-size:] * detection.min_count:
            return True
    return False


@settings(max_examples=examples(200))
@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(2, 4),
)
def test_a_loop_ends_a_row_where_vllm_sees_it(tokens: list[int], sizes: list[int], count: int) -> None:
    detection = RepetitionDetection(sizes[1], sizes[0], count)
    row = Row(Request("", [1], Sampling(100, repetition_detection=detection)))
    row.take(tokens, (), None)
    end = next((n for n in range(1, len(tokens) + 1) if repeats(tokens[:n], detection)), None)
    assert (row.tokens, row.finish_reason) == (tokens[:end], None if end is None else REPETITION)


def test_a_row_that_is_to_be_longer_goes_on_in_a_loop() -> None:
    row = Row(Request("", [1], Sampling(9, min_new_tokens=7, repetition_detection=RepetitionDetection(1, 1, 4))))
    row.take([5] * 9, (), None)
    assert (len(row.tokens), row.finish_reason) == (7, REPETITION)


def test_stop_tokens_end_a_row_even_where_eos_does_not() -> None:
    row = Row(Request("", [1], Sampling(9, ignore_eos=True, stop_token_ids=(8,))))
    row.take([5, EOS, 8, 5], (EOS,), None)
    assert (row.tokens, row.finish_reason) == ([5, EOS, 8], "stop")
