"""Decodes a sample on this machine to estimate the corpus: real answer lengths, and the ratio of measured to predicted
time.

The cost model knows how time depends on prompts, layers and running rows. The ratio is measured twice: on the sample,
and for a few steps on a batch of the run's size with synthetic tokens. Start-up is not included, nor are reading and
writing, which a run does while it decodes.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from actors.batching.buckets import PlannedBatch, bucket_of
from actors.ceilings import measure_ceilings
from actors.generator import Generator
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import CHECK_EVERY, carried_rows
from skipdecode.model.devices import dtype_name
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import Schedule

MAX_DECODED_ROWS: Final = 64
PROBE_TOKENS: Final = 12  # new ones of each made-up row
PROBES_S: Final = 5.0  # it is repeated for so long: the first of its shape is slow, and others may disturb one
MAX_PROBES: Final = 15


@dataclass(frozen=True)
class Level:
    """The ratio of measured to predicted seconds, for batches of about `rows` rows."""

    rows: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Measured:
    lengths: list[tuple[int, int]]
    """Tokens of the prompt and of the answer, of each row that was decoded."""
    levels: tuple[Level, ...]
    """Sorted by rows."""
    ceilings: Ceilings


def measure(generator: Generator, requests: Sequence[Request]) -> Measured:
    """Decodes the requests, at most MAX_DECODED_ROWS of them."""
    chosen = list(requests[:MAX_DECODED_ROWS])
    dtype = dtype_name(generator.dtype)
    ceilings = generator.ceilings or measure_ceilings(str(generator.device), dtype)
    results = generator.decode_batches(chosen)
    rows = [row for batch, _ in results for row in batch.rows]
    answers = [answer for _, result in results for answer in result.completions]
    lengths = [(len(chosen[row].prompt_tokens), len(answer.tokens)) for row, answer in zip(rows, answers, strict=True)]
    sample = level_of(generator, ceilings, chosen, results)
    probe = _probe(generator, chosen, lengths)
    begun = time.perf_counter()
    probes: list[Level] = []
    while not probes or (time.perf_counter() - begun < PROBES_S and len(probes) < MAX_PROBES):
        probes.append(level_of(generator, ceilings, probe, generator.decode_batches(probe)))
    warm = probes[1:] or probes
    usual = Level(warm[0].rows, median(at.prefill for at in warm), median(at.decode for at in warm))
    levels = {level.rows: level for level in (sample, usual)}
    return Measured(lengths, tuple(levels[rows] for rows in sorted(levels)), ceilings)


def level_of(
    generator: Generator,
    ceilings: Ceilings,
    requests: Sequence[Request],
    results: Sequence[tuple[PlannedBatch, BatchResult]],
) -> Level:
    prefill = decode = predicted_prefill = predicted_decode = 0.0
    row_steps = steps = 0
    for batch, result in results:
        carried = result.stats.batch_rows
        predicted = predicted_s(generator, ceilings, [requests[row] for row in batch.rows], batch, carried)
        predicted_prefill, predicted_decode = predicted_prefill + predicted[0], predicted_decode + predicted[1]
        prefill, decode = prefill + result.stats.prefill_s, decode + result.stats.decode_s
        row_steps, steps = row_steps + sum(carried), steps + len(carried)
    rows = row_steps / steps if steps else fmean(len(batch.rows) for batch, _ in results)
    at_prompts = prefill / predicted_prefill if predicted_prefill else 1.0
    return Level(rows, at_prompts, decode / predicted_decode if predicted_decode else at_prompts)


def predicted_s(
    generator: Generator,
    ceilings: Ceilings,
    chosen: Sequence[Request],
    batch: PlannedBatch,
    carried: Sequence[int],
    schedule: Schedule | None = None,
) -> tuple[float, float]:
    """Predicted (prefill, decode) seconds of a batch with `carried` rows at each decode step.

    `schedule`: None for the batch's own."""
    own = generator.schedule(chosen[0].sampling.max_new_tokens)
    return predict_s(
        generator.model.config,
        schedule or own,
        ceilings,
        BatchShape(
            max(len(request.prompt_tokens) for request in chosen),
            carried,
            rows=len(chosen),
            shared_prefixes=generator.cutter.shared_prefix_shape(batch, chosen),
        ),
        itemsize=generator.dtype.itemsize,
        weight_itemsize=generator.model.weight_itemsize,
        kv_itemsize=generator.model.kv_itemsize,
    )


def rows_by_step(generator: Generator, chosen: Sequence[Request], batch: PlannedBatch, new: Sequence[int]) -> list[int]:
    """Rows at each decode step of a batch with answers of these lengths (`BatchStats.batch_rows`), including ended rows
    that have not been dropped."""
    longest = max(request.sampling.max_new_tokens for request in chosen)
    schedule = generator.schedule(longest)
    if isinstance(schedule, Lossless) or generator.uses_continuous_batching(schedule):
        return carried_rows(new, compact_at=1.0)  # ended rows leave at once
    if generator.config.deterministic:
        return [generator.batch_size(batch.bucket, longest)] * (max(new) - 1)
    return carried_rows(new, check_every=CHECK_EVERY[generator.device.type])


def at_level(levels: Sequence[Level], rows: float) -> Level:
    """Interpolates between the measured levels by the logarithm of their rows; beyond them takes the nearest."""
    if rows <= levels[0].rows or len(levels) == 1:
        return levels[0]
    if rows >= levels[-1].rows:
        return levels[-1]
    low, high = levels[0], levels[-1]
    share = math.log(rows / low.rows) / math.log(high.rows / low.rows)
    prefill, decode = (a + share * (b - a) for a, b in ((low.prefill, high.prefill), (low.decode, high.decode)))
    return Level(rows, prefill, decode)


def _probe(generator: Generator, chosen: Sequence[Request], lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """A batch of the run's size, of tokens at random that share nothing, as long as most prompts are."""
    buckets = [bucket_of(length, generator.config.length_buckets) for length, _ in lengths]
    bucket = max(set(buckets), key=buckets.count)
    length = round(fmean(size for (size, _), own in zip(lengths, buckets, strict=True) if own == bucket))
    base = chosen[0].sampling
    new = min(PROBE_TOKENS, base.max_new_tokens)  # 0: scored alone
    sampling = replace(base, max_new_tokens=new, ignore_eos=True, stop=())
    rng, vocabulary = random.Random(0), generator.model.config.vocab_size
    return [
        Request(
            f"probe-{row}",
            [rng.randrange(vocabulary) for _ in range(length)],
            sampling,
            chosen[0].top_logprobs,
            chosen[0].score_prompt,
        )
        for row in range(generator.batch_size(bucket, base.max_new_tokens))
    ]
