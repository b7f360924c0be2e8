"""What is shown while a run runs: a bar on a terminal (a pseudo-terminal here), lines in a log, a job's metadata."""

import json
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem

from pipeline.cluster.job_metadata import JOB_CONFIG, job_teller, submission_id, tell_job
from pipeline.cluster.progress import LiveBar, LiveLine, Ticker
from pipeline.formatting import count, duration, mask
from pipeline.report.collector import MetricsCollector

HALF = {
    "rows": 50, "failed": 2, "input_tokens": 0, "output_tokens": 500, "workers": 2, "restarts": 1, "sitting_out": 0,
    "working_s": 5.0,
}  # fmt: skip


def test_the_time_to_load_is_no_part_of_the_pace(tmp_path: Path) -> None:
    collector = MetricsCollector(LocalFileSystem(), str(tmp_path), "run", 100)
    time.sleep(0.3)
    assert collector.counts()["working_s"] == 0
    ready_at = time.monotonic()
    collector.worker_started("a", {"load_s": 0.3})
    time.sleep(0.3)
    collector.worker_started("b", {"load_s": 0.6})  # the first one counts
    assert 0.3 <= collector.counts()["working_s"] <= time.monotonic() - ready_at + 0.05  # it is rounded


def test_a_worker_that_sits_out_counts_once_over_its_restarts(tmp_path: Path) -> None:
    collector = MetricsCollector(LocalFileSystem(), str(tmp_path), "run", 100)
    for worker in ("a", "a", "b"):
        collector.worker_sits_out(worker)
    assert collector.counts()["sitting_out"] == 2


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("TERM", "xterm")
        with LiveBar(lambda: HALF, 100):
            time.sleep(0.01)
    parts: list[bytes] = []
    with suppress(OSError):  # the other end is closed
        while True:  # a terminal hands on in parts what it gets
            parts.append(os.read(ours, 1 << 16))
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode())
    assert "50 %" in shown
    assert "━" in shown
    assert re.search(r"50/100 rows   100 output tokens/s   2 failed   2 actors \(1 restart\)   0 s   ETA 5 s", shown)


def test_a_log_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["one", None, "two"])
    live = LiveLine(lambda: next(lines))
    for last in (False, False, True):
        live._tick(last)
    assert capsys.readouterr().err == "progress: one\nprogress: two\n"


def test_outside_a_job_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_CONFIG, raising=False)
    assert submission_id() is None
    tell_job(HALF, 1.0)
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}))
    assert submission_id() == "raysubmit_1"
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    tell_job(HALF, 1.0)  # no error


@pytest.mark.parametrize("record", ["not JSON", "[]", '{"metadata": 5}'])
def test_a_job_record_of_another_kind_ends_nothing(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_CONFIG, record)
    notes: list[str] = []
    tell = job_teller(notes.append)
    for _ in range(3):
        tell(HALF, 1.0)
    (log,) = notes
    assert log.startswith("progress: the job's metadata cannot be written (")


def test_the_last_tick_comes_at_the_end_and_after_an_error_but_a_signal_does_not_wait() -> None:
    ticks: list[bool] = []
    stuck, is_answered = threading.Event(), threading.Event()

    def tick(last: bool) -> None:
        ticks.append(last)
        if not last:
            stuck.wait(60)  # as a question to a cluster that is gone
            is_answered.set()

    with pytest.raises(ValueError), Ticker(ticks.append, 60.0):
        raise ValueError
    assert ticks == [True]

    def interrupted() -> None:
        with Ticker(tick, 0.01):
            while len(ticks) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_answered.is_set()
    assert ticks == [True, False]
    stuck.set()


def test_credentials_in_paths_are_masked() -> None:
    assert mask("'s3://key:secret@bucket/in', gs://b/x") == "'s3://***@bucket/in', gs://b/x"
    assert mask("http://host/a@b") == "http://host/a@b"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119.4, "119 s"), (200, "3 min 20 s"), (7199, "119 min 59 s"), (7500, "2 h 5 min")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_in_words() -> None:
    assert [count(n, "actor") for n in (0, 1, 1200)] == ["0 actors", "1 actor", "1,200 actors"]
