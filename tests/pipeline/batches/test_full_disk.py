"""Files and batches on a real disk that is full: OpenAI's errors, nothing is lost, and with room it all goes on."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

import pipeline.generate.run as run_module
from pipeline.batches.driver import run_batch
from pipeline.batches.ending import end_batch
from pipeline.batches.storage import ClientStorage, StoredBatch
from pipeline.generate.stopping import RunStopped
from tests.support.batch_helpers import answers_of, batch_endpoint, client_of, jsonl, line, storage_of
from tests.support.processes import row_list

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


class Disk:
    """A file system of its own, in memory."""

    def __init__(self, path: Path, size: str) -> None:
        self.path, self._ballast = path, path / "ballast"
        path.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
        if made.returncode:
            pytest.skip(f"no small disk here: {made.stderr.decode()}")

    def fill(self) -> None:
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._ballast.unlink()

    def grow(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", request.param)
    yield made
    made.unmount()


def is_full(caught: "pytest.ExceptionInfo[openai.InternalServerError]") -> bool:
    error: Any = caught.value.response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "no space is left" in error["message"]
    return (caught.value.status_code, error["type"], error["code"]) == (507, "server_error", "storage_full")


def upload(client: openai.OpenAI, content: bytes) -> Any:
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def create(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")


def record_of(own: ClientStorage, batch_id: str) -> StoredBatch:
    record = own.batch(batch_id)
    assert record is not None
    return record


@pytest.mark.parametrize("disk", ["300k"], indirect=True)
def test_uploads_and_batches_on_a_full_disk(disk: Disk) -> None:
    with batch_endpoint(disk.path / "storage") as url:
        client, content = client_of(url), jsonl([line("a", "x" * 100_000)])
        kept, spare = upload(client, content), upload(client, content)
        with pytest.raises(openai.InternalServerError) as caught:
            upload(client, content)
        assert is_full(caught)
        disk.fill()
        before = {path for path in disk.path.rglob("*") if path.is_file()}
        with pytest.raises(openai.InternalServerError) as caught:
            create(client, kept.id)
        assert is_full(caught)
        assert {path for path in disk.path.rglob("*") if path.is_file()} == before
        assert {one.id for one in client.files.list()} == {kept.id, spare.id}
        assert client.files.content(kept.id).content == content
        client.files.delete(spare.id)  # whoever uses the API can make room by it
        made = create(client, kept.id)
        assert made.status == "validating"
        disk.fill()
        with pytest.raises(openai.InternalServerError) as caught:
            client.batches.cancel(made.id)
        assert is_full(caught)
        (error,) = client.batches.retrieve(made.id).errors.data
        assert (error.code, client.batches.retrieve(made.id).status) == ("storage_full", "validating")
        disk.make_room()
        assert client.batches.cancel(made.id).status == "cancelling"
        own = storage_of(disk.path / "storage")
        disk.fill()
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                end_batch(own, record_of(own, made.id), "cancelled", print)
        assert client.batches.retrieve(made.id).status == "cancelling"
        disk.make_room()
        end_batch(own, record_of(own, made.id), "cancelled", print)
        gone = client.batches.retrieve(made.id)
        assert (gone.status, gone.errors, gone.request_counts.total) == ("cancelled", None, 1)


@pytest.mark.parametrize("disk", ["1m"], indirect=True)
def test_an_upload_for_which_the_temporary_folder_is_too_small(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
    with batch_endpoint(tmp_path / "storage") as url:
        client, content = client_of(url), b'{"long": "' + 8_000_000 * b"x" + b'"}\n'
        with pytest.raises(openai.InternalServerError) as caught:
            upload(client, content)
        assert is_full(caught)
        assert str(disk.path) in caught.value.response.json()["error"]["message"]
        assert list(client.files.list()) == []
        assert list(disk.path.iterdir()) == []
        assert upload(client, content[-500_000:]).bytes == 500_000


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("disk", ["2400k"], indirect=True)
def test_a_batch_whose_disk_is_full_goes_on_when_there_is_room(
    disk: Disk, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First while its rows are written, then while its result files are; its driver runs in this process."""
    random, count = Random(0), 200
    lines = [line(f"r{n}", user=random.randbytes(4000).hex()) for n in range(count)]
    actors = {"batch_size": 16, "window_batches": 1, "background": False}
    model = {"source": str(tiny_checkpoint), "dtype": "float32"}
    with batch_endpoint(disk.path / "storage", model=model, batches={"actors": actors}) as url:
        client, own = client_of(url), storage_of(disk.path / "storage")
        made = create(client, upload(client, jsonl(lines)).id)
        run_path = Path(own.run_path(made.id))

        def look() -> tuple[str, list[str], dict[str, Any]]:
            seen = client.batches.retrieve(made.id)
            codes = [error.code for error in seen.errors.data] if seen.errors else []
            rows = row_list(run_path, "ok")
            by_id = {row["id"]: row for row in rows}
            assert len(by_id) == len(rows) == seen.request_counts.completed
            return seen.status, codes, by_id

        def drive() -> None:
            run_batch(own, record_of(own, made.id), print)

        with pytest.raises(RunStopped, match="no space left"):
            drive()
        status, codes, before = look()
        assert (status, codes, 0 < len(before) < count) == ("in_progress", ["storage_full"], True)
        with suppress(RunStopped):  # or it is refused before it begins, which is no failure of the batch either
            drive()
        status, codes, rows = look()
        assert (status, codes, rows.items() >= before.items()) == ("in_progress", ["storage_full"], True)
        disk.grow("60m")
        with monkeypatch.context() as patch:
            write = run_module.write_batch_files
            patch.setattr(run_module, "write_batch_files", lambda *given, **keys: (disk.fill(), write(*given, **keys)))
            with pytest.raises(RunStopped, match="no space left"):
                drive()
        status, codes, rows = look()
        assert (status, codes, len(rows), rows.items() >= before.items()) == ("finalizing", ["storage_full"], 200, True)
        assert client.batches.retrieve(made.id).output_file_id is None
        disk.make_room()
        drive()
        assert look() == ("completed", [], rows)
        output, errors = answers_of(client, client.batches.retrieve(made.id))
        assert (output.keys(), errors) == (rows.keys(), [])
