"""The process that renders templates, as its parent has it: started, asked, and replaced by another when it ends.

What it does itself stands in `jinja_child`. The kernel bounds its CPU time per row and its memory, and a row that ends
it is an error here; the next row starts another. One process serves all threads, in turns, and a fork has its own.
Nothing is left behind, whichever thread asks. A process costs 0.1 s and some 15 MB once, a row some microseconds of
pipe. No values: rows are pickled already.
"""

import atexit
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from actors.templates.jinja_errors import (
    RendererEnded,
    TemplateError,
    TemplateRaised,
    TemplateSyntaxError,
    TemplateTooCostly,
    UndefinedVariable,
)

FRAME, ANSWER = struct.Struct("<II"), struct.Struct("<BId")  # as in `jinja_child`
STALL_S = 60.0  # without an answer: the machine is at fault; its own CPU time is bounded far below
MAX_ENDS = 3  # of the process while it has the same row
OUTSIDE = (None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""How a process ends that others have ended, as the kernel where memory is short; None: it stalled."""
ENDING_S = 0.35  # of a row that ends its process, and of the next process
ERRORS: tuple[type[TemplateError], ...] = (
    TemplateError,  # not used: the number of a rendered text
    TemplateError,
    TemplateSyntaxError,
    UndefinedVariable,
    TemplateRaised,
    TemplateTooCostly,
    TemplateTooCostly,
)


@dataclass
class Debt:
    """The CPU time that rows have lost lately, as in `jinja_child`."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """What is asked for of a template."""

    source: str
    strict: bool
    now: datetime | None
    """None: the names that it reads are asked for."""
    binds_row: bool = False


class _Ended(Exception):
    """The process has ended; `code` as in `subprocess`, None where it stalled."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class _Child:
    """One `jinja_child`; a frame in, its answers out."""

    def __init__(self) -> None:
        found = [find_spec(name) for name in ("jinja2", "markupsafe")]  # Jinja, and what it imports itself
        places = [*(spec.origin for spec in found if spec and spec.origin), __file__]  # and what of `actors` it imports
        folders = dict.fromkeys(str(Path(place).absolute().parents[1]) for place in places)
        code = "import runpy, sys; sys.path[:0] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
        script = str(Path(__file__).with_name("jinja_child.py"))
        # what a template that breaks out could read of the environment is little, API keys least of all
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ") if name in os.environ}
        options = [*([] if "PYTHONHOME" in kept else ["-I"]), "-S", "-X", "utf8"]
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", code, script, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=kept,
            cwd="/",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for end in (self._in, self._out):
            os.set_blocking(end, False)
        self._unread = bytearray()

    def send(self, frame: bytes) -> None:
        """_Ended when nobody reads it."""
        rest = memoryview(frame)
        while rest:
            self._wait(self._in, select.POLLOUT)
            try:
                rest = rest[os.write(self._in, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._ended() from error

    def answer(self) -> tuple[str | TemplateError, float]:
        """And the debt of its template; _Ended when the row has ended the process."""
        kind, length, debt_s = ANSWER.unpack(self._take(ANSWER.size))
        text = self._take(length).decode()
        return (text if kind == 0 else ERRORS[kind](text)), debt_s

    def _take(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._wait(self._out, select.POLLIN)
            with suppress(BlockingIOError):
                part = os.read(self._out, 2**20)
                if not part:
                    raise self._ended()
                self._unread += part
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    def _wait(self, end: int, event: int) -> None:
        poll = select.poll()
        poll.register(end, event)
        if not poll.poll(STALL_S * 1000):
            self.close()
            raise _Ended(None)

    def _ended(self) -> _Ended:
        """Its pipes are closed, so its end is near."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STALL_S)
        self.close()
        return _Ended(self._process.returncode)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.leave()

    def leave(self) -> None:
        """Closes this side alone; the process ends by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_lock = threading.Lock()
_child: _Child | None = None


def ask(job: Job, rows: Sequence[bytes], debt: Debt | None = None) -> list[str | TemplateError]:
    """A text or error per row, or the names that the template reads. A row that ends the process is an error, and
    another process takes what follows it. `debt` is read and kept; None: there is none."""
    global _child
    made: list[str | TemplateError] = []
    num_answers = 1 if job.now is None else len(rows)
    is_careful, num_ends = num_answers == 1, 0
    with _lock:
        while len(made) < num_answers:
            try:
                _child = _child or _Child()
                _child.send(_frame(job, rows[len(made) :], is_careful, debt))
                while len(made) < num_answers:
                    text, debt_s = _child.answer()
                    made.append(text)
                    num_ends = 0
                    if debt is not None:
                        debt.seconds = debt_s
            except _Ended as end:
                _child = None
                num_ends += 1
                # in haste it is not known which row it was; and what is not the timer may have come from outside
                if is_careful and (end.code == -signal.SIGPROF or num_ends == MAX_ENDS):
                    made.append(_blame(end.code))
                    num_ends = 0
                    if debt is not None and end.code not in OUTSIDE:
                        debt.seconds += ENDING_S
                is_careful = True
            except BaseException:  # an interrupt: the answers that are left are nobody's
                _drop()
                raise
    return made


def _frame(job: Job, rows: Sequence[bytes], is_careful: bool, debt: Debt | None) -> bytes:
    sizes = None if job.now is None else [len(row) for row in rows]
    told = (job.source, job.strict, job.now, job.binds_row, sizes, is_careful, debt and debt.seconds)
    head, body = pickle.dumps(told), b"".join(rows)
    return FRAME.pack(len(head), len(body)) + head + body


def _blame(code: int | None) -> TemplateError:
    if code == -signal.SIGPROF:
        return TemplateTooCostly("needs too much time")
    if code in OUTSIDE:
        how = f"did not answer for {STALL_S:g} s" if code is None else f"was ended by {signal.Signals(-code).name}"
        return RendererEnded(f"the process that renders it {how}, {MAX_ENDS} times; the machine may lack memory")
    return TemplateTooCostly(f"ends the process that renders it (exit code {code})")


def _drop() -> None:
    global _child
    child, _child = _child, None
    if child is not None:
        child.close()


def _forget() -> None:
    """In a fork: the process is the parent's."""
    global _child, _lock
    child, _child, _lock = _child, None, threading.Lock()
    if child is not None:
        child.leave()


atexit.register(_drop)
os.register_at_fork(after_in_child=_forget)
