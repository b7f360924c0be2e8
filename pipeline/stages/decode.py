"""The decode stage of Ray Data: one actor of the pool, Arrow tables in and out, rows taken as the ledger plans them.

The model work is `actors.generator`; which rows are tried together after a death is `pipeline.stages.attempts`.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import ray

from actors.generator import DEVICE_LOST, Answer, Generator, GeneratorConfig, RowFailure, WindowResult
from pipeline.faults import fault_point
from pipeline.handles import Process
from pipeline.schema import POISON_ROW, PROMPT_TOKENS, SAMPLING
from pipeline.stages.attempts import StopRun
from pipeline.stages.leftovers import split_parts
from pipeline.stages.tokens import TOKENS, row_sampling, with_columns
from skipdecode.generate import Request
from skipdecode.sampling import Sampling

ASK_S = 0.05, 0.5  # an idle worker asks for work as often as this, at first and after a while
MIN_SHARED_ROWS = 4  # a part is not cut into smaller ones than this
HELP_TIMEOUT_S = 20.0  # beside three times its own longest part: how long an owner waits for a helper


class DecodeStage:
    """One actor of the pool: a `Generator` behind Arrow tables. `ledger` knows what it has in hand and how to go about
    a window (`pipeline.stages.attempts`); `metrics` hears what each batch cost."""

    def __init__(
        self, config: GeneratorConfig, sampling: Sampling, metrics: Any, ledger: Any, leftovers: Any = None
    ) -> None:
        self.sampling, self.metrics, self.ledger, self.leftovers = sampling, metrics, ledger, leftovers
        self._hand = threading.Lock()  # a window, or rows of another worker's: one of them at a time
        self._num_windows = 0
        context = ray.get_runtime_context()
        self.worker = context.get_actor_id()[:12]  # the same after a restart on another host
        process = Process(context.get_node_id(), socket.gethostname(), os.getpid())
        stop = ray.get(ledger.starting.remote(self.worker, process))
        if stop is not None:
            raise StopRun(stop)
        fault_point("load")
        # OpenMP keeps a pool of threads for every thread that computes; with more of them than cores each sleeps after
        # every product, and decoding takes half as long again. So one thread loads and decodes, for windows and help.
        self._decoder = ThreadPoolExecutor(1, "decode")
        try:
            self.generator = self._decoder.submit(Generator, config).result()
        except Exception as error:
            ray.get(ledger.cannot_load.remote(self.worker, f"{type(error).__name__}: {error}"))
            raise
        ledger.ready.remote(self.worker)
        metrics.worker_started.remote(
            self.worker,
            {
                "host": process.host,
                "pid": os.getpid(),
                "load_s": self.generator.load_s,
                "device": str(self.generator.device),
                "dtype": self.generator.numbers,
                "ready_at": time.time(),
            },
        )
        if leftovers is not None:
            leftovers.started.remote(self.worker)
            threading.Thread(target=self._help, daemon=True, name="help").start()

    def __call__(self, table: pa.Table) -> pa.Table:
        with self._hand:
            return self._window(table)

    def _window(self, table: pa.Table) -> pa.Table:
        codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
        ids, tokens = table["id"].to_pylist(), table[PROMPT_TOKENS].to_pylist()
        samplings = table[SAMPLING].to_pylist()
        window = f"{ids[0]} {messages[0]}"
        self._num_windows += 1
        if self.leftovers is not None:
            self.leftovers.began.remote(self.worker)
        rows = [row for row, code in enumerate(codes) if not code]
        requests = [Request(ids[row], tokens[row], row_sampling(self.sampling, samplings[row])) for row in rows]
        self._count(time.time(), len(codes) - len(rows), len(codes) - len(rows), [])
        made: list[list[int]] = [[] for _ in codes]
        reasons, layers, ffns = ["error"] * len(codes), [0] * len(codes), [0] * len(codes)
        for row, answer in zip(rows, self._answers(requests), strict=True):
            if isinstance(answer, RowFailure):
                codes[row], messages[row] = answer.error_code, answer.error_message
            else:
                made[row], reasons[row] = answer.tokens, answer.finish_reason
                layers[row], ffns[row] = answer.layers_run, answer.ffns_run
        done = [request.id for request in requests]
        self.ledger.finished.remote(self.worker, window, done, sum(bool(code) for code in codes))
        columns = {
            "generated_tokens": pa.array(made, TOKENS),
            "num_generated_tokens": pa.array([len(t) for t in made], pa.int32()),
            "finish_reason": pa.array(reasons, pa.string()),
            "layers_run": pa.array(layers, pa.int32()),
            "ffns_run": pa.array(ffns, pa.int32()),
            "error_code": pa.array(codes, pa.string()),
            "error_message": pa.array(messages, pa.string()),
        }
        return with_columns(table, columns)

    def _answers(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order, decoded in the parts that the ledger plans."""
        by_id = {request.id: request for request in requests}
        plan = ray.get(self.ledger.begin.remote(self.worker, list(by_id)))
        if isinstance(plan, str):
            raise StopRun(plan)
        parked: dict[str, Answer] = {row: RowFailure(POISON_ROW, why) for row, why in plan.parked.items()}
        self._count(time.time(), len(parked), len(parked), [])
        answers = dict(plan.answers)
        if self.leftovers is not None and plan.is_clear and plan.parts:
            answers |= self._batches([by_id[row] for row in plan.parts[0]]) | parked
            return [answers[request.id] for request in requests]
        for number, part in enumerate(plan.parts):
            if number:
                ray.get(self.ledger.take.remote(self.worker, part))
            made = self._part([by_id[row] for row in part], answers.keys()) if part else self._control()
            self.ledger.decoded.remote(self.worker, made if len(plan.parts) > 1 else None)
            answers |= made
        answers |= parked
        return [answers[request.id] for request in requests]

    def _batches(self, requests: Sequence[Request]) -> dict[str, Answer]:
        """Answers by row id, decoded batch by batch, those that take longest first; with help when others are idle."""
        left = longest_first([[requests[row] for row in batch.rows] for batch in self.generator.cut(requests)])
        answers: dict[str, Answer] = {}
        while left:
            num_idle = self._num_idle()
            parts = split_parts(left, 1 + num_idle, MIN_SHARED_ROWS)
            if num_idle and len(parts) > 1:
                return answers | self._with_help(parts)
            answers |= self._taken(left.pop(0))
        return answers

    def _num_idle(self) -> int:
        if self.leftovers is None:
            return 0
        try:
            return int(ray.get(self.leftovers.num_idle.remote()))
        except ray.exceptions.RayActorError:
            self.leftovers = None  # lost: from here on nothing is shared, and nothing else is amiss
            return 0

    def _with_help(self, parts: Sequence[Sequence[Request]]) -> dict[str, Answer]:
        """The same, of parts that others may take; does itself what does not come."""
        answers: dict[str, Answer] = {}
        try:
            self._share(parts, answers)
        except ray.exceptions.RayActorError:
            self.leftovers = None  # if it was the ledger that is lost, the run ends with the next question to it
        for part in parts:
            if part[0].id not in answers:  # a helper may have died of these rows: the ledger knows
                answers |= zip((request.id for request in part), self._answers(part), strict=True)
        return answers

    def _share(self, parts: Sequence[Sequence[Request]], answers: dict[str, Answer]) -> None:
        """Offers the parts, adds to `answers` those of its own and those that come in time."""
        key, longest_s = uuid.uuid4().hex, 0.0
        ray.get(self.leftovers.offer.remote(key, self.worker, parts))
        while (mine := ray.get(self.leftovers.take.remote(key))) is not None:
            started = time.monotonic()
            answers |= self._taken(parts[mine])
            longest_s = max(longest_s, time.monotonic() - started)
            fault_point("sharing")
        ends_at = time.monotonic() + HELP_TIMEOUT_S + 3 * longest_s
        while (found := ray.get(self.leftovers.collect.remote(key))).num_lent and time.monotonic() < ends_at:
            answers |= found.answers
            time.sleep(ASK_S[0])
        answers |= found.answers | ray.get(self.leftovers.close.remote(key))

    def _help(self) -> None:
        """Takes parts of other workers' windows whenever there is none of its own; ends with the run."""
        wait_s = ASK_S[0]
        while self.leftovers is not None:
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, ASK_S[1])
            if not self._hand.acquire(blocking=False):
                wait_s = ASK_S[0]
                continue
            try:
                while self.leftovers is not None:
                    loan = ray.get(self.leftovers.ask.remote(self.worker))
                    if loan is None:
                        break
                    self.leftovers.give.remote(loan, self._taken(loan.requests, is_borrowed=True))
                    self.ledger.finished.remote(self.worker, "", (), 0)
                    wait_s = ASK_S[0]
            except ray.exceptions.RayError:  # the driver's end of the run is gone, or the leftovers are
                return
            finally:
                self._hand.release()

    def _taken(self, requests: Sequence[Request], is_borrowed: bool = False) -> dict[str, Answer]:
        """Answers by row id; the ledger knows meanwhile who has these rows in hand."""
        ray.get(self.ledger.take.remote(self.worker, tuple(request.id for request in requests)))
        if is_borrowed:
            fault_point("help")
        made = self._part(requests, frozenset(), is_borrowed)
        self.ledger.decoded.remote(self.worker, None)
        return made

    def _part(self, requests: Sequence[Request], known: Set[str], is_borrowed: bool = False) -> dict[str, Answer]:
        """Answers by row id; rows `known` from before are not counted again."""
        started_at = time.time()
        for request in requests:
            fault_point(f"decode {request.id}")
        result = self._generate(requests, may_measure=not is_borrowed)
        answers = {request.id: answer for request, answer in zip(requests, result.answers, strict=True)}
        fresh = [answer for row, answer in answers.items() if row not in known]
        failed = sum(isinstance(answer, RowFailure) for answer in fresh)
        self._count(started_at, len(fresh), failed, result.batches, is_borrowed)
        return answers

    def _generate(self, requests: Sequence[Request], may_measure: bool = True) -> WindowResult:
        """Ends the process when its device is lost: a new one may get another context."""
        try:
            return self._decoder.submit(self.generator, requests, may_measure).result()
        except DEVICE_LOST as error:
            ray.get(self.ledger.dying.remote(self.worker, f"{type(error).__name__}: {error}"[:500]))
            os._exit(1)

    def _control(self) -> dict[str, Answer]:
        """Decodes two tokens after BOS, which any worker can that can do anything."""
        bos = self.generator.model.config.bos_token_id
        self._generate([Request("control", [bos], Sampling(max_new_tokens=2))], may_measure=False)
        return {}

    def _count(
        self, started_at: float, rows: int, failed: int, batches: list[dict[str, Any]], is_borrowed: bool = False
    ) -> None:
        if rows or batches:
            window: dict[str, Any] = {"started_at": started_at, "ended_at": time.time(), "rows": rows, "failed": failed}
            window["window"] = 0 if is_borrowed else self._num_windows
            self.metrics.window_done.remote(self.worker, window, batches)


def longest_first(batches: Sequence[Sequence[Request]]) -> list[Sequence[Request]]:
    """By their longest row, prompt and answer: what decides how long a batch takes, as far as one can know before."""
    return sorted(
        batches,
        key=lambda batch: max(len(request.prompt_tokens) + request.sampling.max_new_tokens for request in batch),
        reverse=True,
    )
