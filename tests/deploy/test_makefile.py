"""The Makefile: what each target installs and runs, seen by programs that stand in for pip, Python and the rest."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("pip", "python", "skipdecode", "ruff", "mypy", "mkdocs")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile beside a `.venv` whose programs write down how they were called."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/called"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, *targets: str) -> list[str]:
    """What `make` called, and how; installations by what they install."""
    called = checkout / "called"
    called.write_text("")
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    subprocess.run(["make", "--silent", *targets], cwd=checkout, env=env, check=True, timeout=30)
    return [
        re.sub(r"^pip install .* (\S+)$", r"install \1", line)
        for line in map(str.rstrip, called.read_text().splitlines())
    ]


def test_the_demo_installs_what_a_user_needs_once(checkout: Path) -> None:
    assert make(checkout, "demo") == ["install .", "skipdecode demo"]
    assert make(checkout, "demo") == ["skipdecode demo"]
    assert make(checkout, "setup") == []


def test_tests_add_to_what_the_demo_has_installed(checkout: Path) -> None:
    checks = ["ruff check .", "ruff format --check .", "mypy"]
    assert make(checkout, "setup") == ["install ."]
    lanes = [
        "-n auto --dist worksteal -m not slow and not ray",
        "-n 1 --dist loadscope -m not slow and ray",
    ]
    first, *others = make(checkout, "test")
    assert first == "install .[test]"
    assert sorted(others) == sorted([*checks, *(f"python -m pytest {lane}" for lane in lanes)])
    assert make(checkout, "check") == checks
    assert make(checkout, "setup-dev") == []
    assert make(checkout, "demo") == ["skipdecode demo"]


def test_the_pages_need_their_own_extra(checkout: Path) -> None:
    assert make(checkout, "docs") == ["install .[docs]", "mkdocs build --strict"]


def test_a_changed_pyproject_is_installed_again(checkout: Path) -> None:
    make(checkout, "demo")
    later = time.time() + 60
    os.utime(checkout / "pyproject.toml", (later, later))
    assert make(checkout, "demo") == ["install .", "skipdecode demo"]


def test_quality_needs_the_baselines(checkout: Path) -> None:
    refused = subprocess.run(["make", "quality"], cwd=checkout, capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0
    assert "run make baselines first" in refused.stdout
    (checkout / "outputs/baselines/full").mkdir(parents=True)
    assert make(checkout, "quality", "E2E=devset.csv")[-1] == (
        "skipdecode evaluate --sweep --config configs/quality.yaml data.path=devset.csv"
    )


def test_help_lists_every_target(checkout: Path) -> None:
    done = subprocess.run(["make"], cwd=checkout, capture_output=True, text=True, check=True, timeout=30)
    listed = re.findall(r"^  make ([a-z-]+) +\S", done.stdout, re.MULTILINE)
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())


def test_ci_runs_the_tests() -> None:
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
