"""The check that a test which starts Ray or a process has the marker that says so."""

import multiprocessing
import subprocess
import sys

import pytest

from tests.support.markers import missing_marker, started

GCS = "/usr/lib/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray"
JOB = "/usr/bin/python -m jobs.generate -i in.jsonl"


@pytest.mark.parametrize(
    ("lines", "markers", "wanted"),
    [
        ([], set(), None),
        (["/sbin/ldconfig -p", "git ls-files"], set(), None),
        ([JOB], {"slow"}, "mark it `process`"),
        ([JOB], {"process"}, None),
        ([JOB], {"ray"}, None),
        (["/bin/x", GCS], {"slow"}, "mark it `ray`"),
        ([GCS], {"process"}, "mark it `ray`"),
        ([GCS], {"ray", "slow"}, None),
    ],
)
def test_what_is_missing(lines: list[str], markers: set[str], wanted: str | None) -> None:
    message = missing_marker(lines, markers)
    assert message is None if wanted is None else wanted in str(message)


@pytest.mark.process
def test_processes_are_seen() -> None:
    assert not started
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()
    assert [line for line in started if line.startswith(f"{sys.executable} -c")]
    assert [line for line in started if line.startswith("multiprocessing")]


def test_nothing_is_left_of_the_test_before() -> None:
    assert not started
