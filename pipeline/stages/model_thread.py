"""The model of a worker: loaded and run by one thread, and the end of the process when its device is lost.

The model work itself is `actors.generator`; which rows are decoded together is up to the caller.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from actors.generator import Generator, GeneratorConfig, WindowResult
from actors.memory import is_device_lost
from pipeline.cluster.ray_handles import BackendRecord
from skipdecode.backends.device import choice_on
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request


class Decoder:
    """A `Generator` that any thread may ask.

    OpenMP keeps a pool of threads for every thread that computes; with more of them than cores each sleeps after every
    product, and decoding takes half as long again. So one thread loads and decodes, for windows and for help.
    """

    def __init__(self, config: GeneratorConfig, last_words: Callable[[str], None]) -> None:
        """`last_words` hears why, before the process ends itself. Raises what loading raises."""
        self._last_words = last_words
        self._thread = ThreadPoolExecutor(1, "decode")
        self.generator = self._thread.submit(Generator, config).result()

    def decode(self, requests: Sequence[Request], may_measure: bool = True) -> WindowResult:
        """One answer per request. Ends the process when its device is lost: a new one may get another context."""
        try:
            return self._thread.submit(self.generator, requests, may_measure).result()
        except Exception as error:
            if not is_device_lost(error, self.generator.devices):
                raise
            self._last_words(f"{type(error).__name__}: {error}"[:500])
            os._exit(1)

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The batches that these would be decoded in."""
        return [[requests[row] for row in batch.rows] for batch in self.generator.cut(requests)]

    def check(self) -> None:
        """Decodes two tokens, which any worker can that can do anything."""
        token = self.generator.model.config.filler_token_id
        self.decode([Request("control", [token], Sampling(max_new_tokens=2))], may_measure=False)

    def backend(self) -> BackendRecord:
        """Whose kernels it decodes with, and why."""
        chosen, graphs = choice_on(self.generator.device), self.generator.graphs
        reason = chosen.reason if graphs is None else f"{chosen.reason}; {graphs.describe()}"
        return {"name": chosen.name, "reason": reason}
