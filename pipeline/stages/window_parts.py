"""One part of a window: decoded, with the ledger told before and after, and the collector told what it took.

Others decide which rows make a part: the ledger (`pipeline.stages.poison_isolation`), or who shares
(`pipeline.stages.window_sharing`).
"""

import time
from collections.abc import Sequence, Set
from typing import cast

from actors.generator import Answer, RowFailure
from pipeline.cluster.ray_handles import AttemptTrackerHandle, BatchRecord, CollectorHandle, fetch
from pipeline.fault_injection import fault_point
from pipeline.stages.model_thread import Decoder
from skipdecode.engine.request import Request


class Parts:
    """Decodes one part at a time; the collector hears what it took."""

    def __init__(
        self, worker: str, decoder: Decoder, attempts: AttemptTrackerHandle, collector: CollectorHandle
    ) -> None:
        self.worker, self.decoder, self.attempts, self.collector = worker, decoder, attempts, collector
        self.num_windows = 0
        """Windows of this worker's own that it has begun."""

    def take(self, requests: Sequence[Request], is_borrowed: bool = False) -> dict[str, Answer]:
        """Answers by row id; the ledger knows meanwhile who has these rows in hand."""
        fetch(self.attempts.take.remote(self.worker, tuple(request.id for request in requests)))
        if is_borrowed:
            fault_point("help")
        answers = self.decode(requests, is_borrowed=is_borrowed)
        self.attempts.decoded.remote(self.worker, None)
        return answers

    def decode(
        self, requests: Sequence[Request], known: Set[str] = frozenset(), is_borrowed: bool = False
    ) -> dict[str, Answer]:
        """Answers by row id, of rows that the ledger knows to be in hand; rows `known` from before count no more."""
        started_at = time.time()
        for request in requests:
            fault_point(f"decode {request.id}")
        result = self.decoder.decode(requests, may_measure=not is_borrowed)
        answers = {request.id: answer for request, answer in zip(requests, result.answers, strict=True)}
        fresh = [answer for row, answer in answers.items() if row not in known]
        failed = sum(isinstance(answer, RowFailure) for answer in fresh)
        batches = cast("list[BatchRecord]", result.batches)  # `actors` knows no records of the pipeline's
        self.count(started_at, len(fresh), failed, batches, is_borrowed)
        return answers

    def count(
        self,
        started_at: float,
        rows: int,
        failed: int,
        batches: Sequence[BatchRecord] = (),
        is_borrowed: bool = False,
    ) -> None:
        """Tells the collector of rows that are done with since `started_at` (epoch seconds)."""
        if rows or batches:
            number = 0 if is_borrowed else self.num_windows
            self.collector.window_done.remote(
                self.worker,
                {"started_at": started_at, "ended_at": time.time(), "rows": rows, "failed": failed, "window": number},
                batches,
            )
