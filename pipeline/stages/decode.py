"""The decode stage of Ray Data: one actor of the pool, Arrow tables in and out.

A window of rows takes this way: `DecodeStage.__call__` -> `WindowDecoder.answer` -> `ModelThread.decode` ->
`actors.generator.Generator`.
"""

import os
import socket
import time

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from actors.generator import GeneratorConfig
from actors.memory import freeze_gc
from pipeline.fault_injection import fault_point
from pipeline.stages.attempt_tracker import StopRun, WorkerProcess
from pipeline.stages.model_thread import ModelThread
from pipeline.stages.packed_window import pack
from pipeline.stages.window import Window
from pipeline.stages.window_decoder import WindowDecoder
from skipdecode.config.sampling import Sampling


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
    ) -> None:
        """Actor handles of `MetricsCollector`, `AttemptTracker` and `StealQueue`. StopRun where the attempt tracker has
        ended the run; a model that cannot be loaded ends it too."""
        context = ray.get_runtime_context()
        self.worker: str = context.get_actor_id()[:12]  # the same after a restart on another host
        self._sampling, self._attempts = sampling, attempts
        process = WorkerProcess(context.get_node_id(), socket.gethostname(), os.getpid())
        stop = ray.get(attempts.starting.remote(self.worker, process))
        if stop is not None:
            raise StopRun(stop)
        fault_point("load")
        model = self._load(config)
        freeze_gc()
        attempts.ready.remote(self.worker)
        collector.worker_started.remote(
            self.worker,
            {
                "host": process.host,
                "pid": process.pid,
                "load_s": model.generator.load_s,
                "device": str(model.generator.device),
                "dtype": model.generator.precision,
                "backend": model.backend(),
                "ready_at": time.time(),
            },
        )
        self._decoder = WindowDecoder(self.worker, model, attempts, collector, steal_queue)
        if steal_queue is not None:
            self._decoder.start_stealing()

    def __call__(self, table: pa.Table) -> pa.Table:
        """The window's rows, as `tokenize` leaves them, with what was generated for each; packed into one row."""
        with self._decoder.lock:
            window = self.window(table)
            self._decoder.begin_window(window.num_failed)
            done, num_failed = window.answered(self._decoder.answer(window.requests))
            self._attempts.finished.remote(self.worker, window.name, window.ids, num_failed)
            return pack(done)

    def window(self, table: pa.Table) -> Window:
        """The rows of a table that are to be decoded."""
        return Window.of(table, self._sampling)

    def _load(self, config: GeneratorConfig) -> ModelThread:
        try:
            return self.model_class(config, self._last_words)
        except Exception as error:
            ray.get(self._attempts.cannot_load.remote(self.worker, f"{type(error).__name__}: {error}"))
            raise

    def _last_words(self, reason: str) -> None:
        ray.get(self._attempts.dying.remote(self.worker, reason))
