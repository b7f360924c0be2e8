"""The Dockerfile: what it copies is here, the manifests name what it builds, and its steps make a working program.

No Docker is needed: the slow test takes the steps as plain commands, in a folder that stands for the image and a fresh
environment. Left out are only the steps of SYSTEM, which need a machine of their own.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

import skipdecode

ROOT = Path(__file__).parents[2]
SYSTEM = ("apt-get", "useradd", "chown")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps() -> Iterator[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        instruction, _, arguments = line.partition(" ")
        yield instruction, arguments.strip()


def of(instruction: str) -> list[str]:
    return [arguments for name, arguments in steps() if name == instruction]


def patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_ignored(path: str) -> bool:
    """As far as our patterns go: a path from the top with all below it, or `**/` and a name anywhere."""
    parts = path.split("/")
    anywhere = [pattern.removeprefix("**/") for pattern in patterns() if pattern.startswith("**/")]
    is_below = any(f"{path}/".startswith(f"{pattern}/") for pattern in patterns())
    return is_below or any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in anywhere)


def checkout() -> list[str]:
    """What a build gets: all files of the checkout that git knows or would take, and .dockerignore leaves."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file() and not is_ignored(path)]


def test_the_manifests_name_the_image_that_is_built() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (image,) = set(re.findall(r"docker (?:build -t|push) (\S+)", text))
    assert image.endswith(f"/{PROJECT['name']}:{skipdecode.__version__}")
    for path in (ROOT / "deploy").glob("ray*.yaml"):
        manifest = path.read_text(encoding="utf-8")
        assert set(re.findall(r"^ +image: (\S+)$", manifest, re.MULTILINE)) == {image}
        assert f"docker build -t {image} . && docker push {image}" in manifest
        assert "PYTHONPATH: /app" in manifest
        assert next(yaml.safe_load_all(manifest))["kind"] in ("RayJob", "RayService")


def test_the_image_runs_the_console_script_as_nobody_special() -> None:
    assert json.loads(of("ENTRYPOINT")[0]) == list(PROJECT["scripts"])
    assert json.loads(of("CMD")[0]) == ["--help"]
    names = [name for name, _ in steps()]
    assert of("USER") == ["1000"]
    assert any(re.match(r"useradd .* ray$", step) for step in of("RUN"))
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    (base,) = of("FROM")
    assert base == "python:3.12-slim"
    assert PROJECT["requires-python"] == ">=3.11"


def test_dependencies_are_a_layer_of_their_own() -> None:
    assert of("COPY") == ["pyproject.toml /app/", ". /app/"]
    order = [arguments for name, arguments in steps() if name in ("COPY", "RUN")]
    (dependencies,) = [step for step in order if "requirements.txt" in step]
    assert order.index("pyproject.toml /app/") < order.index(dependencies) < order.index(". /app/")
    (install,) = [step for step in order if "--editable" in step]
    assert "--no-deps" in install
    assert order.index(install) > order.index(". /app/")


def test_a_build_gets_what_it_needs_and_little_else() -> None:
    paths = checkout()
    for needed in ("pyproject.toml", "README.md", "LICENSE", "configs/demo.yaml", "models/opt-e2e/config.json"):
        assert needed in paths
    packages = {path.split("/")[0] for path in paths if path.endswith("__init__.py")}
    assert packages == {"skipdecode", "actors", "pipeline", "jobs"}
    assert not {path.split("/")[0] for path in paths} & {"tests", ".venv", "outputs", "docs"}
    assert is_ignored("pipeline/service/__pycache__/app.pyc")
    assert is_ignored(".git/config")
    assert sum((ROOT / path).stat().st_size for path in paths) < 15e6


@dataclass
class Machine:
    """A folder that stands for the image: its /app, and an environment in place of its Python."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    left_out: list[str] = field(default_factory=list)

    def place(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/app\b", str(self.root / "app"), text)

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        cwd = Path(self.place(self.workdir)) if self.workdir != "/" else self.root
        return subprocess.run(
            ["sh", "-c", self.place(command)], cwd=cwd, env=self.env, capture_output=True, text=True, timeout=1500
        )

    def step(self, instruction: str, arguments: str) -> None:
        if instruction == "ENV":
            self.env |= dict(pair.split("=", 1) for pair in self.place(arguments).split())
        elif instruction == "WORKDIR":
            self.workdir = arguments
            Path(self.place(arguments)).mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            source, target = arguments.split()
            for path in checkout() if source == "." else [source]:
                there = Path(self.place(target)) / path
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, there)
        elif instruction == "RUN" and arguments.startswith(SYSTEM):
            self.left_out.append(arguments)
        elif instruction == "RUN":
            done = self.run(arguments)
            assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        else:
            assert instruction in ("FROM", "ARG", "USER", "EXPOSE", "ENTRYPOINT", "CMD"), f"{instruction}: not tested"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_make_a_program_that_finds_nothing_wrong(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "python"], check=True)
    outer = {key: value for key, value in os.environ.items() if key.startswith("PIP_") or key.lower().endswith("proxy")}
    path = f"{tmp_path / 'python/bin'}:/usr/local/bin:/usr/bin:/bin"
    machine = Machine(tmp_path / "image", outer | {"PATH": path, "HOME": str(tmp_path)})
    machine.root.mkdir()
    if machine.run("pip download --no-deps --dest index packaging").returncode:
        pytest.skip("no package index can be reached")
    for instruction, arguments in steps():
        machine.step(instruction, arguments)
    assert len(machine.left_out) == len(SYSTEM)
    (program,) = json.loads(of("ENTRYPOINT")[0])
    listed = machine.run(f"{program} {json.loads(of('CMD')[0])[0]}")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "generate" in listed.stdout
    found = machine.run(f"{program} doctor")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["problems"] == []
    refused = machine.run(f"{program} generate decode.spedup=3")
    assert refused.returncode == 2, refused.stderr
    assert "did you mean 'speedup'?" in json.loads(refused.stdout)["error"]
