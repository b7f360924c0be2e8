"""The rooms of `pipeline/` and the arrows between them: who may import whom, and what may lie outside a room."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIPELINE = ROOT / "pipeline"
COMMON = {
    "checkpoint", "cluster", "config", "config_tree", "console", "demo_corpus", "faults", "handles", "input_config",
    "job_metadata", "json_size", "machine", "openai_logprobs", "openai_params", "plots", "ray_internals", "ray_noise",
    "retype", "schema", "units", "worker_backends",
}  # fmt: skip
"""Modules outside a room; every room may import them, and they import no room."""
ARROWS: dict[str, set[str]] = {
    "input": set(),
    "store": set(),
    "stages": set(),
    "report": {"store"},
    "generate": {"input", "store", "stages", "report", "estimate"},
    "export": {"store"},
    "demo": set(),
    "service": set(),
    "training": {"input", "store"},
    "evaluation": {"input", "store", "report"},
    "bench": {"service"},
    "doctor": {"input", "store", "estimate", "generate"},
    "estimate": {"input", "stages", "store"},
    "processor": {"estimate", "generate", "input", "stages"},
}
"""Room -> the rooms it may import.

Nobody builds on export, demo, training, evaluation, service, bench, doctor, processor."""


def imported(path: Path) -> set[str]:
    """What a file imports of `pipeline`: names of rooms and of common modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "pipeline":
            modules = [f"pipeline.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found |= {module.split(".")[1] for module in modules if module.startswith("pipeline.")}
    return found


def test_every_file_has_its_room() -> None:
    rooms = {path.name for path in PIPELINE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms == set(ARROWS)
    assert {path.stem for path in PIPELINE.glob("*.py")} == COMMON | {"__init__"}


@pytest.mark.parametrize("path", sorted(PIPELINE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_arrow_points_back_up(path: Path) -> None:
    room = path.relative_to(PIPELINE).parts[0]
    allowed = COMMON | {room} | ARROWS[room] if room in ARROWS else COMMON
    assert imported(path) <= allowed, f"{room} must not import {sorted(imported(path) - allowed)}"


def test_the_page_on_architecture_has_these_arrows() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(\w+) +-> (\(none\)|[\w, ]+)$", page, re.MULTILINE)
    listed = {room: set() if used == "(none)" else set(used.split(", ")) for room, used in lines}
    assert len(lines) == len(listed), "a room is listed twice"
    assert listed == ARROWS


def test_the_arrows_have_no_circle() -> None:
    done: set[str] = set()
    while ready := {room for room, used in ARROWS.items() if room not in done and used <= done}:
        done |= ready
    assert done == set(ARROWS)
