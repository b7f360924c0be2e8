"""The pipeline of a run, as it is built; what it does is tested with Ray (`test_pipeline`)."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.generate.data_pipeline import _in_background
from pipeline.stages.tokenize import tokenize


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has this policy")
def test_a_light_step_in_the_background() -> None:
    """It takes the thread along that calls it, and keeps the name by which Ray shows its stage."""
    before = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_in_background(os.sched_getscheduler), 0).result() == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before != os.SCHED_IDLE
    assert _in_background(tokenize).__name__ == "tokenize"
