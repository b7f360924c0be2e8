"""The protocol of the run folder as a machine: sessions begin, stand still, go on and die at every step, in any order.

The code is that of `support.sessions`, on a disk and on an object store. A session may be taken for dead at any time,
so one that stands still meets its successor; so may its beat, which is a thread of its own. Its writers are processes
of their own: they outlive it, and one that Ray believes dead may go on beside the one that repeats its task. On the
store an upload may come to its end at any time after its sender has died. At the end all that live go on: on a disk
whoever has the lease then must come to its end, whatever the others do. Then one more session must close the books:
every row once, and made by the run that `run.json` names.

That the machine is worth its time is shown by mutants: remedies of holes taken out, which it must find.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from pipeline.config.job import ConfigError
from pipeline.generate import run as code
from pipeline.store import run_folder
from pipeline.store.lease import Lease, read_lease
from pipeline.store.row_writer import RunSink, check_session
from pipeline.store.run_folder import RunFolder, writer_of
from tests.support.sessions import (
    DONE,
    MEANWHILE,
    NOTHING_TO_DO,
    ROWS,
    Driver,
    Folder,
    Repeat,
    Session,
    rows_of,
    run_of,
    sessions,
)
from tests.support.turns import Actor, Killed, stop, turns, turns_on_store
from tests.support.upload_store import UploadStore

MAX_SESSIONS, MAX_AT_ONCE = 5, 3
STEPS = (1, 2, 3, 5, 8, 13, 21, 34)
"""At a time: a few, or so many that a session comes far before another has a turn."""
ENDS = (Killed, ConfigError, RuntimeError, FileNotFoundError)
"""How a session may end: refused, taken over, books that do not close, behind the fence."""
WELL = (DONE, NOTHING_TO_DO)


class Machine(RuleBasedStateMachine):
    """On a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.drivers: list[Driver] = []
        self.beats: dict[Actor, Actor] = {}
        """Of drivers: beats that stand still."""
        self.stack = ExitStack()
        self.stack.enter_context(sessions())
        self.folder = self.new_folder()

    def new_folder(self) -> RunFolder:
        root = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, root, ignore_errors=True)
        self.stack.enter_context(turns())
        return Folder.open(str(root / "run"))

    def living(self) -> list[Driver]:
        return [driver for driver in self.drivers if not driver.is_over]

    def writers(self) -> list[Actor]:
        """Writers that nobody waits for: of a dead session, or given up by it."""
        return [
            writer
            for driver in self.drivers
            for writer in driver.session.writers
            if not writer.is_over and (driver.is_over or writer is not driver.session.writers[-1])
        ]

    def begin(self, mode: str, repeat: Repeat | None = None) -> Driver:
        self.drivers.append(Driver(Session(self.folder, mode, repeat or Repeat())))
        return self.drivers[-1]

    @precondition(lambda self: len(self.drivers) < MAX_SESSIONS and len(self.living()) < MAX_AT_ONCE)
    @rule(
        mode=st.sampled_from(["resume", "resume", "overwrite"]),
        repeat=st.builds(
            Repeat,
            task=st.integers(0, 2),
            after=st.integers(0, 4),
            is_alive=st.booleans(),
            name=st.sampled_from(["00000000", "ffffffff"]),
        ),
    )
    def start(self, mode: str, repeat: Repeat) -> None:
        self.begin(mode, repeat)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), steps=st.sampled_from(STEPS))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        self.go(data.draw(st.sampled_from(self.living())), steps)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.kill(data.draw(st.sampled_from(self.living())))

    @precondition(lambda self: self.writers())
    @rule(data=st.data(), steps=st.integers(1, 3))
    def write(self, data: st.DataObject, steps: int) -> None:
        """A writer that outlived its session, or that was given up, goes on."""
        data.draw(st.sampled_from(self.writers())).go(steps)

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), steps=st.integers(1, 3))
    def beat(self, data: st.DataObject, steps: int) -> None:
        """A beat begins, or one that stood still goes on."""
        driver = data.draw(st.sampled_from(self.holders()))
        lease = driver.session.lease
        assert lease is not None
        beat = self.beats.get(driver) or Actor(lambda: lease.holds() and lease._beat())
        self.beats[driver] = beat
        beat.go(steps)
        if beat.is_over:
            del self.beats[driver]

    def holders(self) -> list[Driver]:
        """Those that live and took the lease, whoever has it now."""
        leases = [(driver, driver.session.lease) for driver in self.living()]
        return [driver for driver, lease in leases if lease is not None and not lease._stop.is_set()]

    def go(self, driver: Driver, steps: int) -> None:
        for _ in range(steps):
            driver.go(1)
            if driver not in self.holders() and driver in self.beats:  # it waits for its beat before it leaves
                self.beats.pop(driver).kill()

    def kill(self, driver: Driver) -> None:
        driver.kill()
        if driver in self.beats:
            self.beats.pop(driver).kill()

    @precondition(lambda self: len(self.drivers) == MAX_SESSIONS)
    @rule()
    def rest(self) -> None:
        """Enough sessions."""

    def teardown(self) -> None:
        try:
            self.let_the_holder_end()
            for driver in self.drivers:
                assert isinstance(driver.outcome, (str, *ENDS)), repr(driver.outcome)
                assert "do not close" not in str(driver.outcome), "somebody has taken its rows away"
            self.close_the_books()
        finally:
            for driver in self.living():
                self.kill(driver)
            for writer in self.writers():
                writer.kill()
            self.stack.close()

    def let_the_holder_end(self) -> None:
        """Nobody else takes the lease any more; those that had it once, its beats and all writers go on, in turns."""
        living = self.holders()
        for driver in self.living():
            if driver not in living:
                self.kill(driver)
        lease = read_lease(self.folder)
        for beat in self.beats.values():
            beat.go(100_000)
        while any(not driver.is_over for driver in living):
            for driver in living:
                self.go(driver, 3)
            for writer in self.writers():
                writer.go(1)
        self.check_holder([one for one in living if lease is not None and one.session.name == lease["session"]])

    def check_holder(self, holder: list[Driver]) -> None:
        assert all(driver.outcome in (*WELL, MEANWHILE) for driver in holder), repr(holder[0].outcome)

    def close_the_books(self) -> None:
        last = self.begin("resume")
        last.go(100_000)
        assert last.outcome in WELL, repr(last.outcome)
        for writer in self.writers():
            writer.go(100_000)
        state = self.folder.read_state()
        assert state is not None
        assert state["state"] == "finished"
        assert state["books"]["closed"]
        rows = rows_of(self.folder, self.folder.all_data_files())
        assert sorted(rows) == [(row, run_of(state)) for row in ROWS]
        assert self.folder.unexpected_files() == []


class StoreMachine(Machine):
    """On an object store, where the last writer of a lease has it."""

    store: UploadStore

    def new_folder(self) -> RunFolder:
        self.store = self.stack.enter_context(turns_on_store())
        return Folder(pafs.PyFileSystem(self.store), "bucket/run", "store://bucket/run")

    def holders(self) -> list[Driver]:
        """No beats: how long one may take is a matter of clocks there."""
        return []

    def check_holder(self, holder: list[Driver]) -> None:
        """Another's last beat, or the removal of its lease, may have cost it the folder."""

    @precondition(lambda self: self.store.pending)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """An upload comes to its end, be its sender there or not."""
        data.draw(st.sampled_from(self.store.pending)).land()

    def close_the_books(self) -> None:
        """Twice: what arrives after the end is found and removed."""
        if self.store.pending:
            last = self.begin("resume")
            last.go(100_000)
            assert last.outcome in WELL, repr(last.outcome)
            for upload in tuple(self.store.pending):
                upload.land()
        super().close_the_books()


MACHINES = [Machine, StoreMachine]
QUICK = settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
MUTANTS = settings(QUICK, max_examples=20_000, phases=[Phase.generate], report_multiple_bugs=False)


@pytest.mark.parametrize("machine", MACHINES)
def test_sessions_in_any_order_close_their_books(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", MACHINES)
def test_ten_thousand_interleavings(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=10_000))


def remove_all_others(folder: RunFolder, state: Any, check: Callable[[], None], log: Any) -> None:
    """One look at the lease, and then whatever is neither known nor of the session itself."""
    check()
    for path in folder.all_data_files():
        if not run_folder.counts_file(state)(folder.name(path)) and writer_of(path) != state["sessions"][-1]["id"]:
            folder.remove(folder.name(path))


def late_files_of_a_successor() -> ExitStack:
    """Whoever looks for late files takes those of a successor for such."""
    return mutant(patch.object(code, "remove_late", remove_all_others))


def all_attempts_count() -> ExitStack:
    """A task that was repeated has its rows twice."""
    return mutant(patch.object(RunFolder, "one_attempt_each", lambda _, paths: list(paths)))


def the_shortest_attempt_counts() -> ExitStack:
    """It may have died before it wrote all rows."""
    return mutant(patch.object(run_folder, "max", min, create=True))


def a_writer_deletes() -> ExitStack:
    """A repeat takes away what its earlier attempt has written, behind a look at whether its session is over."""
    real = RunSink.write

    def write(sink: RunSink, table: Any, name: str) -> None:
        earlier = re.compile(rf"/part-{sink.session}-{sink.execution_id}-{name.rpartition('-')[0]}-")
        folder = RunFolder(sink.filesystem, sink.root, "")
        for path in filter(earlier.search, folder.data_files("failed") + folder.data_files("ok")):
            if folder.is_local:
                os.stat(f"{sink.root}/{run_folder.STAGING}/{sink.session}")
            else:
                check_session(sink.filesystem, sink.root, sink.session)
            stop()
            sink.filesystem.delete_file(path)
        real(sink, table, name)

    return mutant(patch.object(RunSink, "write", write))


def take_blindly(lease: Lease, dead: str | None) -> bool:
    lease._beat()
    return True


def is_named(lease: Lease) -> bool:
    found = read_lease(lease._folder)
    return found is not None and found["session"] == lease._session


def a_lease_is_written_over() -> ExitStack:
    """Whatever is there, by those that begin and in each beat."""
    return mutant(patch.object(Lease, "_take_on_disk", take_blindly), patch.object(Lease, "holds", is_named))


def whatever_is_there_counts() -> ExitStack:
    """A session knows all files that it finds at its start, of whatever run."""

    def counts_file(state: Any) -> Callable[[str], bool]:
        known = None if state["state"] != "finished" else state["files"]
        sessions = [session["id"] for session in state["sessions"]]
        return lambda name: known is None or name in known or writer_of(name) in sessions

    return mutant(patch.object(run_folder, "counts_file", counts_file))


def a_folder_is_deleted_behind_a_check() -> ExitStack:
    """`--overwrite` on a store: with whatever has been added since the check."""

    def remove(folder: RunFolder, name: str, check: Callable[[], None]) -> None:
        check()
        folder.remove(name)

    return mutant(patch.object(RunFolder, "_remove_listed", remove))


def mutant(*patches: Any) -> ExitStack:
    stack = ExitStack()
    for one in patches:
        stack.enter_context(one)
    return stack


HOLES = [
    (Machine, late_files_of_a_successor),
    (Machine, all_attempts_count),
    (Machine, the_shortest_attempt_counts),
    (Machine, a_writer_deletes),
    (Machine, a_lease_is_written_over),
    (StoreMachine, whatever_is_there_counts),
    (StoreMachine, a_folder_is_deleted_behind_a_check),
    (StoreMachine, all_attempts_count),
    (StoreMachine, a_writer_deletes),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("machine", "hole"), HOLES, ids=[f"{machine.__name__} {hole.__name__}" for machine, hole in HOLES]
)
def test_the_machine_finds_a_hole(machine: type[Machine], hole: Callable[[], ExitStack]) -> None:
    """The remedy of one of those that were found by reading is taken out, and with it nothing is found."""
    run_state_machine_as_test(machine, settings=QUICK)
    with hole(), pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=MUTANTS)
