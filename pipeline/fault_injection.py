"""Faults on purpose, for tests of real crashes: signals that a process sends itself at a named point, or errors there.

SKIPDECODE_FAULTS names a JSON file: {"decode r17": {"signal": "SIGSEGV", "times": 3}}. The process that passes that
point sends itself that signal, at most so many times over all processes (default 1); "after": n lets a process pass
n times before. With "error": "its text" in place of the signal it raises a RuntimeError. Each hit leaves a file
`<plan>.<point>.<n>.hit` with the pid, so a test can see that its fault happened.
Without the variable, nothing.
"""

import json
import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TypedDict

VARIABLE = "SKIPDECODE_FAULTS"
_passed: Counter[str] = Counter()


class Fault(TypedDict, total=False):
    """`signal` or `error` must be there; `times` is 1, `after` 0 where they are not."""

    signal: str
    error: str
    times: int
    after: int


@cache
def _plan() -> dict[str, Fault]:
    path = os.environ.get(VARIABLE)
    plan: dict[str, Fault] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return plan


def fault_point(name: str) -> None:
    """Passes, unless the plan has a fault for `name` that has not been used up."""
    fault = _plan().get(name)
    if fault is None:
        return
    _passed[name] += 1
    if _passed[name] > fault.get("after", 0) and _take(name, fault.get("times", 1)):
        if "error" in fault:
            raise RuntimeError(fault["error"])
        os.kill(os.getpid(), signal.Signals[fault["signal"]])


def _take(name: str, times: int) -> bool:
    """Whether this is one of the first `times` hits of the point, over all processes."""
    stem = f"{os.environ[VARIABLE]}.{name.replace('/', '_')}"
    for hit in range(times):
        try:
            with open(f"{stem}.{hit}.hit", "x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        return True
    return False
