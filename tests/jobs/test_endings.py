"""How every verb ends: bad configuration, a crash, Ctrl-C, too many failed rows. Always with a document and its code.

What takes seconds in a verb is replaced here; a real process ends in each way once.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import verbs
from jobs.cli import MAX_ERROR_CHARS, run_verb
from pipeline.config.job import ConfigError
from pipeline.generate.stopping import RunStopped, TooManyFailed

ROOT = Path(__file__).parents[2]
WORK = {  # verb -> what it calls to do its work, and the arguments it needs to get there
    "bench": ("pipeline.bench.decoder.run_bench", []),
    "calibrate": ("pipeline.evaluation.calibrate.calibrate", []),
    "demo": ("pipeline.generate.run.run", ["--rows=1", "--prompts=OUT/prompts.jsonl"]),
    "distill": ("pipeline.training.finetune.finetune", []),
    "doctor": ("pipeline.doctor.examine.examine", []),
    "evaluate": ("pipeline.evaluation.score.evaluate", ["OUT"]),
    "export": ("pipeline.export.export.export", ["OUT", "--output=OUT/export"]),
    "finetune": ("pipeline.training.finetune.finetune", []),
    "generate": ("pipeline.generate.run.run", []),
    "report": ("pipeline.report.figures.rebuild_report", ["OUT"]),
    "retry": ("pipeline.generate.retry.retry", ["OUT"]),
    "serve": ("pipeline.service.serve.running", []),
    "verify": ("pipeline.generate.verify.verify", ["OUT"]),
}
Run = Callable[..., tuple[int, dict[str, Any], str]]
VERBS = pytest.mark.parametrize("verb", verbs())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run(verb, work, *arguments)`: exit code, document and stderr of a verb whose work is the function `work`."""
    monkeypatch.chdir(ROOT)

    def call(verb: str, work: Callable[[], object], *arguments: str) -> tuple[int, dict[str, Any], str]:
        place, needed = WORK[verb]
        monkeypatch.setattr(place, lambda *_args, **_kwargs: work())
        words = [word.replace("OUT", str(tmp_path)) for word in needed]
        code = importlib.import_module(f"jobs.{verb}").main([*words, *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]), err

    return call


def crash() -> None:
    raise RuntimeError("the ceiling came down")


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def refuse() -> None:
    raise ConfigError("decode.speedup", "7 has no preset")


def overdraw() -> None:
    raise TooManyFailed("5 rows have failed")


def test_every_verb_is_here() -> None:
    assert WORK.keys() == set(verbs())


@VERBS
def test_a_wrong_key_is_named(run: Run, verb: str) -> None:
    code, document, err = run(verb, crash, "no.such=1")
    assert (code, document["exit_code"]) == (2, 2)
    assert document["error"].startswith("no: unknown key; ")
    assert "exit code 2: bad configuration or input, nothing was started" in err
    assert "Traceback" not in err


@VERBS
def test_a_refusal_from_within_is_bad_configuration(run: Run, verb: str) -> None:
    code, document, err = run(verb, refuse)
    assert (code, document) == (2, {"error": "decode.speedup: 7 has no preset", "exit_code": 2})
    assert "Traceback" not in err


@VERBS
def test_a_crash_is_a_traceback_and_a_document(run: Run, verb: str) -> None:
    code, document, err = run(verb, crash)
    assert (code, document) == (1, {"error": "the ceiling came down", "exit_code": 1})
    assert "Traceback" in err
    assert "in crash" in err


@VERBS
def test_ctrl_c_is_told_in_words(run: Run, verb: str) -> None:
    code, document, err = run(verb, ctrl_c)
    assert (code, document["exit_code"]) == (1, 1)
    assert document["error"].startswith("interrupted")
    assert f"error: {document['error']}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["generate", "demo", "retry"])
def test_a_run_that_too_many_failed_rows_end(run: Run, verb: str) -> None:
    code, document, err = run(verb, overdraw)
    assert (code, document["exit_code"]) == (3, 3)
    assert document["error"].startswith("5 rows have failed; good rows stay")
    assert "Traceback" not in err


@pytest.mark.parametrize("resumes", ["generate", "finetune", "distill"])
def test_ctrl_c_says_how_to_go_on(run: Run, resumes: str) -> None:
    assert "--resume continues" in run(resumes, ctrl_c)[1]["error"]


def ending(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    def work() -> tuple[dict[str, Any], int]:
        raise error

    code = run_verb(work)
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_only_our_exit_codes_count_as_foreseen(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" not in ending(RunStopped("no space left"), capsys)[2]
    foreign = RuntimeError("of a library")
    foreign.exit_code = 70  # type: ignore[attr-defined]
    code, document, err = ending(foreign, capsys)
    assert (code, document["exit_code"]) == (1, 1)
    assert "Traceback" in err
    assert ending(AssertionError(), capsys)[1]["error"] == "AssertionError"


def test_a_long_error_is_whole_on_stderr_and_short_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    text = "begin " + "x" * 5000 + " the cause"
    _, document, err = ending(RuntimeError(text), capsys)
    assert text in err
    assert len(document["error"]) < MAX_ERROR_CHARS + 10
    assert document["error"].startswith("begin ")
    assert document["error"].endswith(" the cause")


def process(code: str, **streams: Any) -> "subprocess.Popen[str]":
    """`jobs.generate` as a program, where the statement `code` stands for the module with the run."""
    program = (
        "import time, sys, types, jobs.cli, jobs.generate\n"
        f"def run(*_):\n    print('ready', flush=True)\n    {code}\n"
        "sys.modules['pipeline.generate.run'] = types.SimpleNamespace(run=run)\n"
        "jobs.cli.start(jobs.generate.main, sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes | streams)


def test_a_process_that_crashes() -> None:
    crashed = process("raise RuntimeError('the ceiling came down')")
    out, err = crashed.communicate(timeout=60)
    assert crashed.returncode == 1
    assert [json.loads(line) for line in out.splitlines()] == [{"error": "the ceiling came down", "exit_code": 1}]
    assert err.startswith("ready\n"), "what anybody prints goes to stderr"
    assert "Traceback" in err


def test_a_process_that_hears_ctrl_c() -> None:
    interrupted = process("time.sleep(60)")
    assert interrupted.stderr is not None
    assert interrupted.stderr.readline() == "ready\n"
    interrupted.send_signal(signal.SIGINT)
    out, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 1
    assert json.loads(out)["error"] == "interrupted; what was written is kept, and --resume continues the run"
    assert "Traceback" not in err


TALKS = (
    "import logging; sys.stderr.write('x' * 100_000); logging.warning('of a library'); file = open('{file}', 'w'); "
    "print('more', file=sys.stderr); file.write('whole'); file.close(); raise RuntimeError('the end')"
)
"""A run that logs, writes a file meanwhile, and fails at its end, so that its document is known."""


def test_a_run_goes_on_without_a_reader_of_its_log(tmp_path: Path) -> None:
    """`skipdecode generate ... 2>&1 | head -1`, where the document still has a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    running = process(TALKS.replace("{file}", str(tmp_path / "data")), stderr=writer)
    os.close(writer)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert json.loads(out) == {"error": "the end", "exit_code": 1}
    assert (tmp_path / "data").read_text() == "whole"


@pytest.mark.parametrize("closed", ["2", "1", "0 1 2"])
def test_a_run_goes_on_with_closed_streams(tmp_path: Path, closed: str) -> None:
    """`skipdecode generate ... 2>&-`: no file of the run may take the place of a closed stream."""
    code = TALKS.replace("{file}", str(tmp_path / "data"))
    running = process(code, preexec_fn=lambda: [os.close(int(stream)) for stream in closed.split()])
    out, err = running.communicate(timeout=60)
    assert running.returncode == 1
    document = {"error": "the end", "exit_code": 1}
    if closed == "2":
        assert (json.loads(out), err) == (document, "")
    elif closed == "1":
        assert out == ""
        assert json.loads(err.splitlines()[-1]) == document, "written where it can be"
    assert (tmp_path / "data").read_text() == "whole"


def test_a_document_without_a_reader_goes_to_the_log() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    running = process("raise RuntimeError('the end')", stdout=writer)
    os.close(writer)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert json.loads(err.splitlines()[-1]) == {"error": "the end", "exit_code": 1}


def test_a_process_with_a_wrong_key() -> None:
    command = [sys.executable, "-m", "jobs", "generate", "decode.spedup=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "decode.spedup: unknown key; did you mean 'speedup'?"
