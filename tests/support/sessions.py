"""Sessions in a run folder: the real code of a run (`generate.run`), of the lease, the folder and the sink.

Only decoding is left out, and with it Ray: a session's rows name the run that made them.
"""

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.job import ConfigError, InputConfig, ModelConfig, SamplingConfig
from pipeline.generate import run as code
from pipeline.generate.check_paths import has_all_rows
from pipeline.input.ids import digest_ids, row_keys, sum_digests
from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.store.lease import Lease
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from tests.support.turns import Actor, stop

ROWS = [f"r{number}" for number in range(4)]
PER_FILE = 2
DONE, NOTHING_TO_DO, MEANWHILE = "done", "finished before", "another has worked here meanwhile"


def plan_of(folder: RunFolder, earlier: Any, if_exists: str = "resume") -> Any:
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
            output=SimpleNamespace(if_exists=if_exists, reasoning_parser=None),
            limits=SimpleNamespace(max_failed_rows=9),
            sampling=SamplingConfig(),
            input=InputConfig(path="in.jsonl"),
        ),
        model=SimpleNamespace(source="m", config=SimpleNamespace(num_hidden_layers=1, implementation="own"), decode={}),
        input=SimpleNamespace(
            num_rows=len(ROWS), num_documents=len(ROWS), etags=(), num_documents_per_file=(), duplicates=(),
            carried_schema=pa.schema([]), has_choices=False,
            listing=SimpleNamespace(format="jsonl", files=()),
        ),
    )  # fmt: skip


def run_of(state: RunState) -> str:
    """What names the run of `state` in its rows: the session that began it."""
    return state["sessions"][0]["id"]


def rows_of(folder: RunFolder, paths: list[str]) -> list[tuple[str, str]]:
    """Id and run of each row."""
    rows = []
    for path in paths:
        with folder.filesystem.open_input_file(path) as file:
            rows += pq.ParquetFile(file).read(columns=["id", "generated_text"]).to_pylist()
    return [(row["id"], row["generated_text"]) for row in rows]


def find_work(planned: Any, paths: list[str], log: Any) -> Any:
    """`find_work` without a cluster."""
    there = Counter(id for id, _ in rows_of(planned.folder, paths))
    if set(there) - set(ROWS) or set(there.values()) - {1}:
        raise ConfigError("output.path", f"the data files hold {there}")
    left = [row for row in ROWS if row not in there]
    return SimpleNamespace(plan=planned.input, num_left=len(left), left=left)


def finished(rows: list[str], failed: set[str], run: str) -> pa.Table:
    columns = [
        pa.array([""] * len(rows)) if f.type == pa.string() else pa.nulls(len(rows), f.type) for f in OUTPUT_SCHEMA
    ]
    table = pa.Table.from_arrays(columns, schema=OUTPUT_SCHEMA)
    for name, values in (("id", rows), ("generated_text", [run] * len(rows))):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    return table.append_column(STATUS, pa.array(["failed" if row in failed else "ok" for row in rows]))


class Folder(RunFolder):
    """With a report, which is not made here."""

    def read_text(self, name: str) -> str | None:
        if name != "report.json":
            return super().read_text(name)
        state = self.read_state()
        books = state["books"] if state else {"ok": None, "failed": None}
        return json.dumps({"completed": books["ok"], "failed": books["failed"]})


@dataclass
class Repeat:
    """A task whose process Ray believes dead after some steps, and which it repeats."""

    task: int = -1
    after: int = 0
    """Steps."""
    is_alive: bool = False
    """The process goes on. Otherwise it is dead indeed. Rows change sides when they are made again."""
    name: str = "00000000"
    """Of this attempt. That of the next one is between it and "ffffffff"."""


@dataclass(eq=False)
class Session:
    """One driver; call it in a thread of its own."""

    folder: RunFolder
    mode: str
    repeat: Repeat = field(default_factory=Repeat)
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    lease: Lease | None = None
    """Once it has one."""
    writers: list[Actor] = field(default_factory=list)

    def __call__(self) -> str:
        earlier = self.folder.read_state() if self.mode == "resume" else None
        if earlier is not None and earlier["state"] == "finished" and has_all_rows(self.folder, earlier, _silent):
            return NOTHING_TO_DO
        with Lease(self.folder, self.name, _silent) as lease:
            self.lease = lease
            try:
                is_overwritten = self.mode == "overwrite"
                earlier_sessions = code._earlier_sessions(self.folder, earlier, lease, is_overwritten)
            except ConfigError as error:
                if "meanwhile" not in str(error):
                    raise
                return MEANWHILE
            code._run_session(plan_of(self.folder, earlier, self.mode), self.name, earlier_sessions, lease, _silent)
        return DONE

    def stream(self, left: list[str], state: RunState) -> None:
        """Writes rows as the tasks of a run do, in processes that outlive this one."""
        sink = RunSink(self.folder.filesystem, self.folder.root, self.name, OUTPUT_SCHEMA, None, execution_id="0a0b0c",
                       row_keys=row_keys)  # fmt: skip
        run = run_of(state)
        for number, start in enumerate(range(0, len(left), PER_FILE)):
            rows, name = left[start : start + PER_FILE], f"{number:06d}-000"
            failed = {rows[0]}
            if number == self.repeat.task:
                first = self._start(partial(sink.write, finished(rows, failed, run), f"{name}-{self.repeat.name}"))
                for _ in range(self.repeat.after):
                    self._wait(first, 1)
                if not self.repeat.is_alive:
                    first.kill()
                failed = set(rows[1:])
            writer = self._start(partial(sink.write, finished(rows, failed, run), f"{name}-88888888"))
            self._wait(writer)
            if isinstance(writer.outcome, BaseException):
                raise FileNotFoundError("a writer failed") from writer.outcome

    def _start(self, work: Callable[[], object]) -> Actor:
        self.writers.append(Actor(work))
        return self.writers[-1]

    def _wait(self, writer: Actor, steps: int = 100_000) -> None:
        """Each step of the session is one of the writer, which may have others while the session stands still."""
        for _ in range(steps):
            stop()
            if writer.is_over:
                return
            writer.go(1)


def _silent(_: str) -> None: ...


def _stream(planned: Any, work: Any, state: Any, lease: Lease, log: Any, window: Any) -> None:
    thread: Any = threading.current_thread()
    thread.session.stream(work.left, state)


@contextmanager
def sessions() -> Iterator[None]:
    """`Session` works within this block: a lease may be taken over at any time, and there is no beat."""
    patches = [
        patch("pipeline.store.lease.LEASE_S", 0.0),
        patch("pipeline.store.lease.BEAT_S", 1e9),
        patch.object(code, "find_work", find_work),
        patch.object(code, "stream_rows", _stream),
        patch("pipeline.generate.row_accounting.last_sign_of_life", lambda *_: 1.0),
    ]
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


class Driver(Actor):
    """A session that takes turns with others."""

    def __init__(self, session: Session) -> None:
        self.session = session
        super().__init__(session)
