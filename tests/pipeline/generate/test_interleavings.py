"""The protocol of the run folder as a machine: sessions begin, stand still, go on and die at every step, in any order.

The real code of a run (`generate.run`), of the lease, the folder and the sink, on a real disk; only decoding is left
out. A session may be taken for dead at any time (LEASE_S is 0), so one that stands still meets its successor; so may
its beat, which is a thread of its own. At the end all that live go on: whoever has the lease then must come to its end,
whatever the others do. Then one more session must close the books: every row once.

That the machine is worth its time is shown by mutants: the remedies of three holes taken out, which it must find.
"""

import json
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from pipeline.config.job import ConfigError, ModelConfig, SamplingConfig
from pipeline.generate import run as code
from pipeline.generate.check_paths import has_all_rows
from pipeline.generate.resume import Work
from pipeline.input.ids import digest_ids, sum_digests, sum_outputs
from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.store.lease import Lease, read_lease
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder, writer_of
from tests.support.turns import Actor, Killed, turns

ROWS = [f"r{number}" for number in range(4)]
MAX_SESSIONS, MAX_AT_ONCE = 5, 3
STEPS = (1, 2, 3, 5, 8, 13, 21, 34)
"""At a time: a few, or so many that a session comes far before another has a turn."""
ENDS = (Killed, ConfigError, RuntimeError, FileNotFoundError)
"""How a session may end: refused, taken over, books that do not close, behind the fence."""
WELL = ("done", "finished before")
MEANWHILE = "another has worked here meanwhile"


def plan_of(folder: RunFolder, earlier: Any) -> Any:
    """As much of a `PlannedRun` as a run looks at."""
    return SimpleNamespace(
        folder=folder,
        earlier=earlier,
        id_sum=sum_digests(digest_ids(ROWS)),
        fingerprint={},
        started_at=0.0,
        config=SimpleNamespace(
            model_dump=lambda mode: {},
            model=ModelConfig(),
            limits=SimpleNamespace(max_failed_rows=9),
            sampling=SamplingConfig(),
        ),
        model=SimpleNamespace(source="m", config=SimpleNamespace(num_hidden_layers=1), decode={}),
        input=SimpleNamespace(
            num_rows=len(ROWS), num_documents=len(ROWS), etags=(), num_documents_per_file=(), duplicates=(),
            carried_schema=pa.schema([]), has_choices=False,
            listing=SimpleNamespace(format="jsonl", files=()),
        ),
    )  # fmt: skip


def ids_of(path: str | Path) -> list[str]:
    return pq.ParquetFile(path).read()["id"].to_pylist()


def find_work(planned: Any, paths: list[str], log: Any) -> Any:
    """`find_work` without a cluster."""
    there = Counter(id for path in paths for id in ids_of(path))
    if set(there) - set(ROWS) or set(there.values()) - {1}:
        raise ConfigError("output.path", f"the data files hold {there}")
    left = [row for row in ROWS if row not in there]
    return SimpleNamespace(plan=planned.input, num_left=len(left), left=left)


def finished(rows: list[str], failed: set[str]) -> pa.Table:
    columns = [
        pa.array([""] * len(rows)) if f.type == pa.string() else pa.nulls(len(rows), f.type) for f in OUTPUT_SCHEMA
    ]
    table = pa.Table.from_arrays(columns, schema=OUTPUT_SCHEMA).set_column(0, "id", pa.array(rows))
    return table.append_column(STATUS, pa.array(["failed" if row in failed else "ok" for row in rows]))


class Folder(RunFolder):
    """With a report, which is not made here."""

    def read_text(self, name: str) -> str | None:
        if name != "report.json":
            return super().read_text(name)
        state = self.read_state()
        books = state["books"] if state else {"ok": None, "failed": None}
        return json.dumps({"completed": books["ok"], "failed": books["failed"]})


class Session:
    """One driver; `fickle`: a task that is repeated, and whose rows change sides."""

    def __init__(self, root: Path, mode: str, fickle: int) -> None:
        self.folder, self.mode, self.fickle = Folder.open(str(root)), mode, fickle
        self.lease: Lease | None = None
        """Once it has one."""

    def __call__(self) -> str:
        session = self.name = uuid.uuid4().hex[:12]
        earlier = self.folder.read_state() if self.mode == "resume" else None
        if earlier is not None and earlier["state"] == "finished" and self.has_all(earlier):
            return WELL[1]
        with Lease(self.folder, session, lambda _: None) as lease:
            self.lease = lease
            earlier_sessions = [] if lease.previous_session is None else [lease.previous_session]
            if self.mode == "overwrite":
                earlier_sessions += code._clear(self.folder, session, lease)
            elif self.folder.read_state() != earlier:
                return MEANWHILE
            code._execute(plan_of(self.folder, earlier), session, earlier_sessions, lease, lambda _: None)
        return WELL[0]

    def has_all(self, state: Any) -> bool:
        return has_all_rows(self.folder, state, lambda _: None)

    def stream(self, planned: Any, work: Work | Any, state: Any, lease: Lease, log: Any) -> None:
        sink = RunSink(self.folder.filesystem, self.folder.root, state["sessions"][-1]["id"], OUTPUT_SCHEMA, None,
                       stream="0a0b0c", sum_ids=sum_outputs)  # fmt: skip
        for number, start in enumerate(range(0, len(work.left), 2)):
            rows = work.left[start : start + 2]
            for attempt in range(2 if number == self.fickle else 1):
                sink.write(finished(rows, set(rows[attempt : attempt + 1])), f"{number:06d}-000")


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.actors: list[Actor] = []
        self.beats: dict[Actor, Actor] = {}
        """Of sessions: beats that stand still."""
        self.num_sessions = 0
        self.stack = ExitStack()
        for name, value in (("LEASE_S", 0.0), ("BEAT_S", 1e9)):
            self.stack.enter_context(patch(f"pipeline.store.lease.{name}", value))
        self.stack.enter_context(patch.object(code, "find_work", find_work))
        self.stack.enter_context(patch.object(code, "stream_rows", stream))
        self.stack.enter_context(patch("pipeline.generate.row_accounting.last_sign_of_life", lambda *_: 1.0))
        self.stack.enter_context(turns())

    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.is_over]

    def begin(self, mode: str, fickle: int) -> Actor:
        self.num_sessions += 1
        session = Session(self.root / "run", mode, fickle)
        actor = Actor(session)
        actor.session = session  # type: ignore[attr-defined]
        self.actors.append(actor)
        return actor

    @precondition(lambda self: self.num_sessions < MAX_SESSIONS and len(self.living()) < MAX_AT_ONCE)
    @rule(mode=st.sampled_from(["resume", "resume", "overwrite"]), fickle=st.integers(0, 2))
    def start(self, mode: str, fickle: int) -> None:
        self.begin(mode, fickle)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), steps=st.sampled_from(STEPS))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        self.go(data.draw(st.sampled_from(self.living())), steps)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.kill(data.draw(st.sampled_from(self.living())))

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), steps=st.integers(1, 3))
    def beat(self, data: st.DataObject, steps: int) -> None:
        """A beat begins, or one that stood still goes on."""
        actor = data.draw(st.sampled_from(self.holders()))
        lease = actor.session.lease  # type: ignore[attr-defined]
        beat = self.beats.get(actor) or Actor(lambda: lease.holds() and lease._beat())
        self.beats[actor] = beat
        beat.go(steps)
        if beat.is_over:
            del self.beats[actor]

    def holders(self) -> list[Actor]:
        """Those that live and took the lease, whoever has it now."""
        leases = [(actor, actor.session.lease) for actor in self.living()]  # type: ignore[attr-defined]
        return [actor for actor, lease in leases if lease is not None and not lease._stop.is_set()]

    def go(self, actor: Actor, steps: int) -> None:
        for _ in range(steps):
            actor.go(1)
            if actor not in self.holders() and actor in self.beats:  # it waits for its beat before it leaves
                self.beats.pop(actor).kill()

    def kill(self, actor: Actor) -> None:
        actor.kill()
        if actor in self.beats:
            self.beats.pop(actor).kill()

    @precondition(lambda self: self.num_sessions == MAX_SESSIONS)
    @rule()
    def rest(self) -> None:
        """Enough sessions."""

    def teardown(self) -> None:
        try:
            self.let_the_holder_end()
            for actor in self.actors:
                assert isinstance(actor.outcome, (str, *ENDS)), repr(actor.outcome)
                assert "do not close" not in str(actor.outcome), "somebody has taken its rows away"
            last = self.begin("resume", 9)
            last.go(100_000)
            assert last.outcome in WELL, repr(last.outcome)
            self.judge()
        finally:
            for actor in self.living():
                self.kill(actor)
            self.stack.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def let_the_holder_end(self) -> None:
        """Nobody else takes the lease any more; those that had it once, and its beats, go on too, in turns."""
        living = self.holders()
        for actor in self.living():
            if actor not in living:
                self.kill(actor)
        lease = read_lease(RunFolder.open(str(self.root / "run")))
        for beat in self.beats.values():
            beat.go(100_000)
        while any(not actor.is_over for actor in living):
            for actor in living:
                self.go(actor, 3)
        holder = [a for a in living if lease is not None and a.session.name == lease["session"]]  # type: ignore[attr-defined]
        assert all(actor.outcome in (*WELL, MEANWHILE) for actor in holder), repr(holder[0].outcome)

    def judge(self) -> None:
        folder = RunFolder.open(str(self.root / "run"))
        state = folder.read_state()
        assert state is not None
        assert state["state"] == "finished"
        assert state["books"]["closed"]
        assert sorted(id for path in folder.late_files((), writers(folder)) for id in ids_of(path)) == ROWS
        assert folder.unexpected_files() == []


def writers(folder: RunFolder) -> set[str]:
    paths = [path for status in ("ok", "failed") for path in folder.data_files(status)]
    return {path.rpartition("/")[2].split("-")[1] for path in paths}


def stream(planned: Any, work: Any, state: Any, lease: Lease, log: Any) -> None:
    actor: Any = threading.current_thread()
    actor.session.stream(planned, work, state, lease, log)


QUICK = settings(max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


MUTANTS = settings(QUICK, max_examples=20_000, phases=[Phase.generate], report_multiple_bugs=False)


def test_sessions_in_any_order_close_their_books() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_interleavings() -> None:
    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=10_000))


def remove_all_others(folder: RunFolder, state: Any, check: Callable[[], None], log: Any) -> None:
    """One look at the lease, and then whatever is neither known nor of the session itself."""
    check()
    known = state.get("files" if state["state"] == "finished" else "known")
    for path in () if known is None else folder.all_data_files():
        if folder.name(path) not in known and writer_of(path) != state["sessions"][-1]["id"]:
            folder.remove(folder.name(path))


def hole_4() -> ExitStack:
    """Whoever looks for late files takes those of a successor for such."""
    return mutant(patch.object(code, "remove_late", remove_all_others))


def hole_6() -> ExitStack:
    """What an earlier attempt left is replaced, one file after the other, and goes last."""
    return mutant(patch.object(RunSink, "_remove", lambda sink, path: None))


def take_blindly(lease: Lease, dead: str | None) -> bool:
    lease._beat()
    return True


def is_named(lease: Lease) -> bool:
    found = read_lease(lease._folder)
    return found is not None and found["session"] == lease._session


def hole_10() -> ExitStack:
    """A lease is written over whatever is there, by those that begin and in each beat."""
    return mutant(patch.object(Lease, "_take_on_disk", take_blindly), patch.object(Lease, "holds", is_named))


def mutant(*patches: Any) -> ExitStack:
    stack = ExitStack()
    for one in patches:
        stack.enter_context(one)
    return stack


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("hole", [hole_4, hole_6, hole_10])
def test_the_machine_finds_a_hole(hole: Callable[[], ExitStack]) -> None:
    """The remedy of one of those that were found by reading is taken out, and with it nothing is found."""
    run_state_machine_as_test(Machine, settings=QUICK)
    with hole(), pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=MUTANTS)
