"""Rows, tokens, hours and cost of a corpus, from its sample and what was measured.

Two windows of the sample's rows are cut into batches as a worker does, and priced by the cost model at the measured
level; each row has the length of a real answer. Left out: workers that share one machine's memory and slow each other
down.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from actors.batching.buckets import PlannedBatch, merged
from actors.batching.full_depth_sample import paired_batches
from actors.batching.prompt_scoring import is_scored_alone
from actors.generator import Generator
from actors.memory import MAX_BATCH_ROWS
from pipeline.config.job import JobConfig
from pipeline.estimate.measure import Measured, at_level, predicted_s, rows_by_step
from pipeline.estimate.sample import Sample
from pipeline.formatting import count, duration
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import Schedule

WINDOWS: Final = 2
SIMILAR: Final = 8  # answers that one is drawn from
# Seconds of a batch in a worker, over those in a process with the machine to itself, where decoding takes all cores:
# what is beside it holds one core for moments, and the others wait for it (docs/results/speed.md, What Ray costs).
BESIDE_RAY: Final = {"cpu": 1.2, "cuda": 1.0}
START_S: Final = 8.0  # Ray, its workers and the first reads, beside loading the model: a laptop, bytecode at hand


@dataclass(frozen=True)
class Estimate:
    """The estimate of a whole run. Values are None if they are not known, since this machine cannot load the model."""

    rows: int
    input_tokens: int
    """Prompt tokens of the rows that can be decoded."""
    output_tokens: int | None
    max_output_tokens: int
    """If no answer ends before its limit."""
    sampled_rows: int
    decoded_rows: int
    actors: int
    duration_s: float | None
    price_per_hour: float | None
    cost: float | None
    """In the currency of the price."""


@dataclass(frozen=True)
class Shape:
    """The properties of a run that an estimate depends on, beside its corpus."""

    rows: int
    window_rows: int
    actors: int
    baseline_fraction: float
    max_new_tokens: int


def count_tokens(sample: Sample, shape: Shape, price_per_hour: float | None) -> Estimate:
    """The part of an estimate that is known without decoding."""
    good = shape.rows * sample.good_share
    limits = [request.sampling.max_new_tokens for request in sample.requests]
    return Estimate(
        rows=shape.rows,
        input_tokens=round(good * sample.mean_prompt_tokens),
        output_tokens=None,
        max_output_tokens=round(good * sum(limits) / max(len(limits), 1)),
        sampled_rows=sample.num_rows,
        decoded_rows=0,
        actors=shape.actors,
        duration_s=None,
        price_per_hour=price_per_hour,
        cost=None,
    )


def forecast(
    generator: Generator, sample: Sample, measured: Measured, shape: Shape, price_per_hour: float | None
) -> Estimate:
    known = count_tokens(sample, shape, price_per_hour)
    answers = [new for _, new in measured.lengths]
    good = shape.rows * sample.good_share
    per_row_s = seconds_per_row(generator, sample.requests, measured, shape)
    per_row_s *= BESIDE_RAY[generator.device.type]
    duration_s = START_S + generator.load_s + good * per_row_s / shape.actors
    return Estimate(
        **vars(known)
        | {
            "output_tokens": round(good * sum(answers) / len(answers)),
            "decoded_rows": len(answers),
            "duration_s": duration_s,
            "cost": None if price_per_hour is None else price_per_hour * duration_s / 3600,
        }
    )


def seconds_per_row(generator: Generator, requests: Sequence[Request], measured: Measured, shape: Shape) -> float:
    """Seconds per row of one worker, passes at full depth included. `requests`: a sample, in the order of the input."""
    rng = random.Random(0)
    is_full = generator.schedule(shape.max_new_tokens) == generator.full
    total_s = full_s = 0.0
    num_rows = num_batches = 0
    for number in range(WINDOWS):
        start = number * max(len(requests) // WINDOWS, 1)
        window = [requests[(start + row) % len(requests)] for row in range(shape.window_rows)]
        new_of = [rng.choice(similar_answers(measured, len(request.prompt_tokens))) for request in window]
        for batch in batches_of_time(generator, window, new_of):
            chosen, new = [window[row] for row in batch.rows], [new_of[row] for row in batch.rows]
            total_s += batch_s(generator, measured, chosen, batch, new)
            num_rows += len(chosen)
            if not is_scored_alone(chosen[0]):  # otherwise it is never decoded at full depth
                full_s += 0.0 if is_full else batch_s(generator, measured, chosen, batch, new, generator.full)
                num_batches += 1
    run_batches = max(1, round(num_batches * shape.rows / shape.actors / num_rows))
    return (total_s + full_s * paired_batches(run_batches, shape.baseline_fraction) / run_batches) / num_rows


def batches_of_time(generator: Generator, window: Sequence[Request], new: Sequence[int]) -> list[PlannedBatch]:
    """Batches that take as long as the window: those that it is cut into. Where rows join as others end, a batch is of
    rows with about equally long answers, which fills it to its end just as well."""
    found, continuous = list[PlannedBatch](), dict[tuple[Schedule, int], list[PlannedBatch]]()
    for batch in generator.cut(window):
        first = window[batch.rows[0]]
        schedule = generator.schedule(first.sampling.max_new_tokens)
        if is_scored_alone(first) or not generator.uses_continuous_batching(schedule):
            found.append(batch)
        else:
            continuous.setdefault((schedule, batch.max_rows), []).append(batch)
    for (_, size), own in continuous.items():
        batch = merged(own)
        order = sorted(range(len(batch.rows)), key=lambda at: new[batch.rows[at]])
        found += [batch.of(order[at : at + size]) for at in range(0, len(order), size)]
    return found


def similar_answers(measured: Measured, num_prompt_tokens: int) -> list[int]:
    """Tokens of the answers to the prompts whose length is nearest, SIMILAR or all that are as near: long prompts often
    have long answers, and a batch is of prompts of about one length."""
    far = sorted(abs(prompt - num_prompt_tokens) for prompt, _ in measured.lengths)[:SIMILAR][-1]
    return [new for prompt, new in measured.lengths if abs(prompt - num_prompt_tokens) <= far]


def batch_s(
    generator: Generator,
    measured: Measured,
    chosen: Sequence[Request],
    batch: PlannedBatch,
    new: Sequence[int],
    schedule: Schedule | None = None,
) -> float:
    """Seconds of a batch whose answers have the lengths `new`."""
    carried = rows_by_step(generator, chosen, batch, new)
    prefill, decode = predicted_s(generator, measured.ceilings, chosen, batch, carried, schedule)
    rows = sum(carried) / len(carried) if carried else len(new)
    level = at_level(measured.levels, rows)
    return prefill * level.prefill + decode * level.decode


def window_rows(config: JobConfig, num_actors: int, num_rows: int, *, has_gpu: bool) -> int:
    """Rows an actor takes at a time: `window_batches` batches, but so few that every actor gets two windows or more."""
    size = config.actors.batch_size
    rows = MAX_BATCH_ROWS["cuda" if has_gpu else "cpu"] if size == "auto" else size
    return max(1, min(config.actors.batches_of_window(has_gpu=has_gpu) * rows, -(-num_rows // (2 * num_actors))))


def lines(estimate: Estimate) -> list[str]:
    """An estimate in words: tokens in and out, then time and cost."""
    about = f"corpus: {count(estimate.rows, 'row')}, about {estimate.input_tokens:,} prompt tokens and "
    if estimate.output_tokens is None:
        found = [f"{about}at most {estimate.max_output_tokens:,} new ones (from {count(estimate.sampled_rows, 'row')})"]
    else:
        found = [f"{about}{estimate.output_tokens:,} new ones ({count(estimate.decoded_rows, 'row')} decoded here)"]
    if estimate.duration_s is not None:
        found.append(f"expected: {hours(estimate.duration_s, estimate.cost)} with {count(estimate.actors, 'actor')}")
    return found


def hours(duration_s: float, cost: float | None) -> str:
    price = "" if cost is None else f", costs {cost:,.2f}"
    return f"{duration(duration_s)} ({duration_s / 3600:.2f} h{price})"
