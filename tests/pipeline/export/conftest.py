"""A run that the files of this folder export."""

from pathlib import Path

import pytest

from tests.support.exported_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"
