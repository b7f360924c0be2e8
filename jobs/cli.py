"""What every verb shares: notes to stderr, failures with their exit code, one JSON document on stdout."""

import json
import sys
from collections.abc import Callable
from typing import Any

OK, ERROR, BAD_CONFIG, TOO_MANY_FAILED = 0, 1, 2, 3


def start(main: Callable[[], int]) -> None:
    """Runs a verb as a program. stdout is for the document alone: what libraries print (Ray does) goes to stderr."""
    sys.stdout = sys.stderr
    sys.exit(main())


def note(text: str) -> None:
    """One line for a human, on stderr."""
    print(text, file=sys.stderr, flush=True)


def fail(error: BaseException | str, code: int) -> int:
    """Says what went wrong, in words, and gives back the exit code."""
    note(f"error: {error}")
    meaning = {1: "failed", 2: "bad configuration or input, nothing was started", 3: "too many failed rows"}
    note(f"exit code {code}: {meaning[code]}")
    return code


def result(document: dict[str, Any]) -> None:
    """The last line on stdout: one JSON document."""
    is_redirected = sys.stdout is sys.stderr
    print(json.dumps(document), file=sys.__stdout__ if is_redirected else sys.stdout, flush=True)
