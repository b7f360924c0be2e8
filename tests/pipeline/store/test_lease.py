"""One session at a time in a run folder; one that was killed does not bar the next. Real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pipeline.store.lease
from pipeline.config import ConfigError
from pipeline.store.lease import Lease, may_live, read_lease
from pipeline.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
import pipeline.store.lease
from pipeline.store.run_folder import RunFolder
pipeline.store.lease.BEAT_S = 0.2
with pipeline.store.lease.Lease(RunFolder.open(sys.argv[1]), "holder", print):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(root: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


@pytest.mark.process
def test_a_held_folder_is_refused_and_a_dead_holder_is_not_waited_for(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"run holder \(process {holder.pid} on .*is at work"):
            Lease(RunFolder.open(str(tmp_path)), "second", print).__enter__()
        assert read_lease(RunFolder.open(str(tmp_path)))["session"] == "holder"
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert (tmp_path / "lease.json").exists()
    started = time.monotonic()
    with Lease(RunFolder.open(str(tmp_path)), "second", print):
        assert time.monotonic() - started < 5
        assert read_lease(RunFolder.open(str(tmp_path)))["session"] == "second"
    assert list(tmp_path.iterdir()) == []


def test_a_holder_elsewhere_is_given_time_for_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 0.5)
    lease = {"session": "far", "host": "elsewhere", "machine": "another boot", "pid": 1, "beat": 3}
    (tmp_path / "lease.json").write_text(json.dumps(lease))
    notes: list[str] = []
    with Lease(RunFolder.open(str(tmp_path)), "second", notes.append) as mine:
        assert "process 1 on elsewhere" in notes[0]
        mine.check()
        (tmp_path / "lease.json").write_text(json.dumps(lease))  # it was not dead, only slow
        with pytest.raises(RuntimeError, match="another run has taken over"):
            mine.check()
    assert read_lease(RunFolder.open(str(tmp_path))) == lease, "the lease of another stays"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"session": "x"}'])
def test_a_torn_lease_bars_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "lease.json").write_text(text)
    with Lease(RunFolder.open(str(tmp_path)), "second", print):
        pass
    assert not RunFolder.open(str(tmp_path)).exists()


@pytest.mark.process
@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_session_that_lost_its_folder_ends(tmp_path: Path, handler: str) -> None:
    """Also one that a script started in the background, where SIGINT is ignored."""
    code = HOLDER.replace("    time.sleep(600)", "    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n"
                          "        print('ends', flush=True)")  # fmt: skip
    code = f"import signal; signal.signal(signal.SIGINT, signal.{handler})\n" + code
    code = "import pipeline.generate.ending; pipeline.generate.ending.stop_on_sigterm()\n" + code
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    RunFolder.open(str(tmp_path)).write_text("lease.json", "{}")
    assert holder.communicate(timeout=60)[0] == "ends\n"


@pytest.mark.process
def test_who_may_live(tmp_path: Path) -> None:
    with Lease(RunFolder.open(str(tmp_path)), "own", print):
        own = read_lease(RunFolder.open(str(tmp_path)))
    assert own is not None
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert may_live(own)
    assert may_live(own | {"machine": "another container", "pid": dead.pid})
    assert not may_live(own | {"pid": dead.pid})
