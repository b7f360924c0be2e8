"""The walk over a window in the parts that the ledger plans, so that a row that kills workers is found and parked.

Why the parts are as they are: `pipeline.stages.attempt_tracker`.
"""

import time
from collections.abc import Sequence

from actors.generator import Answer, RowFailure
from pipeline.cluster.ray_handles import fetch
from pipeline.schema import POISON_ROW
from pipeline.stages.attempt_tracker import StopRun
from pipeline.stages.window_parts import Parts
from pipeline.stages.window_sharing import Sharing
from skipdecode.engine.request import Request


class PoisonIsolation:
    """Decodes rows in the parts that the ledger plans; shares them where no row is suspected of anything."""

    def __init__(self, parts: Parts, sharing: Sharing) -> None:
        self._parts, self._sharing = parts, sharing

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order. StopRun when the ledger ends the run."""
        by_id = {request.id: request for request in requests}
        plan = fetch(self._parts.attempts.begin.remote(self._parts.worker, list(by_id)))
        if isinstance(plan, str):
            raise StopRun(plan)
        parked: dict[str, Answer] = {row: RowFailure(POISON_ROW, why) for row, why in plan.parked.items()}
        self._parts.count(time.time(), len(parked), len(parked))
        if self._sharing.is_on and plan.is_clear and plan.parts:
            answers = plan.answers | self._sharing.answers([by_id[row] for row in plan.parts[0]], self.answers)
        else:
            answers = self._one_by_one(plan.parts, plan.answers, by_id)
        answers |= parked
        return [answers[request.id] for request in requests]

    def _one_by_one(
        self, parts: Sequence[tuple[str, ...]], known: dict[str, Answer], by_id: dict[str, Request]
    ) -> dict[str, Answer]:
        """`known`, and the answers of all parts; the first is in hand already, and one without rows is a check."""
        worker, attempts, answers = self._parts.worker, self._parts.attempts, dict(known)
        for number, part in enumerate(parts):
            if number:
                fetch(attempts.take.remote(worker, part))
            made: dict[str, Answer] = {}
            if part:
                made = self._parts.decode([by_id[row] for row in part], answers.keys())
            else:
                self._parts.decoder.check()
            attempts.decoded.remote(worker, made if len(parts) > 1 else None)
            answers |= made
        return answers
