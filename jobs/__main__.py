"""The `skipdecode` command: lists the verbs and runs one; `skipdecode generate` is `python -m jobs.generate`."""

import ast
import difflib
import importlib
import sys
from pathlib import Path

from jobs.cli import BAD_CONFIG, fail, start, tolerate_closed_pipe
from skipdecode import __version__

FIRST = ("demo", "doctor", "generate", "verify", "retry", "report", "export")
"""In the order in which a user needs them; the others follow by name."""


def verbs() -> list[str]:
    found = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "__main__", "cli"}
    return [*FIRST, *sorted(found - set(FIRST))]


def main(argv: list[str] | None = None) -> int:
    """Runs the verb on the command line, which ends the process; without one, lists the verbs."""
    verb, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help"):
        with tolerate_closed_pipe():
            show_verbs()
        return 0
    if verb == "--version":
        print(f"skipdecode-ray {__version__}")
        return 0
    if verb not in verbs():
        close = difflib.get_close_matches(verb, verbs(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"verbs: {', '.join(verbs())}"
        return fail(f"unknown verb {verb!r}; {hint}", BAD_CONFIG)
    start(importlib.import_module(f"jobs.{verb}").main, words)


def show_verbs() -> None:
    """Prints each verb with the first line of its module docstring, which is not imported: that would take seconds."""
    print("Generate text for a corpus on Ray, skipping the layers that a token does not need.\n")
    print("usage: skipdecode VERB [options] [key=value ...]\n")
    for verb in verbs():
        text = (Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8")
        print(f"  {verb:10} {(ast.get_docstring(ast.parse(text)) or '').partition(chr(10))[0]}")
    print("\nskipdecode VERB --help explains a verb; python -m jobs.VERB is the same command.")
    print("New here? Start with: skipdecode demo. Documentation: README.md and docs/.")


if __name__ == "__main__":
    raise SystemExit(main())
