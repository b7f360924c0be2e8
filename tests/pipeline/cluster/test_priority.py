"""What runs in the background leaves the CPU to others."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading
from pipeline.cluster.priority import run_in_background
run_in_background()
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0), *found)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has this policy")
def test_threads_that_start_later_are_in_the_background_too() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(os.SCHED_IDLE)] * 2
