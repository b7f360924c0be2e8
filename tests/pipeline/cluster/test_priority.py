"""What runs in the background leaves the CPU to others."""

import os
import subprocess
import sys
from pathlib import Path

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


SPIN = """
import os, sys, time
from pipeline.cluster.priority import run_in_background
core, is_background, ends = int(sys.argv[1]), sys.argv[2] == "background", sys.argv[3]
os.sched_setaffinity(0, {core})
if is_background:
    run_in_background()
print("ready", flush=True)
sys.stdin.read(1)
began = time.process_time()
while not (os.path.exists(ends) if is_background else time.process_time() - began > 0.3):
    pass
open(ends, "w").close()
print(time.process_time() - began)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has this policy")
def test_it_gives_way_to_what_is_of_its_session(tmp_path: Path) -> None:
    """Both want one core, and one has 0.3 s of it: a process group of its own changes nothing, as a session would."""
    core, ends = str(min(os.sched_getaffinity(0))), tmp_path / "ends"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SPIN, core, kind, str(ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        for kind in ("foreground", "background")
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    busy_s, idle_s = (float(process.communicate()[0]) for process in both)
    assert idle_s < 0.5 * busy_s  # 3 to 15 even if the other has the lowest niceness; equal in two sessions
