"""What `tests.support.markers` does: a test that starts Ray says so, and a grid is thinned out."""

import subprocess
import sys

import pytest

from tests.support.markers import covering, missing_marker, started

GCS = "/usr/lib/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray"
JOB = "/usr/bin/python -m jobs.generate -i in.jsonl"


@pytest.mark.parametrize(
    ("lines", "markers", "wanted"),
    [
        ([], set(), None),
        ([JOB], {"slow"}, None),
        (["/bin/x", GCS], {"slow"}, "mark it `ray`"),
        ([GCS], {"ray", "slow"}, None),
    ],
)
def test_what_is_missing(lines: list[str], markers: set[str], wanted: str | None) -> None:
    message = missing_marker(lines, markers)
    assert message is None if wanted is None else wanted in str(message)


def test_processes_are_seen() -> None:
    assert not started
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert [line for line in started if line.startswith(f"{sys.executable} -c")]


def test_nothing_is_left_of_the_test_before() -> None:
    assert not started


def test_every_value_of_a_grid_occurs() -> None:
    grid = [{"family": f, "schedule": s, "packed": p} for f in range(3) for s in range(5) for p in range(2)]
    chosen = [grid[number] for number in covering(grid)]
    assert len(chosen) == 5
    for name, values in (("family", 3), ("schedule", 5), ("packed", 2)):
        assert {one[name] for one in chosen} == set(range(values))
    assert covering([{}]) == set()
    assert covering([{"only": 0}, {"only": 1}]) == {0, 1}
