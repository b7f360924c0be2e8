"""The verb as the files of this folder call it."""

import pytest

from jobs import evaluate
from tests.support.verbs import Call, Job


@pytest.fixture
def job(call: Call) -> Job:
    """`job(*arguments)` runs `jobs.evaluate`: exit code, the JSON document, stderr."""
    return lambda *arguments: call(evaluate, *arguments, "threads=1")  # as all tests: the machine is shared
