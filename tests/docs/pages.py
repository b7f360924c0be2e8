"""Links, anchors, code blocks and commands of README and docs.

Markdown is read by a few rules that these pages keep to, not by a parser. Nothing is judged here.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = ROOT / "docs" / "configuration.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PROGRAMS = ("skipdecode", "python", "make", "ray", "serve", "pytest", "curl")  # that an inline command may begin with


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """One command as it is typed, and what the page shows behind it."""

    page: str
    text: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        """Words of a shell without variables set for it, placeholders, and a trailing `&`."""
        words = [word for word in shlex.split(self.text, comments=True) if "..." not in word and word != "&"]
        while words and re.match(r"[A-Z_a-z]+=", words[0]) and not words[0].startswith("key="):
            words.pop(0)
        return words

    @property
    def exit_code(self) -> int:
        """What the page says it ends with."""
        found = re.search(r"^exit code (\d):", self.output, re.MULTILINE)
        return int(found[1]) if found else 0


def commands(path: Path) -> Iterator[Command]:
    """Commands of code blocks, in order, then those in code spans that are whole commands."""
    text = path.read_text(encoding="utf-8")
    for _, block in FENCE.findall(text):
        yield from block_commands(name(path), block)
    for span in CODE.findall(FENCE.sub("\n", text)):
        if span.startswith(tuple(f"{program} " for program in PROGRAMS)):
            yield Command(name(path), span)


def block_commands(page: str, block: str) -> Iterator[Command]:
    """With a prompt `$ ` every other line is output; without one every line is a command, if the first one is."""
    joined = re.sub(r"\\\n\s*", "", block)
    if re.search(r"^\$ ", joined, re.MULTILINE):
        for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
            text, _, output = part.partition("\n")
            yield Command(page, text, output)
    elif re.match(r"([A-Z_a-z]+=\S+ )*(echo|export|\.|skipdecode|python|make|ray|serve|curl)\b", joined):
        for line in joined.splitlines():
            if line.strip():
                yield Command(page, line)


def slug(heading: str) -> str:
    """The anchor that mkdocs gives a heading."""
    plain = LINK.sub(r"\1", heading).replace("`", "").lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())


def anchors(path: Path) -> set[str]:
    text = FENCE.sub("\n", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


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
