"""`python -m jobs`: what there is to run."""

import ast
from pathlib import Path

FIRST = ("doctor", "demo", "generate", "verify", "retry", "report")
"""The order in which one needs them; the others follow by name."""


def verbs() -> list[str]:
    there = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "__main__", "cli"}
    return [*FIRST, *sorted(there - set(FIRST))]


def main() -> int:
    print("python -m jobs.<verb> [--help]:\n")
    for verb in verbs():
        text = (Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        print(f"  {verb:10} {first.partition(': ')[2]}")
    print("\nBegin with: python -m jobs.demo   (or: python -m jobs.doctor -i your-prompts/)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
