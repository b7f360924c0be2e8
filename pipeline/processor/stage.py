"""The decode stage where ids need not be unique, and nobody asks for figures.

The ledger of attempts knows rows by their ids. Of a dataset that streams by nobody can know whether an id comes twice,
so here it knows them by what decides their answer: id, prompt and sampling. Rows that are alike in all of them are one.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from actors.generator import WindowResult
from pipeline.stages.decode import DecodeStage
from pipeline.stages.model_thread import Decoder
from pipeline.stages.window import Window
from skipdecode.engine.request import Request

MARK = "\0"
"""Between what tells rows apart and their ids."""


class SilentMethod:
    def remote(self, *arguments: object) -> None:
        """Nobody hears it."""


class SilentCollector:
    """In place of `report.collector.MetricsCollector`: there is no report."""

    worker_started = window_done = counts = flush = SilentMethod()


def with_key(request: Request) -> Request:
    digest = hashlib.blake2b(array("i", request.prompt_tokens).tobytes(), digest_size=16)
    digest.update(repr(replace(request, prompt_tokens=[])).encode("utf-8", "surrogatepass"))
    return replace(request, id=f"{digest.hexdigest()}{MARK}{request.id}")


def without_key(request: Request) -> Request:
    """Random numbers are keyed by the row's own id."""
    return replace(request, id=request.id.partition(MARK)[2] or request.id)


class KeyedDecoder(Decoder):
    """Decodes requests that have keys in place of their ids."""

    def decode(self, requests: Sequence[Request], may_measure: bool = True) -> WindowResult:
        return super().decode([without_key(request) for request in requests], may_measure)


class ProcessorStage(DecodeStage):
    """One worker of a processor."""

    decoder_class: type[Decoder] = KeyedDecoder

    def window(self, table: pa.Table) -> Window:
        window = super().window(table)
        return replace(window, requests=[with_key(request) for request in window.requests])
