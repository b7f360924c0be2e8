"""One engine of `compare_peers.py` in a process of its own, under its own interpreter; and the other end of its pipe.

Lines of JSON. The process says `{"ready": FACTS}` once it is loaded; then each `{"prompts", "new_tokens"}` is answered
with `{"seconds", "tokens"}`. `{"error"}` in place of either is its last word. What engines print goes to stderr.
An engine that waits is stopped (SIGSTOP): some poll (vLLM's worker), and take a fifth of a core.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peer_engines import Prompts, Spec, make_engine, packages

ROOT = Path(__file__).parents[1]
END_TIMEOUT_S = 20


class PeerError(RuntimeError):
    """An engine that is not there, or that failed; the text says why."""


class Contestant:
    """The engine of `spec`, loaded under `python`. PeerError where that fails. Use as a context manager."""

    def __init__(
        self,
        spec: Spec,
        python: str = sys.executable,
        *,
        limit_s: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """`limit_s`: when its process is killed at the latest. `memory_bytes`: what that may allocate on the host."""
        self.name, self._ends, self._limit_s = spec.name, spec.ends, limit_s
        command = [python, "-m", "benchmarks.peer_worker", json.dumps(asdict(spec)), str(memory_bytes or 0)]
        try:
            # A group of its own can be stopped; should this process die, the kernel wakes the group and hangs it up.
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
            )
        except OSError as error:
            raise PeerError(f"cannot start its interpreter: {error}") from error
        self.pid = self._process.pid
        self._is_late = False
        self._timer = threading.Timer(limit_s or 0, self._end_late)
        if limit_s is not None:
            self._timer.daemon = True
            self._timer.start()
        try:
            self.facts: dict[str, Any] = self._receive()["ready"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, prompts: Prompts, num_new: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each prompt. PeerError when it fails or makes another number of tokens."""
        self._signal(signal.SIGCONT)
        try:
            self._send({"prompts": prompts, "new_tokens": num_new})
            answer = self._receive()
        finally:
            self._signal(signal.SIGSTOP)
        lengths = [len(row) for row in answer["tokens"]]
        if self._ends and (len(lengths) != len(prompts) or not all(0 < length <= num_new for length in lengths)):
            raise PeerError(f"not 1 to {num_new} tokens each")
        if not self._ends and lengths != [num_new] * len(prompts):
            raise PeerError(f"not {num_new} tokens each")
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """Ends the process and all that it has started."""
        self._timer.cancel()
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _end_late(self) -> None:
        self._is_late = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._why_dead()) from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._why_dead())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _why_dead(self) -> str:
        return f"it did not end within {self._limit_s:g} s" if self._is_late else "its process died"


def serve(spec: Spec, orders: TextIO, answers: TextIO) -> None:
    """Makes the engine and answers orders until there are no more, or until it fails."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        engine = make_engine(spec)
        answer({"ready": {"python": sys.version.split()[0], "packages": packages(), **engine.facts}})
        for line in orders:
            order = json.loads(line)
            start = time.perf_counter()
            tokens = engine.run(order["prompts"], order["new_tokens"])
            answer({"seconds": time.perf_counter() - start, "tokens": tokens})
    except ImportError as error:
        answer({"error": f"not installed here: {error}"[:500]})
    except MemoryError:
        answer({"error": "it needs more memory than it may take"})
    except Exception as error:  # whatever a peer raises: the others go on
        answer({"error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # what engines print must not get between the answers
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if (most := int(sys.argv[2])) > 0:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    serve(Spec(**json.loads(sys.argv[1])), sys.stdin, answers)


if __name__ == "__main__":
    main()
