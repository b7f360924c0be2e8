"""README and docs read as they should: short, linked, about files that exist, and in the words of the field."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.docs.pages import (
    CODE,
    DOCS,
    FENCE,
    GENERATED,
    LINK,
    PAGES,
    README,
    ROOT,
    anchors,
    name,
    num_words,
    paragraphs,
    sentences,
)

MAX_WORDS = 25
WRITTEN = [path for path in PAGES if path != GENERATED]  # the other one is as good as the docstrings of its keys
DIALECT = ("strangers", "strays", "what came of it", "company", "feeds", "settle", "settled", "goes on with", "papers")
FOLDERS = ("configs/", "deploy/", "models/", "benchmarks/", "docs/", "tests/", "skipdecode/", "jobs/")


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []
    assert len(text.split()) <= 1500


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_sentences_are_short(path: Path) -> None:
    found = list(sentences(path.read_text(encoding="utf-8")))
    assert found
    assert [sentence for sentence in found if num_words(sentence) > MAX_WORDS] == []
    assert median(map(num_words, found)) <= 15


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_words_are_those_of_the_field(path: Path) -> None:
    prose = " ".join(paragraphs(path.read_text(encoding="utf-8"))).lower()
    assert [word for word in DIALECT if re.search(rf"\b{word}\b", prose)] == []


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


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert pictures
    assert {name(path): path.stat().st_size for path in pictures if path.stat().st_size > 300_000} == {}


def test_every_page_opens_with_a_command_or_a_picture() -> None:
    for path in DOCS:
        body = path.read_text(encoding="utf-8").partition("\n# ")[2] or path.read_text(encoding="utf-8")
        after_title = body.partition("\n")[2].strip()
        assert after_title.startswith("```"), name(path)


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
