"""What all verbs share: help on stdout, one JSON document as its last line, the run folder.

That failures end in a document too is in `test_bad_input` and `test_ending`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.__main__ import verbs
from jobs.cli import add_run_folder, note, run_folder
from pipeline.config import ConfigError

ROOT = Path(__file__).parents[2]


def verb(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"jobs.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("name", verbs())
def test_help_is_on_stdout(name: str) -> None:
    done = verb(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m jobs.{name} ")


@pytest.mark.process
def test_a_wrong_command_line_ends_in_a_document_too() -> None:
    done = verb("verify", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 2


def named(*words: str) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser()
    add_run_folder(parser)
    path, _, overrides = run_folder(parser, parser.parse_intermixed_args(words))
    return path, overrides


def test_the_run_folder_is_named_or_that_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("output: {path: outputs/one}\n")
    assert named("outputs/x") == ("outputs/x", [])
    assert named("outputs/status=ok", "input.too_long=truncate_left") == (
        "outputs/status=ok", ["input.too_long=truncate_left"],
    )  # fmt: skip
    assert named("--config", str(config))[0] == "outputs/one"
    assert named("--config", str(config), "output.path=outputs/two")[0] == "outputs/two"
    assert named("outputs/x", "--config", str(config))[0] == "outputs/x"
    for words in ([], ["a", "b"], ["sampling.seed=1"]):
        with pytest.raises(SystemExit):
            named(*words)
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        named("outputs/x", "sampling.sed=1")


def test_credentials_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    note("s3://key:se%2Fcret@bucket/run: exists already; s3://bucket/a@b and me@example.com stay")
    assert capsys.readouterr().err == "s3://***@bucket/run: exists already; s3://bucket/a@b and me@example.com stay\n"
