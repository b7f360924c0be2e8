"""The five calls of docs/batches.md, by curl and by the openai client, as the page has them, over real HTTP.

Against the routes in this process, where what a finished run leaves takes the place of a run; and, slow, against the
served application.
"""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.batches.status import TERMINAL
from pipeline.batches.storage import ClientStorage
from tests.docs.pages import FENCE, ROOT, Command, block_commands
from tests.support.batch_helpers import batch_endpoint, finish_run, storage_of
from tests.support.service_helpers import served

KEY = "my-secret-key"
PAGE = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Five calls\n")[2].partition("\n## ")[0]
(REQUESTS,) = (text for language, text in FENCE.findall(SECTION) if language == "json")
(PYTHON,) = (text for language, text in FENCE.findall(SECTION) if language == "python")
CALLS = [call for _, text in FENCE.findall(SECTION) for call in block_commands("docs/batches.md", text)]


class Decoder:
    """Finishes the batches of a storage as fast as they come, from `start` on."""

    def __init__(self, own: ClientStorage) -> None:
        self._own, self._begins, self._stops = own, threading.Event(), threading.Event()
        self.start = self._begins.set
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stops.wait(0.05):
            for record in self._own.batches() if self._begins.is_set() else ():
                if self._own.run(record["id"]).read_state() is None:
                    finish_run(self._own, record)

    def stop(self) -> None:
        self._stops.set()
        self._thread.join()


Server = tuple[str, Callable[[], None]]


@pytest.fixture(
    params=["routes", pytest.param("served", marks=[pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)])]
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """The URL, and a function from which on batches are decoded, if they are not already."""
    if request.param == "routes":
        with batch_endpoint(tmp_path / "storage", keys=(KEY,)) as url:
            decoder = Decoder(storage_of(tmp_path / "storage", KEY))
            yield url, decoder.start
            decoder.stop()
    else:
        options = [f"storage.path={tmp_path / 'storage'}", "batches.actors.background=false"]
        with served(tmp_path, *options, SKIPDECODE_API_KEYS=KEY) as running:
            yield running.url, lambda: None


def shown(command: Command) -> dict[str, Any]:
    """The part of an answer that the page shows."""
    text = command.output.strip().replace(", ...}", "}")
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_five_calls_by_curl(server: Server, tmp_path: Path) -> None:
    url, start = server
    (tmp_path / "requests.jsonl").write_text(REQUESTS)
    upload, create, look, cancel, download = CALLS
    ids: dict[str, str] = {}

    def curl(command: Command) -> str:
        text = command.text.replace("http://127.0.0.1:8000", url)
        for name, own in ids.items():
            text = text.replace(name, own)
        done = subprocess.run(
            ["bash", "-c", text.replace("curl ", "curl -sS ", 1)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answer(command: Command) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(curl(command))
        wanted = shown(command)
        if "id" in wanted:
            stem = re.compile("(file-|batch_)")
            ids[stem.sub("", wanted.pop("id"))] = stem.sub("", found["id"])
        assert found.items() >= wanted.items()
        return found

    assert (answer(upload)["bytes"], answer(create)["status"]) == (len(REQUESTS.encode()), "validating")
    assert answer(cancel)["status"] in ("cancelling", "cancelled")
    answer(create)
    start()
    deadline = time.monotonic() + 300
    while (batch := answer(look))["status"] not in TERMINAL:
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    assert batch["status"] == "completed"
    assert [json.loads(text)["custom_id"] for text in curl(download).splitlines()] == ["mill"]


def test_the_example_of_the_client(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, start = server
    (tmp_path / "requests.jsonl").write_text(REQUESTS)
    monkeypatch.chdir(tmp_path)
    start()
    text = PYTHON.replace("http://127.0.0.1:8000", url).replace("time.sleep(5)", "time.sleep(0.1)")
    assert text.count("sleep(0.1)") == 1
    exec(compile(text, "docs/batches.md", "exec"), {"__name__": "example"})
    assert json.loads(capsys.readouterr().out)["custom_id"] == "mill"
