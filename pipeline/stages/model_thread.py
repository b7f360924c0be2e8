"""A worker's model, loaded and run by one thread. The process ends when its device is lost.

The model work itself is `actors.generator`; which rows are decoded together is up to the caller.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from actors.generator import Generator, WindowResult
from actors.generator_config import GeneratorConfig
from actors.memory import is_device_lost
from pipeline.cluster.worker_records import ModelRecord
from skipdecode.backends.device import choice_on
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request


class ModelThread:
    """A `Generator` that any thread may call.

    OpenMP keeps a pool of threads for every thread that computes. With more threads than cores, decoding takes half as
    long again, so one thread loads the model and decodes both the worker's own windows and stolen parts.
    """

    def __init__(self, config: GeneratorConfig, report_exit: Callable[[str], None]) -> None:
        """`report_exit` is called with the reason before the process ends itself. Raises what loading raises."""
        self._report_exit = report_exit
        self._thread = ThreadPoolExecutor(1, "decode")
        self.generator = self._thread.submit(Generator, config).result()

    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        """One answer per request. The model's thread calls `should_continue` before it starts more rows; once that is
        False, the rest stay unanswered (`WindowResult.left`). Ends the process when its device is lost: a new one may
        get another context."""
        try:
            return self._thread.submit(self.generator, requests, may_measure, should_continue).result()
        except Exception as error:
            if not is_device_lost(error, self.generator.devices):
                raise
            self._report_exit(f"{type(error).__name__}: {error}"[:500])
            os._exit(1)

    def decode_alone(self, requests: Sequence[Request]) -> WindowResult:
        """`decode` for rows of which one may end the process."""
        return self.decode(requests)

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The batches that these requests would be decoded in."""
        return [[requests[row] for row in batch.rows] for batch in self.generator.cut(requests)]

    def check(self) -> None:
        """Decodes two tokens of a made-up prompt, which every working worker can."""
        token = self.generator.model.config.filler_token_id
        self.decode([Request("control", [token], Sampling(max_new_tokens=2))], may_measure=False)

    def record(self) -> ModelRecord:
        """What decodes here, and why."""
        generator, chosen = self.generator, choice_on(self.generator.device)
        graphs = None if generator.graphs is None else generator.graphs.describe()
        reason = "; ".join(filter(None, [chosen.reason, graphs, generator.model.packing]))
        return {
            "load_s": generator.load_s,
            "device": str(generator.device),
            "dtype": generator.precision,
            "backend": {"name": chosen.name, "reason": reason},
            "why_slow": generator.why_slow,
        }
