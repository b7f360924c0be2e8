"""A job whose decoder only sleeps: what rows take beyond that does not hide behind decoding (`benchmarks.overhead`).

python -m benchmarks.sleeping_decoder -i prompts.parquet -o outputs/run model.source=models/opt-e2e
"""

import time
from collections.abc import Sequence

import jobs.cli
import jobs.generate
import pipeline.generate.data_pipeline
from actors.generator import WindowResult
from pipeline.stages.decode import DecodeStage
from pipeline.stages.model_thread import ModelThread
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion

ROW_S = 0.0002


class SleepingModel(ModelThread):
    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        time.sleep(ROW_S * len(requests))
        return WindowResult([Completion([5], "length", 1, 1) for _ in requests])


class SleepingDecodeStage(DecodeStage):
    model_class = SleepingModel


if __name__ == "__main__":
    pipeline.generate.data_pipeline.DecodeStage = SleepingDecodeStage  # type: ignore[misc]
    jobs.cli.start(jobs.generate.main)
