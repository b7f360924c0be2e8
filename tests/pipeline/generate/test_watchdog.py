"""The watchdog of a resumed run gives readers time to skip what is done."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.job import JobConfig, build_config
from pipeline.generate.resume import Work
from pipeline.generate.stream import SLOW_READ_BYTES_S, skipping_s, window_limit_s
from pipeline.input.id_matching import DoneRows
from pipeline.input.ids import locations
from tests.support.input_helpers import make_config, make_plan


def test_a_file_that_is_almost_done_takes_its_time(tmp_path: Path) -> None:
    for name, count in (("a", 1000), ("b", 10)):
        (tmp_path / f"{name}.txt").write_text("x" * 99 + "\n" + ("x" * 99 + "\n") * (count - 1))
    plan = make_plan(make_config(tmp_path))
    assert skipping_s(Work(plan, None)) == 0
    done = DoneRows(plan.num_rows_per_file)
    assert skipping_s(Work(plan, done)) == 0
    done.add(np.concatenate([locations(0, 0, 990), locations(1, 0, 10)]))
    assert skipping_s(Work(plan, done)) == pytest.approx(990 * 99 / SLOW_READ_BYTES_S, rel=0.02)
    assert 110e9 / SLOW_READ_BYTES_S > 1800, "what was too long for the default"


def test_large_windows_have_a_larger_limit_unless_somebody_chose_their_size() -> None:
    def limit(has_gpu: bool = True, **actors: object) -> float:
        config = build_config(JobConfig, {"actors": actors, "limits": {"no_progress_timeout_s": 100}})
        return window_limit_s(config, has_gpu=has_gpu)

    assert limit() == 400
    assert limit(has_gpu=False) == 100
    assert limit(num_gpus=3) == 100, "such a worker has windows of four batches"
    assert limit(window_batches=64) == 100
