"""Lossless decoding of very many rows against full depth, in batches as a run and an endpoint make them."""

import os
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request, Row
from skipdecode.engine.results import Completion
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.generate_lossless import generate_lossless
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.lossless_models import DRAFTS, FULL, Erratic, L, models
from tests.support.naive import greedy, random_prompts
from tests.support.ties import is_tie

__all__ = ["models"]  # a fixture


def newcomers(
    model: Decoder, pool: list[Request], controller: SpeculationController, rng: torch.Generator
) -> list[Row]:
    """As the continuous scheduler does it: rows join at any step."""
    batch, rows, waiting = SpeculativeBatch(model, controller.schedule, controller=controller), list[Row](), list(pool)
    while waiting or not batch.is_done:
        arriving = int(torch.randint(0, 9, (1,), generator=rng))
        if waiting and arriving:
            rows += batch.join(waiting[:arriving])
            waiting = waiting[arriving:]
        batch.step()
    return rows


def retried(
    model: Decoder, pool: list[Request], controller: SpeculationController, rng: torch.Generator
) -> list[Completion]:
    """As after the death of a worker: what was made is lost, and the rows are decoded again, in two other batches."""
    batch = SpeculativeBatch(model, controller.schedule, controller=controller)
    batch.join(pool)
    for _ in range(int(torch.randint(1, 9, (1,), generator=rng))):
        batch.step()
    middle = (len(pool) + 1) // 2
    parts = [part for part in (pool[:middle], pool[middle:]) if part]
    return [
        one
        for part in parts
        for one in generate_lossless(model, part, controller.schedule, controller=controller).completions
    ]


@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_very_many_rows(models: dict[str, Decoder]) -> None:
    """SKIPDECODE_LOSSLESS_ROWS of them (2,000) in batches of any size, closed ones, with newcomers, and decoded again:
    all that differ are no clear choices, and these are at most one in 10^5 tokens."""
    num_rows = int(os.environ.get("SKIPDECODE_LOSSLESS_ROWS", "2000"))
    rng = torch.Generator().manual_seed(7)
    differing, tokens, done, batches = list[str](), 0, 0, Counter[str]()
    while done < num_rows:
        size = int(torch.randint(1, 49, (1,), generator=rng))
        lengths = torch.randint(1, 40, (size,), generator=rng).tolist()
        model = models[("opt", "llama")[done % 2]]
        limits = torch.randint(1, 40, (size,), generator=rng).tolist()
        first, step, is_erratic = torch.randint(0, 3, (3,), generator=rng).tolist()
        temperatures = [(0.0, 0.6, 1.0)[(first + i * step) % 3] for i in range(size)]  # greedy ones among others, too
        prompts = random_prompts(lengths, seed=done, vocab=200)
        pool = [
            Request(f"{done}-{i}", prompt, greedy(limit, temperature=temperature, top_k=(0, 20)[i % 2]))
            for i, (prompt, limit, temperature) in enumerate(zip(prompts, limits, temperatures, strict=True))
        ]
        schedule = Lossless(L, DRAFTS[done % len(DRAFTS)], (None, 1, 3, 6)[done % 4])
        listed = DraftVocabulary(model.config.vocab_size, range(0, 200, 2), learns=False) if done % 5 == 0 else None
        controller = SpeculationController(schedule, LatencyModel(model.config, 4), vocabulary=listed)
        if is_erratic:
            schedule = Lossless(L, schedule.drafts, adaptive=True)
            controller = Erratic(schedule, model.config, done, listed)
        how = ("closed", "newcomers", "retried")[int(torch.randint(0, 3, (1,), generator=rng))]
        if how == "closed":
            ours: Sequence[Completion | Row] = generate_lossless(
                model, pool, schedule, controller=controller
            ).completions
        else:
            ours = (newcomers if how == "newcomers" else retried)(model, pool, controller, rng)
        full = generate(model, pool, FULL).completions
        for request, a, b in zip(pool, ours, full, strict=True):
            tokens += len(b.tokens)
            if (a.tokens, a.finish_reason) != (b.tokens, b.finish_reason):
                assert is_tie(model, request, a.tokens, b.tokens), request
                differing.append(f"{how} {request.id}: {a.tokens} for {b.tokens}")
        done += size
        batches[how] += size
    print(f"{dict(batches)} rows, {tokens} tokens; {len(differing)} rows differ where there is no clear choice:")
    print(*differing, sep="\n")
    assert len(differing) <= max(1, tokens / 1e5)
    assert min(batches.values()) > num_rows / 10
