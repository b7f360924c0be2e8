"""One session at a time in a run folder; one that was killed does not bar the next. Real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs as pafs
import pytest

import pipeline.store.lease
from pipeline.config.job import ConfigError
from pipeline.store.lease import Lease, may_live, read_lease
from pipeline.store.run_folder import RunFolder
from tests.support.early_store import EarlyStore

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
    with Lease(RunFolder.open(str(tmp_path)), "second", pytest.fail):  # it would say that it waits
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


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"session": "x"}', "\xff"])
def test_a_torn_lease_bars_nobody_for_long(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder may be writing it."""
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 0.3)
    (tmp_path / "lease.json").write_bytes(text.encode("latin-1"))
    notes: list[str] = []
    began = time.monotonic()
    with Lease(RunFolder.open(str(tmp_path)), "second", notes.append):
        assert time.monotonic() - began > 0.25
    assert "a run whose lease.json cannot be read holds this folder" in notes[0]
    assert not RunFolder.open(str(tmp_path)).exists()


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_session_that_lost_its_folder_ends(tmp_path: Path, handler: str) -> None:
    """Also one that a script started in the background, where SIGINT is ignored."""
    code = HOLDER.replace("    time.sleep(600)", "    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n"
                          "        print('ends', flush=True)")  # fmt: skip
    code = f"import signal; signal.signal(signal.SIGINT, signal.{handler})\n" + code
    code = "import pipeline.generate.stopping; pipeline.generate.stopping.stop_on_sigterm()\n" + code
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    RunFolder.open(str(tmp_path)).write_text("lease.json", "{}")
    assert holder.communicate(timeout=60)[0] == "ends\n"


def test_who_may_live(tmp_path: Path) -> None:
    with Lease(RunFolder.open(str(tmp_path)), "own", print):
        own = read_lease(RunFolder.open(str(tmp_path)))
    assert own is not None
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert may_live(own)
    assert may_live(own | {"machine": "another container", "pid": dead.pid})
    assert not may_live(own | {"pid": dead.pid})


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.store.lease, "BEAT_S", 0.02)
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 0.2)


FAR = {"session": "far", "host": "elsewhere", "machine": "another boot", "pid": 1, "beat": 3}


@pytest.mark.parametrize("left", [None, FAR], ids=["free", "of a dead holder"])
def test_of_several_that_start_at_once_one_gets_it(
    tmp_path: Path, left: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    # a holder that is held up for longer would be interrupted; and all wait so long for one that is dead
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 3.0)
    for trial in range(2 if left else 5):
        root = tmp_path / str(trial)
        root.mkdir()
        if left:
            (root / "lease.json").write_text(json.dumps(left))
        together = threading.Barrier(6)

        def start(number: int, root: Path = root, together: threading.Barrier = together) -> Lease | str:
            lease = Lease(RunFolder.open(str(root)), f"s{number}", lambda _: None)
            together.wait()
            try:
                return lease.__enter__()
            except ConfigError as error:
                return str(error)

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(start, range(6)))
        holders = [lease for lease in found if isinstance(lease, Lease)]
        assert len(holders) == 1, found
        assert all("is at work in" in one for one in found if isinstance(one, str))
        holders[0].check()
        holders[0].__exit__()
        assert list(root.iterdir()) == []


def test_a_holder_that_stood_still_in_mid_beat_changes_no_other_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Lease(RunFolder.open(str(tmp_path)), "first", print).__enter__()
    assert first.holds()  # and here it stands still
    quick(monkeypatch)
    with Lease(RunFolder.open(str(tmp_path)), "second", print) as second:
        first._beat()
        second.check()
        with pytest.raises(RuntimeError, match="another run has taken over"):
            first.check()
        first.__exit__()
        second.check()
    assert list(tmp_path.iterdir()) == []


def test_on_a_store_a_beat_that_took_too_long_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been written over a successor's lease, so that the name on the lease says nothing."""
    monkeypatch.setattr(pipeline.store.lease, "BEAT_S", 0.02)
    monkeypatch.setattr(pipeline.store.lease, "TAKEOVER_WAIT_S", 0)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pipeline.store.lease, "_running_s", lambda: clock.now)
    told = threading.Event()
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: told.set())
    store = RunFolder(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "run", "run")
    with Lease(store, "first", print) as lease:
        beat = lease._beat

        def slowly() -> None:
            clock.now += 0.7 * pipeline.store.lease.LEASE_S
            beat()

        lease.check()
        monkeypatch.setattr(lease, "_beat", slowly)
        assert told.wait(60)
        assert lease.holds()
        with pytest.raises(RuntimeError, match="another run has taken over"):
            lease.check()


def test_a_lease_that_changed_hands_in_the_last_moment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    (tmp_path / "lease.json").write_text(json.dumps(FAR))
    real, others = os.rename, []

    def meanwhile(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", real)
        others.append(Lease(RunFolder.open(str(tmp_path)), "faster", print).__enter__())
        real(source, target)

    monkeypatch.setattr(os, "rename", meanwhile)
    with pytest.raises(ConfigError, match=r"run faster .* is at work"):
        Lease(RunFolder.open(str(tmp_path)), "slower", print).__enter__()
    others[0].check()
    assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]
    others[0].__exit__()


def test_every_beat_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    folder = RunFolder.open(str(tmp_path))
    with Lease(folder, "s1", print):
        seen, ends_at = set[int](), time.monotonic() + 60
        while len(seen) < 20:
            lease = read_lease(folder)
            assert lease is not None
            seen.add(lease["beat"])
            assert time.monotonic() < ends_at, f"no more beats than {seen}"


def test_without_links_the_lease_is_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    quick(monkeypatch)
    with Lease(RunFolder.open(str(tmp_path)), "first", print) as first:
        first.check()
        with pytest.raises(ConfigError, match="is at work"):
            Lease(RunFolder.open(str(tmp_path)), "second", print).__enter__()
    assert list(tmp_path.iterdir()) == []


def on_store(root: Path, replaces: bool = True) -> RunFolder:
    (root / "run").mkdir()
    return RunFolder(pafs.PyFileSystem(EarlyStore(root, replaces)), "run", "early://run")


def test_on_a_store_the_loser_leaves_the_lease_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still in mid-beat, and has written over it."""
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 0.2)
    monkeypatch.setattr(pipeline.store.lease, "TAKEOVER_WAIT_S", 0)
    folder = on_store(tmp_path)
    loser = Lease(folder, "loser", print).__enter__()
    with Lease(folder, "successor", print) as successor:
        loser._beat_began_s = pipeline.store.lease._running_s() - 60
        loser._beat()
        with pytest.raises(RuntimeError, match="taken over"):
            loser.check()
        loser._is_lost = True
        loser.__exit__()
        successor.check()
        successor._beat()
    assert read_lease(folder) is None


def test_a_lease_that_is_being_replaced_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a move replaces nothing, each beat takes it away for a moment."""
    monkeypatch.setattr(pipeline.store.lease, "BEAT_S", 0.002)
    monkeypatch.setattr(pipeline.store.lease, "LEASE_S", 10)
    monkeypatch.setattr(pipeline.store.lease, "TAKEOVER_WAIT_S", 0)
    folder = on_store(tmp_path, replaces=False)
    with Lease(folder, "holder", print) as lease:
        ends_at = time.monotonic() + 60
        while lease._num_beats < 50:
            lease.check()
            assert time.monotonic() < ends_at, f"no more beats than {lease._num_beats}"


def test_a_beat_outlives_whatever_a_store_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.store.lease, "BEAT_S", 0.02)
    told = threading.Event()
    with Lease(RunFolder.open(str(tmp_path)), "s1", lambda _: told.set()) as lease:
        holds = lease.holds
        monkeypatch.setattr(lease, "holds", lambda: {}["a kind of its own"])
        assert told.wait(60)
        monkeypatch.setattr(lease, "holds", holds)
        before, ends_at = lease._num_beats, time.monotonic() + 60
        while lease._num_beats == before:
            assert time.monotonic() < ends_at, "no beat any more"
            time.sleep(0.01)


def test_a_lease_that_another_has_put_back_is_not_ours(tmp_path: Path) -> None:
    """It has our name and our text, and is another file: its session has taken the folder over in between."""
    with Lease(RunFolder.open(str(tmp_path)), "s1", print) as lease:
        text = (tmp_path / "lease.json").read_text()
        (tmp_path / "copy").write_text(text)
        os.replace(tmp_path / "copy", tmp_path / "lease.json")
        with pytest.raises(RuntimeError, match="another run has taken over"):
            lease.check()


def test_a_beat_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines may see what is written to a network file system only then."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    with Lease(RunFolder.open(str(tmp_path)), "s1", print) as lease:
        lease._beat()
        assert flushed == [(tmp_path / "lease.json").stat().st_ino] * 2


def test_a_lease_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a queue of batches asks again and again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Lease, "_write", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            Lease(RunFolder.open(str(tmp_path)), "second", print).__enter__()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
