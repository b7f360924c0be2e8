"""Python examples of the pages, run as they stand: what a block prints is what the page shows behind it."""

import contextlib
import io

import pytest

from tests.docs.pages import FENCE, ROOT


def run_blocks(page: str) -> int:
    """Runs the Python blocks of a page in one namespace; gives how many there are."""
    blocks = FENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "example"}
    for number, (language, text) in enumerate(blocks):
        if language != "python":
            continue
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(text, f"docs/{page}", "exec"), names)
        kind, wanted = blocks[number + 1]
        assert kind == "", f"{page}: an example needs to show what it prints"
        assert shown.getvalue() == wanted, shown.getvalue()
    return sum(language == "python" for language, _ in blocks)


def test_the_page_on_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_blocks("python.md") >= 3
