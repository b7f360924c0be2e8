"""The decode stage for datasets whose ids need not be unique, without metrics.

The attempt tracker identifies rows by their ids. Whether an id comes twice in a streaming dataset is not known in
advance, so here rows are identified by what decides their answer: id, prompt and sampling. Rows that agree in all three
are one row.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from actors.generator import WindowResult
from pipeline.stages.decode import DecodeStage
from pipeline.stages.model_thread import ModelThread
from pipeline.stages.window import Window
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request

MARK = "\0"
"""Between a row's digest and its id."""


class SilentMethod:
    def remote(self, *arguments: object) -> None:
        """Drops the call."""


class SilentCollector:
    """Stands in for `report.collector.MetricsCollector`, since there is no report."""

    worker_started = worker_sits_out = window_done = counts = flush = SilentMethod()


def with_key(request: Request) -> Request:
    digest = hashlib.blake2b(array("i", request.prompt_tokens).tobytes(), digest_size=16)
    digest.update(repr(replace(request, prompt_tokens=[])).encode("utf-8", "surrogatepass"))
    return replace(request, id=f"{digest.hexdigest()}{MARK}{request.id}")


def without_key(request: Request) -> Request:
    """Random numbers are keyed by the row's own id."""
    return replace(request, id=request.id.partition(MARK)[2] or request.id)


class KeyedModelThread(ModelThread):
    """Decodes requests that have keys in place of their ids."""

    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        return super().decode([without_key(request) for request in requests], may_measure, should_continue)


class ProcessorStage(DecodeStage):
    """One worker of a processor."""

    model_class: type[ModelThread] = KeyedModelThread

    def make_window(self, table: pa.Table) -> Window:
        window = super().make_window(table)
        return replace(window, requests=[with_key(request) for request in window.requests])
