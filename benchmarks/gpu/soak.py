"""The check `soak`: batches of ever new shapes with provoked faults, after which everything must be as before.

The model counts (`benchmarks.gpu.corpus`), so every greedy token is known, and a batch that a fault has reached shows.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from actors.batching.buckets import PlannedBatch
from actors.failures import RowFailure
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from benchmarks.gpu.corpus import DECODES, CorpusGenerator, corpus_generator, counting_requests, right_answer
from benchmarks.gpu.decoding_checks import MAX_GROWTH, reserved_bytes
from skipdecode.engine.cuda_graphs import CudaGraphs, GraphCapture, Work
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.schedules.schedule import Schedule

SOAK_S, DRY_SOAK_S = 60.0, 2.0
ANSWERS = (16, 128)
"""The shortest and the longest answer, in tokens: short ones, so that there are many batches."""
LEAST_WINDOWS = 24
SETTLED = 8
"""Windows after which torch has reserved what it needs; the largest of all is the first."""
BAD = "bad"
"""The id of the row at which a provoked error occurs."""


class ProvokedError(RuntimeError):
    """An error that a bug in decoding a row might raise."""


class FaultyGenerator(CorpusGenerator):
    """Raises what it is told to, where a batch is decoded."""

    is_out_of_memory = False

    def _run(
        self,
        batch: PlannedBatch,
        chosen: Sequence[Request],
        schedule: Schedule,
        should_continue: ShouldContinue = always,
    ) -> BatchResult:
        if self.is_out_of_memory and len(chosen) > 1:
            self.is_out_of_memory = False
            raise torch.OutOfMemoryError("provoked: CUDA out of memory")
        if any(request.id == BAD for request in chosen):
            raise ProvokedError("provoked by a row")
        return super()._run(batch, chosen, schedule, should_continue)


class FailsOnce(GraphCapture):
    """The first capture waits for the device, which no capture allows; other captures are as ever."""

    def __init__(self, captures: GraphCapture, device: torch.device) -> None:
        self._captures, self._number, self.has_failed = captures, torch.ones(1, device=device), False

    def warm_up(self, work: Work) -> None:
        self._captures.warm_up(work)

    def capture(self, work: Work) -> Work:
        if self.has_failed:
            return self._captures.capture(work)
        self.has_failed = True

        def waits() -> None:
            work()
            self._number.item()

        self._captures.capture(waits)
        if self._number.device.type == "cuda":
            raise CheckFailed("work that waits for the device was captured")
        raise ProvokedError("provoked: not permitted when stream is capturing")

    def forget(self) -> None:
        self._captures.forget()

    def held_bytes(self) -> int:
        return self._captures.held_bytes()


def check_soak(context: CheckContext) -> Found:
    """Over windows of mixed shapes, greedy and drawn, at full depth and 2x, with a batch that does not fit, a row that
    raises, one whose logits are no numbers and a capture that fails: all other rows come back right, memory stays flat,
    and graphs and caches are kept."""
    context.release()
    if not context.is_dry:
        context = replace(context, corpus_answers=ANSWERS)
    generator = corpus_generator(context, context.config, FaultyGenerator)
    workers = {name: generator.with_decode(decode) for name, decode in DECODES.items()}
    graphs = generator.graphs
    assert graphs is not None
    captured, rng = graphs.num_graphs, random.Random(context.seed)
    reserved, faults = list[int](), dict[str, object]()
    found: Found = {"graphs": graphs.describe(), "faults": faults}
    start, number = time.perf_counter(), 0
    while number < LEAST_WINDOWS or time.perf_counter() - start < (DRY_SOAK_S if context.is_dry else SOAK_S):
        worker, requests = workers[rng.choice(list(workers))], some_rows(context, rng, number)
        fault = FAULTS.get(number)
        expected = fault(worker, requests) if fault is not None else 0
        what = f"window {number} ({fault.__name__ if fault else 'no fault'})"
        result = worker(requests)
        failed = sum(isinstance(answer, RowFailure) for answer in result.answers)
        if failed != expected:
            raise CheckFailed(f"{what}: {failed} rows failed, not {expected}", found)
        if fault is not None:
            faults[fault.__name__] = {"rows": len(requests), "failed": failed, "batches": len(result.batches)}
        wrong = sum(
            answer.tokens != right_answer(context.config, request)
            for request, answer in zip(requests, result.answers, strict=True)
            if not isinstance(answer, RowFailure) and request.sampling.temperature == 0
        )
        if wrong:
            raise CheckFailed(f"{what}: {wrong} of {len(requests)} answers are wrong", found)
        reserved.append(reserved_bytes(context.device))
        number += 1
        found |= {"windows": number, "reserved_bytes": reserved[-1]}
        context.note(found)
    growth = max(reserved) - max(reserved[:SETTLED])
    found |= {"growth_bytes": growth, "graphs_late": graphs.num_late, "failure": graphs.failure}
    problems = {
        f"torch reserved {growth} bytes more over {number} windows": growth > MAX_GROWTH,
        f"of {captured} graphs {graphs.num_graphs} are left": graphs.num_graphs < captured,
        f"{graphs.num_late} graphs were captured late": graphs.num_late > 0,
        "caches of batches that have ended are still held": graphs.pool.free_bytes != graphs.nbytes,
    }
    if sentences := [sentence for sentence, is_so in problems.items() if is_so]:
        raise CheckFailed("; ".join(sentences), found)
    return found


def some_rows(context: CheckContext, rng: random.Random, number: int) -> list[Request]:
    """A window of one shape; the first and those with a fault are the largest, and every third is drawn, not greedy."""
    most = max(context.rows)
    count = most if number == 0 or number in FAULTS else rng.randint(2, most)
    rows = counting_requests(context, context.config, count, seed=number)
    if number and number % 3 == 0:
        return [replace(row, sampling=replace(row.sampling, temperature=0.9, top_p=0.95)) for row in rows]
    return rows


# --- faults: each has one occur in the next window of these rows, and says how many of them will fail


def out_of_memory(worker: FaultyGenerator, _requests: list[Request]) -> int:
    """A batch that does not fit is halved."""
    worker.is_out_of_memory = True
    return 0


def bad_row(_worker: FaultyGenerator, requests: list[Request]) -> int:
    """A row that raises, wherever it is, fails alone."""
    middle = len(requests) // 2
    requests[middle] = replace(requests[middle], id=BAD)
    return 1


def no_numbers(worker: FaultyGenerator, requests: list[Request]) -> int:
    """A row fails whose logits are NaN, as they are behind a token whose embedding is. What it leaves in the caches
    reaches no other row."""
    token = worker.model.config.vocab_size - 1
    assert all(token not in request.prompt_tokens for request in requests)
    with torch.no_grad():
        worker.model.embed_tokens.weight[token] = torch.nan
    middle = len(requests) // 2
    requests[middle] = replace(requests[middle], prompt_tokens=[token, *requests[middle].prompt_tokens[1:]])
    return 1


def failed_capture(worker: FaultyGenerator, _requests: list[Request]) -> int:
    """A capture that fails is tried once more, and others stay."""
    graphs = worker.graphs
    assert graphs is not None
    capture_again(graphs)
    return 0


def capture_again(graphs: CudaGraphs) -> None:
    """Captures one of the graphs anew, which fails at first. CheckFailed if it is not there then."""
    (plan, rows), real = next(iter(graphs._graphs)), graphs._captures
    del graphs._graphs[plan, rows]
    graphs._captures = FailsOnce(real, graphs.model.device)
    try:
        graphs.capture_all([plan], [rows])
    finally:
        graphs._captures = real
    if (plan, rows) not in graphs._graphs:
        raise CheckFailed(f"after a capture that failed nothing can be captured: {graphs.failure or graphs.full}")


FAULTS: dict[int, Callable[[FaultyGenerator, list[Request]], int]] = {
    10: out_of_memory,
    11: bad_row,
    13: no_numbers,
    16: failed_capture,
}
"""By the number of the window; greedy ones, whose tokens are known."""
