"""The decode stage of Ray Data: one actor of the pool, Arrow tables in and out.

The rest of it, by module: `window` (tables to requests and back), `decoder` (the model and its thread), `parts` (some
rows decoded, and who is told), `walk` (which rows together), `sharing` (rows that other workers may take).
"""

import os
import socket
import threading
import time

import pyarrow as pa
import ray

from actors.generator import GeneratorConfig
from actors.memory import freeze_gc
from pipeline.cluster.ray_handles import AttemptTrackerHandle, CollectorHandle, LeftoversHandle, Process, fetch
from pipeline.fault_injection import fault_point
from pipeline.stages.attempt_tracker import StopRun
from pipeline.stages.model_thread import Decoder
from pipeline.stages.packed_window import pack
from pipeline.stages.poison_isolation import PoisonIsolation
from pipeline.stages.window import Window
from pipeline.stages.window_parts import Parts
from pipeline.stages.window_sharing import Helper, Sharing
from skipdecode.config.sampling import Sampling


class DecodeStage:
    """One worker. `attempts` knows what it has in hand and how to go about a window, `collector` hears what each batch
    cost, `leftovers` (None: nothing is shared) knows which workers are idle."""

    decoder_class: type[Decoder] = Decoder

    def __init__(
        self,
        config: GeneratorConfig,
        sampling: Sampling,
        collector: CollectorHandle,
        attempts: AttemptTrackerHandle,
        leftovers: LeftoversHandle | None = None,
    ) -> None:
        """Loads the model. StopRun where the ledger has ended the run; a model that cannot be loaded ends it too."""
        context = ray.get_runtime_context()
        self.worker: str = context.get_actor_id()[:12]  # the same after a restart on another host
        self._sampling, self._ledger = sampling, attempts
        process = Process(context.get_node_id(), socket.gethostname(), os.getpid())
        stop = fetch(attempts.starting.remote(self.worker, process))
        if stop is not None:
            raise StopRun(stop)
        fault_point("load")
        decoder = self._load(config)
        freeze_gc()
        attempts.ready.remote(self.worker)
        collector.worker_started.remote(
            self.worker,
            {
                "host": process.host,
                "pid": process.pid,
                "load_s": decoder.generator.load_s,
                "device": str(decoder.generator.device),
                "dtype": decoder.generator.precision,
                "backend": decoder.backend(),
                "ready_at": time.time(),
            },
        )
        self._hand = threading.Lock()  # a window, or rows of another worker's: one of them at a time
        self._parts = Parts(self.worker, decoder, attempts, collector)
        self._sharing = Sharing(leftovers, self._parts)
        self._walk = PoisonIsolation(self._parts, self._sharing)
        if leftovers is not None:
            Helper(self._sharing, self._parts, self._hand)

    def __call__(self, table: pa.Table) -> pa.Table:
        """A window of rows, as `tokenize` leaves them, with what was generated for each; packed."""
        with self._hand:
            window = self.window(table)
            self._parts.num_windows += 1
            self._sharing.began()
            self._parts.count(time.time(), window.num_failed, window.num_failed)
            done, num_failed = window.answered(self._walk.answers(window.requests))
            self._ledger.finished.remote(self.worker, window.name, window.ids, num_failed)
            return pack(done)

    def window(self, table: pa.Table) -> Window:
        """What of a table is to be decoded."""
        return Window.of(table, self._sampling)

    def _load(self, config: GeneratorConfig) -> Decoder:
        try:
            return self.decoder_class(config, self._last_words)
        except Exception as error:
            fetch(self._ledger.cannot_load.remote(self.worker, f"{type(error).__name__}: {error}"))
            raise

    def _last_words(self, reason: str) -> None:
        fetch(self._ledger.dying.remote(self.worker, reason))
