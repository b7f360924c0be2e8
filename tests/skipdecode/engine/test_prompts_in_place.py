"""Prompts are fed where their rows are decoded, with the tokens of full depth, whoever ends at once."""

from collections.abc import Sequence

import pytest
import torch

from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.kv.slot_cache import SlotCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import SkipDecode, Unified
from skipdecode.speculative.generate_lossless import generate_lossless
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.lossless_models import FULL, L, models
from tests.support.naive import random_prompts
from tests.support.ties import is_tie

__all__ = ["models"]  # a fixture

LENGTHS = [3, 30, 1, 12, 70, 5]
SCHEDULE = Lossless(L, SkipDecode(L, 5, 2, 1, 14), 3)


@torch.inference_mode()
def supports_packed_prompts(batch: SpeculativeBatch) -> bool:
    return batch._feeds_in_place


def requests_of(lengths: Sequence[int], limits: Sequence[int], temperature: float = 0.0) -> list[Request]:
    prompts = random_prompts(list(lengths), seed=1, vocab=200)
    return [
        Request(str(row), prompt, Sampling(limit, temperature=temperature, ignore_eos=True))
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def check(model: Decoder, requests: Sequence[Request]) -> None:
    ours = generate_lossless(model, requests, SCHEDULE).completions
    for request, made in zip(requests, ours, strict=True):
        wanted = generate(model, [request], FULL).completions[0]
        assert made.finish_reason == wanted.finish_reason
        assert made.tokens == wanted.tokens or is_tie(model, request, made.tokens, wanted.tokens), request


@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        (LENGTHS, [20] * 6),
        (LENGTHS, [1, 20, 1, 9, 1, 12]),  # those left lie apart
        (LENGTHS, [12, 1, 1, 1, 1, 12]),
        (LENGTHS, [1, 1, 1, 7, 9, 1]),  # and side by side
        (LENGTHS, [1] * 6),
        ([1, 1, 1], [9, 1, 9]),
        ([1], [9]),
    ],
)
@pytest.mark.grid
def test_rows_have_their_tokens(
    models: dict[str, Decoder], name: str, temperature: float, lengths: list[int], limits: list[int]
) -> None:
    check(models[name], requests_of(lengths, limits, temperature))


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_rows_of_prompts_too_many_for_one_pass(
    models: dict[str, Decoder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass has its own part of the memory."""
    monkeypatch.setattr(Decoder, "max_prefill_tokens", 150)
    check(models[name], requests_of(LENGTHS, [9, 9, 1, 9, 9, 9]))


def test_nothing_is_copied(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels take prompts without their padding, into slots that lie apart too."""
    model, copied = models["opt"], list[int]()
    copy = SlotCache.copy
    monkeypatch.setattr(SlotCache, "copy", lambda cache, *rows: (copied.append(1), copy(cache, *rows))[1])
    batch = SpeculativeBatch(model, SCHEDULE)
    batch.join(requests_of(LENGTHS, [20, 1, 20, 1, 20, 1]))
    batch.join(requests_of(LENGTHS, [20] * 6))
    assert len(copied) == (0 if supports_packed_prompts(batch) else 2)


def test_a_join_that_fails_leaves_room_for_the_next(
    models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = models["llama"], requests_of(LENGTHS, [9] * 6)
    batch = SpeculativeBatch(model, Lossless(L, Unified(L, 3), 2))
    # when rows take their places, before prompts are fed, and after
    for owner, failing in ((SlotCache, "take"), (Decoder, "embed"), (Decoder, "argmax")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, failing, lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                batch.join(requests)
        assert batch.is_done
        batch.step()
    rows = batch.join(requests)
    while not batch.is_done:
        batch.step()
    wanted = generate(model, requests, FULL).completions
    for row, one in zip(rows, wanted, strict=True):
        assert row.tokens == one.tokens or is_tie(model, row.request, row.tokens, one.tokens)


def test_memory_is_that_of_the_longest(models: dict[str, Decoder]) -> None:
    """Prompt and new tokens of a row, in whole steps of columns; unused ones are never read, whatever they hold."""
    model = models["llama"]
    batch, requests = SpeculativeBatch(model, SCHEDULE), requests_of([70, 3], [20, 60])
    batch.reserve(2, requests)
    batch.join(requests)
    if not supports_packed_prompts(batch):
        pytest.skip("torch's attention reads masked columns, which must be finite")
    keys, values = batch._cache.memory_of(0)
    assert keys.shape == values.shape == (2, model.config.num_kv_heads, 128, model.config.head_dim)
    with torch.inference_mode():
        for memory in (keys, values):
            memory[0, :, 70:] = torch.nan
            memory[1, :, 3:] = torch.nan
    rows = batch.rows
    while not batch.is_done:
        batch.step()
    for row in rows:
        wanted = generate(model, [row.request], FULL).completions[0].tokens
        assert row.tokens == wanted or is_tie(model, row.request, row.tokens, wanted)
