"""What Ray prints as an error about what is in order stays off the terminal, all else comes; and healthy verbs."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from pipeline.cluster.ray_internals import hide_restart_warnings
from pipeline.cluster.ray_logging import RESTART, SERVE_END, SERVE_NOTES, without_printed_lines, without_stderr_lines
from tests.support.processes import command, environment, run, write_prompts
from tests.support.service_helpers import served

LOOKS_LIKE_AN_ERROR = re.compile(r"\berrors?\b|Traceback|failed|retries remaining|max_restarts", re.IGNORECASE)
FINE = re.compile(r"\b0 failed\b|\"(failed|errors?)[a-z_]*\": ([{\[]|0|null)")
"""Figures that say that nothing is wrong."""

SERVE_LINE = (
    "(raylet) Task ServeController.listen_for_change failed. There are infinite retries remaining, so the task will be "
    "retried. Error: The actor is dead because it was killed by `ray.kill`."
)
RESTART_LINE = (
    "[2026-11-23 16:30:49,848 E 17465 17465] core_worker.cc:2465: Actor with class name: "
    "'MapWorker(MapBatches(DecodeStage))' and ID: '88d1' has constructor arguments in the object store and "
    "max_restarts > 0. If the arguments in the object store go out of scope or are lost, the actor restart will fail."
)


def suspicious(text: str) -> list[str]:
    return [line for line in text.splitlines() if LOOKS_LIKE_AN_ERROR.search(FINE.sub("", line))]


def test_only_the_lines_meant_are_left_out_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with without_printed_lines(SERVE_END):
        print("before\nTask Other.call failed. There are", "infinite retries remaining")
        print(SERVE_LINE)
        print("no end of line yet", end="")
    print(", and now")
    out = capsys.readouterr().out
    assert out == "before\nTask Other.call failed. There are infinite retries remaining\nno end of line yet, and now\n"


def test_only_the_lines_meant_are_left_out_of_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(KeyError), without_stderr_lines(RESTART):
        os.write(2, f"before\n{RESTART_LINE}\n".encode())
        os.write(2, b"core_worker.cc:1: another error\n")
        raise KeyError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\ncore_worker.cc:1: another error\nafter\n"


def test_the_warning_is_hidden_where_ray_data_starts_a_worker(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start_actor(pool: object, number: int) -> int:
        os.write(2, f"{RESTART_LINE}\nstarted\n".encode())
        return number

    monkeypatch.setattr(ActorPoolMapOperator, "_start_actor", start_actor)
    hide_restart_warnings()
    hide_restart_warnings()
    assert ActorPoolMapOperator._start_actor.__wrapped__ is start_actor, "once is enough"
    assert ActorPoolMapOperator._start_actor(None, 7) == 7
    assert capfd.readouterr().err == "started\n"


@pytest.mark.slow
@pytest.mark.ray
def test_a_healthy_run_prints_no_line_that_looks_like_an_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 20)
    done = run(command(tiny_checkpoint, source, tmp_path / "run"), environment(None, tmp_path))
    assert done.returncode == 0, done.stderr
    assert suspicious(done.stderr + done.stdout) == []
    assert "20/20 rows" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_healthy_endpoint_and_its_end_print_no_line_that_looks_like_an_error(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.post({"prompt": "a pub", "max_tokens": 4}).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    said = server.log.read_text()
    assert suspicious(said) == []
    assert "stopping: new requests get 503" in said
    assert not SERVE_NOTES.search(said)


def test_the_check_sees_what_it_is_for() -> None:
    assert suspicious(SERVE_LINE)
    assert suspicious(RESTART_LINE)
    assert suspicious("Traceback (most recent call last):")
    assert suspicious("error: no such file")
    assert not suspicious('progress: 2/2 rows   0 failed\n{"failed_rows": 0, "errors": {}}')
