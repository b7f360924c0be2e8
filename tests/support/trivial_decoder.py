"""A processor's stage whose decoder gives one token at once: what is left is the way of the rows."""

from collections.abc import Sequence

from actors.generator import WindowResult
from pipeline.processor.stage import KeyedModelThread, ProcessorStage
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion


class TrivialDecoder(KeyedModelThread):
    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        return WindowResult([Completion([5], "length", 1, 1) for _ in requests])


class TrivialStage(ProcessorStage):
    model_class = TrivialDecoder
