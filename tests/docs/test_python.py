"""The Python examples of a page, run as they stand. Those that start Ray are run in tests/pipeline/processor."""

import pytest

from tests.docs.pages import FENCE, README, ROOT, run_blocks


def test_the_page_on_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_blocks("python.md") >= 3


def test_the_example_of_the_readme_prints_a_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = (block for language, block in FENCE.findall(README.read_text()) if language == "python")
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    assert "Mill" in capsys.readouterr().out
