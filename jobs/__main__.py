"""`skipdecode`, `python -m jobs`: what there is to run, and the door to each verb.

`skipdecode generate ...` is `python -m jobs.generate ...`.
"""

import ast
import difflib
import importlib
import sys
from importlib.metadata import version
from pathlib import Path

from jobs.cli import BAD_CONFIG, fail, start

FIRST = ("doctor", "demo", "generate", "verify", "retry", "report", "export")
"""The order in which one needs them; the others follow by name."""


def verbs() -> list[str]:
    there = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "__main__", "cli"}
    return [*FIRST, *sorted(there - set(FIRST))]


def main(argv: list[str] | None = None) -> int:
    """Runs the verb that the command line names, and ends the process; without one, lists them."""
    verb, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help"):
        show_verbs()
        return 0
    if verb == "--version":
        print(f"skipdecode-ray {version('skipdecode-ray')}")
        return 0
    if verb not in verbs():
        close = difflib.get_close_matches(verb, verbs(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"verbs: {', '.join(verbs())}"
        return fail(f"unknown verb {verb!r}; {hint}", BAD_CONFIG)
    start(importlib.import_module(f"jobs.{verb}").main, words)


def show_verbs() -> None:
    print("skipdecode VERB [--help], or python -m jobs.VERB [--help]:\n")
    for verb in verbs():
        text = (Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        print(f"  {verb:10} {first.partition(': ')[2]}")
    print("\nBegin with: skipdecode demo   (or: skipdecode doctor -i your-prompts/)")


if __name__ == "__main__":
    raise SystemExit(main())
