"""What markers do: a test that starts Ray says so (`ray`), and `grid` thins a grid of parameters out.

`make test-fast` leaves out `ray`, so a test that starts Ray and does not say so fails. Imported by `conftest.py`, where
pytest finds the hooks. Not seen: the Ray of a process that the test starts, and a test that uses the Ray of another,
which stays up.

A test marked `grid` runs for a few of its combinations of parameters in `make test`, chosen so that each value of each
parameter occurs; the others become `slow`.
"""

import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import pytest

RAY = ("gcs_server", "raylet")
started: list[str] = []
"""Command lines since the test began."""


def _heard(event: str, arguments: Sequence[Any]) -> None:
    if event == "subprocess.Popen":
        line = arguments[1]
        started.append(line if isinstance(line, str) else " ".join(str(word) for word in line))


sys.addaudithook(_heard)


def missing_marker(lines: Iterable[str], markers: set[str]) -> str | None:
    """What to say of a test with these markers that started these command lines; None: all is well."""
    rays = [line for line in lines if any(name in line for name in RAY)]
    if rays and "ray" not in markers:
        return f"it starts Ray, so mark it `ray` (pyproject.toml): {rays[0][:200]}"
    return None


def _markers(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    started.clear()
    outcome = yield
    if message := missing_marker(started, _markers(item)):
        pytest.fail(message, pytrace=False)
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    outcome = yield
    if message := missing_marker(started, _markers(item)):
        pytest.fail(message, pytrace=False)
    return outcome


def covering(combinations: Sequence[dict[str, int]]) -> set[int]:
    """Numbers of combinations in which every value of every parameter occurs: always the one with the most new ones."""
    missing = {value for combination in combinations for value in combination.items()}
    chosen = set()
    while missing:
        new = [len(missing & combination.items()) for combination in combinations]
        best = new.index(max(new))
        chosen.add(best)
        missing -= combinations[best].items()
    return chosen


def _thin_out(items: list[pytest.Item]) -> None:
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and {"grid"} <= _markers(item) and "slow" not in _markers(item):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        chosen = covering([{name: id(value) for name, value in item.callspec.params.items()} for item in grid])
        for number, item in enumerate(grid):
            if number not in chosen:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # pytest's own hook then leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thins grids out. Within a file, tests with the marker `ray` come last."""
    _thin_out(items)
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], "ray" in _markers(item)))
