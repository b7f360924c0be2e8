"""The decode stage of Ray Data: one actor of the pool, Arrow tables in and out.

A window (the rows that one actor takes per call) takes this path: `DecodeStage.__call__` -> `WindowDecoder.answer` ->
`ModelThread.decode` -> `actors.generator.Generator`.
"""

import os
import socket
import time

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from actors.generator_config import GeneratorConfig
from actors.memory import freeze_gc
from pipeline.cluster.priority import run_in_background
from pipeline.fault_injection import fault_point
from pipeline.stages.attempt_tracker import StartOrder, StopRun, WorkerProcess
from pipeline.stages.delegating_decoder import DelegatingDecoder
from pipeline.stages.endpoint_model import EndpointModel, SharedEndpoint
from pipeline.stages.model_thread import ModelThread
from pipeline.stages.packed_window import pack
from pipeline.stages.window import Window
from pipeline.stages.window_decoder import WindowDecoder
from skipdecode.config.sampling import Sampling

ORDER_POLL_S = 1.0  # between two questions of a worker that could not load, and waits for an order


class DecodeStage:
    """One worker, which loads the model once and decodes a window of rows per call."""

    model_class: type[ModelThread] = ModelThread

    def __init__(
        self,
        config: GeneratorConfig,
        sampling: Sampling,
        collector: ActorHandle,
        attempts: ActorHandle,
        steal_queue: ActorHandle | None = None,
        background: bool = False,
        endpoint: SharedEndpoint | None = None,
    ) -> None:
        """Loads the model; may wait until it is allowed to, or end the process, so that Ray starts a new one. The
        handles are those of `MetricsCollector`, `AttemptTracker` and `StealQueue`. `background`: as
        `actors.background`. `endpoint`: decodes the rows in place of a model of this process.

        Raises StopRun if the attempt tracker has ended the run. A failed load is tried again in a new process, as Ray
        starts it. A worker that is to sit out loads nothing, and others decode its windows.
        """
        if background:
            run_in_background()  # first: threads have the priority of those that start them
        context = ray.get_runtime_context()
        self.worker: str = context.get_actor_id()[:12]  # the same after a restart on another host
        self._sampling, self._attempts, self._endpoint = sampling, attempts, endpoint
        process = WorkerProcess(context.get_node_id(), socket.gethostname(), os.getpid())
        stop = ray.get(attempts.worker_starting.remote(self.worker, process))
        if stop is not None:
            raise StopRun(stop)
        order: StartOrder = ray.get(attempts.start_order.remote(self.worker))
        model = self._load(config, is_restart=context.was_current_actor_reconstructed) if order == "load" else None
        if model is None:
            collector.worker_sits_out.remote(self.worker)
            assert steal_queue is not None, "who sits out has others"
            self._decoder: WindowDecoder | DelegatingDecoder = DelegatingDecoder(
                self.worker, attempts, collector, steal_queue
            )
            return
        freeze_gc()
        attempts.worker_ready.remote(self.worker)
        collector.worker_started.remote(
            self.worker,
            {
                "host": process.host,
                "pid": process.pid,
                **model.record(),
                "ready_at": time.time(),
            },
        )
        self._decoder = WindowDecoder(self.worker, model, attempts, collector, steal_queue)
        if steal_queue is not None:
            self._decoder.start_stealing()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Takes a window's rows, as `tokenize` leaves them, and adds what was generated for each.

        Returns them packed into a single row, since Ray might split a table, and differently when the window is decoded
        again (`packed_window`).
        """
        with self._decoder.lock:
            window = self.make_window(table)
            self._decoder.begin_window(window.num_failed)
            done, num_failed = window.with_answers(self._decoder.answer(window.requests))
            self._attempts.window_finished.remote(self.worker, window.name, window.ids, num_failed)
            return pack(done)

    def make_window(self, table: pa.Table) -> Window:
        """The window of these rows, with a request for each row that can be decoded."""
        return Window.of(table, self._sampling)

    def _load(self, config: GeneratorConfig, *, is_restart: bool) -> ModelThread | EndpointModel | None:
        """The model; None if the worker is to sit out. Where it is to try again this process ends, since an error of a
        device stays with it. Raises what loading raised where that ends the run."""
        try:
            for point in ("load", "load again") if is_restart else ("load",):
                fault_point(point)
            if self._endpoint is not None:
                return EndpointModel(self.worker, self._endpoint, config, self._report_exit)
            return self.model_class(config, self._report_exit)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            ray.get(self._attempts.worker_cannot_load.remote(self.worker, reason[:1000]))
            while (order := ray.get(self._attempts.start_order.remote(self.worker))) == "wait":
                time.sleep(ORDER_POLL_S)
            if order == "stop":
                raise
            if order == "load":
                os._exit(1)
            return None

    def _report_exit(self, reason: str) -> None:
        """Tells the attempt tracker why this process is about to exit."""
        ray.get(self._attempts.worker_dying.remote(self.worker, reason))
