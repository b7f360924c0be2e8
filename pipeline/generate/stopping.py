"""How a run ends before its last row: signals, and the reason for everything else, as shown to the user.

Ray Data ends a run with whatever exception reached it first; what the user needs to know is in the attempt tracker.
Nothing is written here.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.data.exceptions import ExecutionTimeoutError

from pipeline.formatting import Log
from pipeline.stages.attempt_tracker import TOO_MANY_FAILED
from pipeline.store.row_writer import DISK_FULL, NoSpaceLeft
from pipeline.store.run_folder import RunFolder

ASK_TIMEOUT_S = 5
MIN_EARLY_LIMIT = 100  # failed rows; with fewer, ending early saves too little to leave rows undone


class RunStopped(RuntimeError):
    """The run was ended for the reason in the message. What was written is kept, and the run can be resumed."""

    exit_code = 1


class DeadlinePassed(RunStopped):
    """The time that `limits.window_s` gives a run is over."""


class TooManyFailed(RunStopped):
    """More rows have failed than `limits.max_failed_rows` allows."""

    exit_code = 3

    def __str__(self) -> str:
        return f"{super().__str__()}; good rows stay, --resume with a larger limit goes on with the run"


def stop_on_sigterm() -> None:
    """Makes SIGTERM (a stopped job, a preempted machine) end the run as Ctrl-C does. Call after Ray has started."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def allowed_failures(limit: int | float, num_rows: int) -> int:
    """Rows that may fail of `num_rows`, by `limits.max_failed_rows`: a number, or a share."""
    return limit if isinstance(limit, int) else math.floor(limit * num_rows + 1e-6)  # 0.29 * 100 is below 29


def early_limit(limit: int | float, num_rows: int) -> int:
    """The number of failed rows beyond which a run ends before its last row."""
    return max(allowed_failures(limit, num_rows), MIN_EARLY_LIMIT)


def check_budget(failed: int, max_failures: float) -> None:
    if failed > max_failures:
        raise TooManyFailed(TOO_MANY_FAILED.format(failed))


class Deadline:
    """`with deadline:` interrupts the main thread, as Ctrl-C does, once it has passed."""

    def __init__(self, after_s: float | None) -> None:
        """Passes `after_s` seconds from now; None: never."""
        self._ends_at = None if after_s is None else time.monotonic() + after_s
        self._timer: threading.Timer | None = None
        self.has_passed = False

    def __enter__(self) -> Self:
        if self._ends_at is not None:
            self._timer = threading.Timer(max(self._ends_at - time.monotonic(), 0), self._end)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.has_passed = True
        interrupt_main_thread()


def interrupt_main_thread() -> None:
    """As Ctrl-C does. A background job of a script ignores SIGINT; SIGTERM ends a run likewise (`stop_on_sigterm`)."""
    ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM if ignores_sigint else signal.SIGINT)


@contextmanager
def log_if_full(folder: RunFolder, log: Log) -> Iterator[None]:
    """A full disk must not hide why a run ended: `run.json` then stays as it was, which can be resumed too."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        log(f"{folder.path('run.json')}: not brought up to date: {error}")


def no_space_left(output: str) -> RunStopped:
    return RunStopped(f"output.path: {output}: no space left; make room, and --resume goes on with the run")


def reason_to_stop(error: BaseException, attempts: ActorHandle, output: str) -> BaseException:
    """The exception to show for `error`, which ended the stream of rows to `output`."""
    if not isinstance(error, Exception):
        return error
    if NoSpaceLeft.__name__ in str(error):
        return no_space_left(output)
    try:
        verdict = ray.get(attempts.verdict.remote(), timeout=ASK_TIMEOUT_S)
        workers = ray.get(attempts.describe.remote(), timeout=ASK_TIMEOUT_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return error  # the attempt tracker is gone with its node; there is no more to say
    if verdict is not None:
        return (TooManyFailed if verdict["kind"] == "budget" else RunStopped)(verdict["reason"])
    if isinstance(error, ExecutionTimeoutError):
        state = "\n".join(f"  {line}" for line in workers) or "  no worker has started: is there room for one?"
        return RunStopped(
            "no stage made progress for limits.no_progress_timeout_s; the workers:\n"
            f"{state}\nraise the limit if a window may take that long; --resume goes on with the run"
        )
    return error
