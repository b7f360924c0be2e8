"""What the verbs share: help on stdout, a document on every ending, the name of the run folder, the console script.

That failures end in a document too is in `test_endings` and `test_bad_input`.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from jobs import __main__ as console
from jobs.__main__ import verbs
from jobs.cli import log, make_folder_parser, make_parser, read_settings, run_folder, run_verb
from jobs.generate import (
    KEY_FIGURES,
    MAX_CHARS,
    document_and_exit_code,
    kernels_in_words,
    key_figures,
    low_agreement,
    unfinished_reasoning,
)
from pipeline.config.job import ConfigError
from pipeline.generate.run import RunResult
from pipeline.generate.stopping import allowed_failures
from pipeline.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def program(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", verbs())
def test_help_is_on_stdout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        console.main([name, "--help"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.startswith(f"usage: python -m jobs.{name} ")
    assert "--config" in out
    assert ("3 more rows failed" in out) == (name in {"generate", "retry", "demo"})


def test_help_of_a_process() -> None:
    done = program("-m", "jobs.verify", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m jobs.verify ")


def test_a_wrong_command_line_ends_in_a_document_too() -> None:
    done = program("-m", "jobs.verify", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 2


@pytest.fixture
def script(tmp_path: Path) -> str:
    """What pip makes of `[project.scripts]`, for this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["skipdecode"].partition(":")
    assert callable(getattr(import_module(module), name))
    path = tmp_path / "skipdecode"
    path.write_text(f"import sys\nsys.path[0] = {str(ROOT)!r}\nfrom {module} import {name}\nsys.exit({name}())\n")
    return str(path)


def test_the_console_script_is_the_verbs(script: str) -> None:
    ours, module = (program(*words, "verify", "no", "folder") for words in ([script], ["-m", "jobs"]))
    assert (ours.returncode, ours.stdout, ours.stderr) == (2, module.stdout, module.stderr)
    assert json.loads(ours.stdout) == {"error": "one run folder at a time, got no, folder", "exit_code": 2}
    assert program(script, "verify", "--help").stdout.startswith("usage: skipdecode verify ")


def test_the_console_script_lists_the_verbs_without_torch_or_ray(script: str) -> None:
    done = program("-X", "importtime", script)
    assert done.returncode == 0
    assert done.stdout == program("-m", "jobs", "--help").stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "jobs.cli" in loaded
    assert not loaded & {"torch", "ray", "pydantic", "numpy"}


def test_the_list_of_verbs_names_every_one_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(verbs()) == {path.stem for path in (ROOT / "jobs").glob("*.py")} - {"__init__", "__main__", "cli"}
    assert console.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in verbs():
        (line,) = [line for line in lines if line.startswith(f"  {verb} ")]
        assert len(line.split(maxsplit=1)[1]) > 20


@pytest.mark.parametrize(
    ("verb", "hint"), [("generte", "did you mean 'generate'?"), ("x", "verbs: demo, doctor, "), ("cli", "verbs: ")]
)
def test_an_unknown_verb(verb: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main([verb, "--help"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["exit_code"] == 2
    assert document["error"].startswith(f"unknown verb {verb!r}; {hint}")
    assert document["error"] in err


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["--version"]) == 0
    assert capsys.readouterr().out == "skipdecode-ray 1.0.0\n"


def test_the_version_is_written_down_in_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "skipdecode.__version__"}


def named(*words: str) -> tuple[str, list[str]]:
    path, _, overrides = run_folder(make_folder_parser("verify", None).parse_intermixed_args(words))
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
    for words, message in (([], "name the run folder"), (["a", "b"], "got a, b"), (["sampling.seed=1"], "name the")):
        with pytest.raises(ConfigError, match=message):
            named(*words)
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        named("outputs/x", "sampling.sed=1")


def test_flags_win_over_overrides_and_these_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("output: {path: one}\ninput: {path: a, limit: 3}\n")
    arguments = make_parser("generate", None).parse_args(["--config", str(config), "output.path=two", "input.path=b"])
    tree = read_settings(arguments, {"output.path": "three", "input.path": None})
    assert tree == {"output": {"path": "three"}, "input": {"path": "b", "limit": 3}}


def test_credentials_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log("s3://key:se%2Fcret@bucket/run: exists already; s3://bucket/a@b and me@example.com stay")
    assert capsys.readouterr().err == "s3://***@bucket/run: exists already; s3://bucket/a@b and me@example.com stay\n"


def test_a_file_name_cannot_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(lambda: {}["a\x1b]0;title\x07.jsonl"]) == 1  # type: ignore[return-value, dict-item]
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err
    assert "\\x1b]0;title" in shown.err
    assert "\x1b" not in shown.out


REPORT = {
    "duration_s": 49.891550064086914, "completed": 120, "failed": 0, "output_throughput": 68.50859505486392,
    "speedup": {
        "measured": 2.4386046950910782, "ci95": [0.21993505933874222, 27.038858092020003],
        "measured_decode": 2.7162181780350094, "layers": 2.6419225634178907, "predicted": 1.6902995604094937,
    },
    "agreement": {"exact_rows": 0.5957446808510638, "token_match": 0.773851590106007, "rows": 94},
    "books": {"input": 120, "ok": 120, "failed": 0, "closed": True},
    "layers_by_step": {"planned": [10] * 64},
}  # fmt: skip


def figures(folder: Path, report: dict[str, object], **more: object) -> dict[str, object]:
    return key_figures(RunResult(report, RunFolder.open(str(folder)), failures_allowed=0), more)


def test_key_figures_have_the_names_of_the_report(tmp_path: Path) -> None:
    document = figures(tmp_path, REPORT, was_finished=False, exit_code=3)
    assert list(document) == ["output", "was_finished", "exit_code", *KEY_FIGURES, "report"]
    assert document["report"] == f"{tmp_path}/report.json"
    assert document["speedup"] == {k: v for k, v in REPORT["speedup"].items() if k != "measured_decode"}
    assert all(document[name] == REPORT[name] for name in ("books", "completed", "duration_s", "output_throughput"))


@pytest.mark.parametrize(("length", "kept"), [(10, "report"), (400, "speedup"), (600, "output"), (2000, "books")])
def test_key_figures_are_short_however_long_the_path(length: int, kept: str) -> None:
    path = Path("/nowhere/" + "long-name/" * (length // 10))
    document = figures(path, REPORT, was_finished=True)
    assert len(json.dumps(document)) <= MAX_CHARS
    assert document["was_finished"] is True
    assert kept in document


def test_a_run_without_a_report_has_its_books() -> None:
    report = {name: REPORT[name] for name in ("completed", "failed", "books")}
    assert list(figures(Path("/nowhere"), report)) == ["output", "completed", "failed", "books"]


def test_answers_that_are_reasoning_alone_are_remarked_on_with_the_remedy() -> None:
    assert unfinished_reasoning(0.5) == ""
    remark = unfinished_reasoning(0.9)
    assert "90 % of the answers" in remark
    assert "input.chat_template_kwargs={enable_thinking: false}" in remark
    assert "sampling.max_new_tokens" in remark


@pytest.mark.parametrize(("agreement", "is_said"), [(None, False), (0.734, False), (0.5, False), (0.14, True)])
def test_low_agreement_is_said_with_what_to_do(agreement: float | None, is_said: bool) -> None:
    remark = low_agreement({"agreement": {"token_match": agreement}})
    assert bool(remark) == is_said
    assert not is_said or ("only 14.0 %" in remark and "decode.method=full" in remark)


def test_the_kernels_of_a_run_are_said_and_slow_ones_as_a_warning() -> None:
    fast = {"backend": {"name": "triton", "reason": "NVIDIA H100, sm_90; 160 graphs in 0.03 GiB"}, "why_slow": None}
    slow = {"backend": {"name": "torch", "reason": "no gcc"}, "why_slow": "the CUDA kernels are not used: no gcc"}
    kernels = "kernels: triton (NVIDIA H100, sm_90; 160 graphs in 0.03 GiB), 2 workers"
    assert kernels_in_words({"actors": [fast, fast]}) == [kernels]
    assert kernels_in_words({"actors": [fast, slow, fast]}) == [
        f"{kernels}; torch (no gcc), 1 worker",
        "warning: decoding was slower than it could be: the CUDA kernels are not used: no gcc, 1 worker",
    ]
    assert kernels_in_words({"actors": [{"backend": None}]}) == []


def test_too_many_failed_rows_are_said_in_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"completed": 2, "failed": 1, "books": {"input": 3, "ok": 2, "failed": 1, "closed": True}}
    allowed = allowed_failures(0.01, 3)
    document, code = document_and_exit_code(
        RunResult(report, RunFolder.open(str(tmp_path)), failures_allowed=allowed), {}
    )
    assert (code, document["exit_code"]) == (3, 3)
    assert (
        "1 of 3 rows failed, and limits.max_failed_rows allows 0 (limits.max_failed_rows=1" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("limit", "rows", "allowed"), [(0.29, 100, 29), (0.01, 3, 0), (1.0, 7, 7), (5, 3, 5), (0, 9, 0)]
)
def test_a_share_allows_whole_rows(limit: float, rows: int, allowed: int) -> None:
    assert allowed_failures(limit, rows) == allowed


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """As in `skipdecode | head -3`: here nothing is read at all."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "jobs"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert "BrokenPipeError" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
