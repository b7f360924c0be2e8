"""Links and anchors of README and docs lead somewhere, files that they name exist, and mkdocs builds the pages."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import (
    CODE,
    DOCS,
    FENCE,
    LINK,
    PAGES,
    ROOT,
    anchors,
    name,
)

FOLDERS = (
    "configs/",
    "deploy/",
    "models/",
    "benchmarks/",
    "docs/",
    "tests/",
    "skipdecode/",
    "actors/",
    "pipeline/",
    "jobs/",
)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("\n", path.read_text(encoding="utf-8"))
    for _, target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_file(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spans = CODE.findall(FENCE.sub("\n", text)) + [word for _, block in FENCE.findall(text) for word in block.split()]
    named = {
        span for span in spans if span.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+\.(py|md|yaml|json|png)", span)
    }
    assert {span for span in named if not (ROOT / span).is_file()} == set()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_tests_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8"))
    assert [test for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")] == []


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert pictures
    assert {name(path): path.stat().st_size for path in pictures if path.stat().st_size > 300_000} == {}


def test_mkdocs_builds_the_pages_strictly(tmp_path: Path) -> None:
    here = Path(sys.executable).parent / "mkdocs"
    program = str(here) if here.is_file() else shutil.which("mkdocs")
    if program is None:
        pytest.skip("mkdocs is not installed (the extra `docs`)")
    done = subprocess.run(
        [program, "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "site").rglob("*.html"))) > len(DOCS)
