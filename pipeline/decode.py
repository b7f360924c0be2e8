"""The decode stage of Ray Data: one actor of the pool, Arrow tables in and out, rows taken as the ledger plans them.

The model work is `actors.generator`; which rows are tried together after a death is `pipeline.attempts`.
"""

import os
import socket
import time
from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa
import ray

from actors.generator import DEVICE_LOST, Answer, Generator, GeneratorConfig, RowFailure, WindowResult
from pipeline.attempts import Process, StopRun
from pipeline.faults import fault_point
from pipeline.schema import POISON_ROW, PROMPT_TOKENS, SAMPLING
from pipeline.stages import TOKENS, row_sampling, with_columns
from skipdecode.generate import Request
from skipdecode.sampling import Sampling


class DecodeStage:
    """One actor of the pool: a `Generator` behind Arrow tables. `ledger` knows what it has in hand and how to go about
    a window (`pipeline.attempts`); `metrics` hears what each batch cost."""

    def __init__(self, config: GeneratorConfig, sampling: Sampling, metrics: Any, ledger: Any) -> None:
        self.sampling, self.metrics, self.ledger = sampling, metrics, ledger
        context = ray.get_runtime_context()
        self.worker = context.get_actor_id()[:12]  # the same after a restart on another host
        process = Process(context.get_node_id(), socket.gethostname(), os.getpid())
        stop = ray.get(ledger.starting.remote(self.worker, process))
        if stop is not None:
            raise StopRun(stop)
        fault_point("load")
        try:
            self.generator = Generator(config)
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
                "dtype": str(self.generator.dtype).removeprefix("torch."),
                "ready_at": time.time(),
            },
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
        ids, tokens = table["id"].to_pylist(), table[PROMPT_TOKENS].to_pylist()
        samplings = table[SAMPLING].to_pylist()
        window = f"{ids[0]} {messages[0]}"
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
        for number, part in enumerate(plan.parts):
            if number:
                ray.get(self.ledger.take.remote(self.worker, part))
            made = self._part([by_id[row] for row in part], answers.keys()) if part else self._control()
            self.ledger.decoded.remote(self.worker, made if len(plan.parts) > 1 else None)
            answers |= made
        answers |= parked
        return [answers[request.id] for request in requests]

    def _part(self, requests: Sequence[Request], known: Set[str]) -> dict[str, Answer]:
        """Answers by row id; rows `known` from before are not counted again."""
        started_at = time.time()
        for request in requests:
            fault_point(f"decode {request.id}")
        result = self._generate(requests)
        answers = {request.id: answer for request, answer in zip(requests, result.answers, strict=True)}
        fresh = [answer for row, answer in answers.items() if row not in known]
        self._count(started_at, len(fresh), sum(isinstance(a, RowFailure) for a in fresh), result.batches)
        return answers

    def _generate(self, requests: Sequence[Request]) -> WindowResult:
        """Ends the process when its device is lost: a new one may get another context."""
        try:
            return self.generator(requests)
        except DEVICE_LOST as error:
            ray.get(self.ledger.dying.remote(self.worker, f"{type(error).__name__}: {error}"[:500]))
            os._exit(1)

    def _control(self) -> dict[str, Answer]:
        """Decodes two tokens after BOS, which any worker can that can do anything."""
        bos = self.generator.model.config.bos_token_id
        self._generate([Request("control", [bos], Sampling(max_new_tokens=2))])
        return {}

    def _count(self, started_at: float, rows: int, failed: int, batches: list[dict[str, Any]]) -> None:
        if rows or batches:
            window = {"started_at": started_at, "ended_at": time.time(), "rows": rows, "failed": failed}
            self.metrics.window_done.remote(self.worker, window, batches)
