"""A whole run on an S3-compatible server on loopback: input, run folder, resume, overwrite, verify, retry."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import ray
from moto.server import ThreadedMotoServer

from jobs import generate, retry, verify
from pipeline.export.target import open_destination
from pipeline.schema import STATUS
from pipeline.store.lease import Lease
from pipeline.store.row_writer import RunSink, write_whole
from pipeline.store.run_folder import RunFolder
from tests.support.store_faults import Delay, begins_upload, object_store
from tests.support.trials import LOOPBACK_KEYS
from tests.support.verbs import Call

ROWS = [{"id": f"r{i}", "prompt": f"row {i}"} for i in range(40)]
BAD = [{"id": "long", "prompt": "word " * 500}, {"id": "r3", "prompt": "a duplicate"}]


@pytest.fixture(scope="module")
def uri(own_ray: None) -> Iterator[Callable[[str], str]]:
    """`uri("in")`: `s3://bucket/in?...` on a server of our own; Ray's workers inherit the credentials."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {key: os.environ.get(key) for key in keys}
    os.environ.update(keys)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()

    def make(path: str) -> str:
        return f"s3://bucket/{path}?endpoint_override={host}:{port}&scheme=http&region=us-east-1"

    filesystem, _ = pafs.FileSystem.from_uri(make("") + "&allow_bucket_creation=true")
    filesystem.create_dir("bucket")
    yield make
    ray.shutdown()  # while the server is up
    server.stop()
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})


def store(uri: Callable[[str], str]) -> pafs.FileSystem:
    return pafs.FileSystem.from_uri(uri(""))[0]


def put(uri: Callable[[str], str], path: str, rows: list[dict[str, Any]]) -> None:
    with store(uri).open_output_stream(f"bucket/{path}") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def objects(uri: Callable[[str], str], path: str) -> list[str]:
    infos = store(uri).get_file_info(pafs.FileSelector(f"bucket/{path}", recursive=True, allow_not_found=True))
    return sorted(info.path for info in infos if info.type == pafs.FileType.File)


def tokens(uri: Callable[[str], str], run: str) -> dict[str, list[int]]:
    """Good rows; fails when an id is there twice."""
    found: dict[str, list[int]] = {}
    for path in objects(uri, f"{run}/data/status=ok"):
        for row in pq.ParquetFile(store(uri).open_input_file(path)).read().to_pylist():
            assert row["id"] not in found
            found[row["id"]] = row["generated_tokens"]
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_on_an_object_store(uri: Callable[[str], str], tiny_checkpoint: Path, call: Call) -> None:
    put(uri, "in/a.jsonl", ROWS[:25])
    put(uri, "in/b.jsonl", ROWS[25:] + BAD)
    fixed = [
        f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=8", "-i", uri("in"),
        "-o", uri("run"), "actors.batch_size=8", "actors.window_batches=1", "limits.max_failed_rows=5",
    ]  # fmt: skip
    code, report, err = call(generate, *fixed)
    assert code == 0, err
    assert report["books"] == {"input": 42, "ok": 40, "failed": 2, "closed": True}
    before = tokens(uri, "run")
    names = {path.removeprefix("bucket/run/").partition("/")[0] for path in objects(uri, "run")}
    assert names == {"data", "metrics", "report.html", "report.json", "run.json"}, "no lease, no staging"
    state = RunFolder.open(uri("run")).read_state()
    assert state is not None
    assert all(etag for _, _, _, etag, _ in state["input"]["files"])
    code, _, err = call(verify, uri("run"))
    assert code == 0, err

    # a finished run, then one that lost half of its files
    code, report, err = call(generate, *fixed, "--resume")
    assert (code, report["was_finished"]) == (0, True), err
    code, _, err = call(generate, *fixed)
    assert (code, "exists already" in err) == (2, True)
    for path in objects(uri, "run/data")[::2]:
        store(uri).delete_file(path)
    code, verdict, _ = call(verify, uri("run"))
    assert (code, verdict["problems"].keys() >= {"missing", "count"}) == (1, True)
    code, report, err = call(generate, *fixed, "--resume")
    assert (code, report["was_finished"]) == (0, False), err
    assert "finished before, but its data files hold" in err
    assert tokens(uri, "run") == before
    assert call(verify, uri("run"))[0] == 0

    # failed rows again
    code, document, err = call(retry, uri("run"), "input.too_long=truncate_right")
    assert (code, document["tried"], document["recovered"]) == (0, 1, 1), err
    after = tokens(uri, "run")
    assert after.pop("long")
    assert after == before
    assert call(verify, uri("run"))[0] == 0
    assert not objects(uri, "run/checkpoint")

    # the same name, size and time would not tell; the etag does
    put(uri, "in/a.jsonl", [*ROWS[:24], {"id": "q24", "prompt": "row 24"}])
    code, _, err = call(generate, *fixed, "--resume")
    assert (code, "input.files: a.jsonl: the run was started with" in err) == (2, True)
    code, report, err = call(generate, *fixed, "--overwrite")
    assert (code, report["completed"]) == (0, 40), err
    assert tokens(uri, "run").keys() == {row["id"] for row in ROWS if row["id"] != "r24"} | {"q24"}


def _a_row_changes_sides(folder: RunFolder) -> None:
    """In a task that is repeated: the attempt counts that has written all rows."""
    schema = pa.schema([("id", pa.string())])
    with Lease(folder, "s0", print):
        sink = RunSink(folder.filesystem, folder.root, "s0", schema, None, execution_id="x")
        sink.write(pa.table({"id": ["a"], STATUS: ["ok"]}), "0-0-first")
        sink.write(pa.table({"id": ["a", "b"], STATUS: ["failed", "ok"]}), "0-0-second")
        paths = [path for path in folder.all_data_files() if "part-s0" in path]
        kept = [folder.name(path) for path in folder.one_attempt_each(paths)]
        assert kept == [f"data/status={status}/part-s0-x-0-0-second.parquet" for status in ("ok", "failed")]
        for path in paths:
            folder.remove(folder.name(path))


def test_the_run_folder_on_an_object_store(uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.lease.TAKEOVER_WAIT_S", 0.05)
    folder = RunFolder.open(uri("folder"))
    assert not folder.exists()
    assert folder.read_state() is None
    with Lease(folder, "s1", print) as lease:
        assert not folder.exists()  # a lease alone is no run
        folder.write_state({"state": "running"})
        lease.check()
        folder.fence("s1")
        for name in ("one", "two"):
            path = f"data/status=ok/part-s1-{name}.parquet"
            write_whole(folder.filesystem, folder.root, path, pa.table({"id": [name]}), "s1")
    _a_row_changes_sides(folder)
    with pytest.raises(FileNotFoundError, match="session s1 holds this folder no more"):  # a writer that outlived it
        write_whole(folder.filesystem, folder.root, "data/status=ok/part-s1-3.parquet", pa.table({"id": ["x"]}), "s1")
    assert folder.exists()
    assert objects(uri, "folder") == [
        "bucket/folder/data/status=ok/part-s1-one.parquet",
        "bucket/folder/data/status=ok/part-s1-two.parquet",
        "bucket/folder/run.json",
    ]
    assert folder.count_rows("ok") == 2
    state: Any = {"state": "finished", "sessions": [{"id": "s1"}], "former": []}
    late = folder.late_files(state | {"files": ["data/status=ok/part-s1-one.parquet"]})
    assert late == ["bucket/folder/data/status=ok/part-s1-two.parquet"]
    folder.remove("data/status=ok/part-s1-two.parquet")
    folder.move("data/status=ok/part-s1-one.parquet", "data/status=failed/moved.parquet")
    assert (folder.count_rows("ok"), folder.count_rows("failed")) == (0, 1)
    folder.clear("s2", lambda: None)
    assert objects(uri, "folder") == ["bucket/folder/run.json"]
    assert store(uri).get_file_info("bucket").type == pafs.FileType.Directory


def test_an_upload_that_is_cut_off_shows_nothing(uri: Callable[[str], str]) -> None:
    code = (
        "import os, signal, sys\nfrom pyarrow.fs import FileSystem\n"
        "filesystem, path = FileSystem.from_uri(sys.argv[1])\n"
        "stream = filesystem.open_output_stream(path)\nstream.write(bytes(12 << 20))\nprint('sent', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, uri("half/x.parquet")], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("sent\n", -9), done.stderr
    assert objects(uri, "half") == []


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunFolder, Delay]]:
    """A run folder on a store of its own, and what delays a request there."""
    for key, value in LOOPBACK_KEYS.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("pipeline.store.lease.TAKEOVER_WAIT_S", 0.0)
    with object_store() as (make, delay):
        yield RunFolder.open(make(uuid.uuid4().hex)), delay


def test_who_lost_the_folder_leaves_what_its_successor_wrote(slow_store: tuple[RunFolder, Delay]) -> None:
    """It looks at the lease before it begins an upload: a store completes one that is let go."""
    folder, _ = slow_store
    names = ("run.json", "batch_output.jsonl")
    for name in names:
        folder.write_text(name, "of the successor")

    def lost() -> None:
        raise RuntimeError("taken over")

    for name in names:
        with pytest.raises(RuntimeError, match="taken over"):
            folder.write_text(name, "of the loser" * 1_000_000, lost)
        with pytest.raises(ZeroDivisionError), folder.replacing(name) as file:
            file.write(b"half of it" * (1 // 0))
        assert folder.read_text(name) == "of the successor"


def write_state(folder: RunFolder) -> None:
    folder.write_state({"state": "finished"})  # type: ignore[typeddict-item]


def write_data(folder: RunFolder) -> None:
    table = pa.table({"id": ["a", "b"]})
    write_whole(folder.filesystem, folder.root, "data/status=ok/part-s1-x-0.parquet", table, "s1")


def write_export(folder: RunFolder) -> None:
    with open_destination(folder) as destination, destination.file("export/part-0") as file:
        file.write(b"all of it")


@pytest.mark.parametrize("write", [write_state, write_data, write_export])
def test_ctrl_c_in_an_upload_shows_nothing_half(
    slow_store: tuple[RunFolder, Delay], write: Callable[[RunFolder], None]
) -> None:
    """It comes, twice, while the upload is being opened; who waits for it is told when all of it is there."""
    folder, delay = slow_store
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Lease(folder, "s1", print):
        folder.write_state({"state": "running"})  # type: ignore[typeddict-item]
        delay.arm(begins_upload)

        def interrupt() -> None:
            assert delay.held.wait(60)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            delay.may_go.set()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            write(folder)
        assert delay.may_go.is_set(), "the upload goes on behind the back of whoever ends the run"
        thread.join()
    signal.signal(signal.SIGINT, interrupted)
    state = "finished" if write is write_state else "running"
    assert folder.read_state() == {"state": state}
    assert folder.count_rows("ok") == (2 if write is write_data else 0)
    assert folder.read_text("export/part-0") is None, "an export that was cut off takes away what it has made"


def test_an_empty_object_holds_no_rows_and_a_resume_takes_it_away(slow_store: tuple[RunFolder, Delay]) -> None:
    """As earlier versions left one behind. Whoever has lost the folder takes none away; nor what is not ours."""
    folder, _ = slow_store
    mine, others = f"data/status=ok/part-{'0' * 12}-0a0b0c-000000-000.parquet", "data/status=ok/notes.parquet"
    with Lease(folder, "s1", print):
        write_data(folder)
    for name in (mine, others):
        folder.write_text(name, "")

    def lost() -> None:
        raise RuntimeError("taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        folder.remove_empty(lost)
    assert folder.read_text(mine) == ""
    assert folder.remove_empty(lambda: None) == [folder.path(mine)]
    assert folder.read_text(mine) is None
    assert folder.read_text(others) == ""
    folder.remove(others)
    assert folder.count_rows("ok") == 2
