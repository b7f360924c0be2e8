"""The watchdog of a resumed run gives readers time to skip what is done."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.generate.resume import Work
from pipeline.generate.stream import SLOW_READ_BYTES_S, skipping_s
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
