"""The Python examples of a page, run as they stand. Those that start Ray are run in tests/pipeline/processor."""

import pytest

from tests.docs.pages import ROOT, run_blocks


def test_the_page_on_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_blocks("python.md") >= 3


def test_the_example_of_the_readme_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_blocks("../README.md") == 1
