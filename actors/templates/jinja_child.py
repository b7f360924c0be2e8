"""The process that renders Jinja templates of strangers: a script, started by `jinja_process`, with little of ours.

It reads frames from standard input and answers on standard output, one answer per row, until its input ends. A row that
takes more than its share of CPU time fails; where it cannot be stopped, in an operator of C, it ends the process (the
default of SIGPROF). One that wants more memory fails, for the process may not have more. It may write no file and start
no process.

frame:  two uint32 (length of the head, length of the body), the head, the body. The head is a pickled
        `(source, is_strict, now, binds_row, sizes, is_careful, debt_s)`; the body is as many pickled mappings, of
        `sizes` bytes each. `sizes` None asks for the names that the template reads, as JSON. Careful: each answer is
        sent at once.
answer: a uint8 (`OK` or what went wrong), a uint32 (length of the text), a double (`debt_s` after this row), the text
        in UTF-8.

`debt_s` is the CPU time that rows of the template have lost lately: each adds what it lost, and takes `GIVEN_S` off. So
a template that is too slow for many rows costs `GIVEN_S` for each in the long run, and what is fast enough is made.
None: every row has all its time.

Left out: Jinja itself, and what a template means (`jinja_renderer`).
"""

import gc
import itertools
import pickle
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, NoReturn

from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

from actors.templates.jinja_renderer import Raised, Renderer

OK, FAILED, SYNTAX, UNDEFINED, RAISED, COSTLY, SLOW = range(7)
ROW_S, QUICK_S, COMPILE_S = 0.25, 0.005, 0.5  # of CPU time
GIVEN_S, QUICK_DEBT_S, STOP_DEBT_S = 0.006, 4.0, 8.0  # from that debt on a row has QUICK_S; or is not tried
FLUSH_S = 1.0
SPARE_BYTES = 64 * 2**20  # beyond what the process has when it begins, and what it is given
MAX_TEXT_BYTES = 8 * 2**20  # of a rendered text, or four times what it is made of
MAX_MESSAGE_CHARS = 300
TOO_MUCH_MEMORY = b"needs too much memory"
FRAME, ANSWER = struct.Struct("<II"), struct.Struct("<BId")


class TooSlow(BaseException):
    """What a template cannot catch, nor a filter."""


def answer(make: Callable[[], str], limit: int) -> tuple[int, bytes]:
    """What `make` gives, or what went wrong, and the text of it."""
    try:
        text = make().encode()
        return (OK, text) if len(text) <= limit else (COSTLY, f"makes a text of {len(text)} bytes".encode())
    except MemoryError:
        return COSTLY, TOO_MUCH_MEMORY
    except RecursionError:
        return COSTLY, b"calls itself too deeply"
    except Exception as error:
        kind, reason = _reason(error)
        return kind, reason[:MAX_MESSAGE_CHARS].encode(errors="replace")


def _reason(error: Exception) -> tuple[int, str]:
    if isinstance(error, TemplateSyntaxError):
        return SYNTAX, f"line {error.lineno}: {error.message}"
    if isinstance(error, Raised):
        return RAISED, str(error.message)
    if isinstance(error, UnicodeEncodeError):
        return FAILED, "makes a text that is no valid Unicode"
    kind = UNDEFINED if isinstance(error, UndefinedError) else FAILED
    return kind, str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _confine() -> int:
    """Takes from this process what rendering does not need; gives the bytes of addresses that it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the end of the input ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGVTALRM})
    for kind, most in (("CORE", 0), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", 16)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _stop(*_: object) -> NoReturn:
    raise TooSlow


def _allow(stop_s: float, end_s: float) -> None:
    """CPU time until what runs is stopped, and until the process ends; 0: any."""
    signal.setitimer(signal.ITIMER_VIRTUAL, stop_s)
    signal.setitimer(signal.ITIMER_PROF, end_s)


def _timed(make: Callable[[], str], limit: int, seconds: float) -> tuple[int, bytes]:
    """As `answer`, in that CPU time."""
    try:
        _allow(seconds, 1.2 * seconds + 0.02)
        made = answer(make, limit)
        _allow(0, 0)
        return made
    except TooSlow:
        _allow(0, 0)
        why = "" if seconds == ROW_S else ", and has little: rows before it took too much"
        return SLOW, f"needs too much time{why}".encode()


def _apart(make: Callable[[], str], limit: int, seconds: float) -> tuple[int, bytes]:
    """As `_timed`, whatever rows before it have left behind: a row that fails holds its values in cycles."""
    kind, text = _timed(make, limit, seconds)
    if text == TOO_MUCH_MEMORY and gc.collect():
        kind, text = _timed(make, limit, seconds)
    if kind in (COSTLY, SLOW):
        gc.collect()
    return kind, text


class Server:
    """Answers frames."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers, self._renderer = answers, Renderer()
        self._flushed_at = time.monotonic()

    def tell_names(self, source: str, is_strict: bool) -> None:
        _allow(0, COMPILE_S)
        kind, text = answer(partial(self._renderer.names, source, is_strict), MAX_TEXT_BYTES)
        _allow(0, 0)
        self._send(kind, text, 0, is_urgent=True)

    def render(
        self, head: tuple[str, bool, datetime, bool], rows: Sequence[memoryview], careful: bool, debt_s: Any
    ) -> None:
        source, is_strict, _, _ = head
        _allow(0, COMPILE_S)
        with suppress(Exception):  # each row says it
            self._renderer.template(source, is_strict)
        _allow(0, 0)
        for row in rows:
            seconds = ROW_S
            if debt_s is not None:
                debt_s = max(debt_s - GIVEN_S, 0)
                seconds = ROW_S if debt_s < QUICK_DEBT_S else QUICK_S if debt_s < STOP_DEBT_S else 0
            kind, text = SLOW, b"is not tried: rows before it took too much time"
            if seconds:
                make = partial(self._renderer.render, *head, row)
                kind, text = _apart(make, max(MAX_TEXT_BYTES, 4 * len(row)), seconds)
            if debt_s is not None and kind == SLOW:
                debt_s += seconds
            # so that whoever waits knows which row ended this process, and that it is alive
            is_urgent = careful or kind == SLOW or time.monotonic() - self._flushed_at > FLUSH_S
            self._send(kind, text, debt_s or 0, is_urgent)
        self._answers.flush()

    def _send(self, kind: int, text: bytes, debt_s: float, is_urgent: bool) -> None:
        self._answers.write(ANSWER.pack(kind, len(text), debt_s) + text)
        if is_urgent:
            self._answers.flush()
            self._flushed_at = time.monotonic()


def serve(frames: BinaryIO, answers: BinaryIO) -> None:
    own_bytes, server = _confine(), Server(answers)
    gc.freeze()  # so that collections look at rows alone
    while len(lengths := frames.read(FRAME.size)) == FRAME.size:
        num_head, num_body = FRAME.unpack(lengths)
        most = own_bytes + SPARE_BYTES + 8 * (num_head + num_body)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        head, body = frames.read(num_head), memoryview(frames.read(num_body))
        *job, sizes, is_careful, debt_s = pickle.loads(head)
        if sizes is None:
            server.tell_names(*job[:2])
            continue
        ends = list(itertools.accumulate(sizes, initial=0))
        server.render(tuple(job), [body[a:b] for a, b in itertools.pairwise(ends)], is_careful, debt_s)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
