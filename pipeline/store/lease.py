"""The lease on a run folder: one session at a time works in it, and one that was killed does not bar the next.

`lease.json` names the holder, who rewrites it every BEAT_S seconds. Whoever finds it looks whether the holder is dead
(a process of this machine that is gone) or beats no more for LEASE_S seconds; no clocks are compared. It is not a lock:
it keeps honest runs apart. What protects the data from a session that was thought dead is `RunFolder.fence`.
"""

import json
import os
import signal
import socket
import threading
import time

from pipeline.config import ConfigError
from pipeline.store.run_folder import LEASE, RunFolder
from pipeline.store.run_state import LeaseState
from pipeline.units import Note

BEAT_S = 5.0
LEASE_S = 30.0


class Lease:
    """`with Lease(folder, session, note):` ConfigError when another session holds the folder."""

    def __init__(self, folder: RunFolder, session: str, note: Note) -> None:
        self._folder, self._session, self._note = folder, session, note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="lease")
        self._num_beats = 0

    def __enter__(self) -> "Lease":
        self._wait_for_holder()
        self._beat()
        self.check()  # of two that came at once the later one stays
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.holds():
            self._folder.remove(LEASE)

    def check(self) -> None:
        """RuntimeError when another session has taken the folder (this process stood still for long)."""
        if not self.holds():
            raise RuntimeError(f"{self._folder.shown}: another run has taken over this folder; this one ends")

    def _wait_for_holder(self) -> None:
        first = read_lease(self._folder)
        if first is None or not may_live(first):
            return
        who = f"run {first['session']} (process {first['pid']} on {first['host']})"
        self._note(f"{self._folder.shown}: {who} holds this folder; waiting {LEASE_S:g} s for a sign of life")
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, LEASE_S / 10))
            now = read_lease(self._folder)
            if now is None or not may_live(now):
                return
            if now != first:
                raise ConfigError(
                    "output.path",
                    f"{who} is at work in {self._folder.shown}; wait for it, or choose another output.path",
                )

    def holds(self) -> bool:
        lease = read_lease(self._folder)
        return lease is not None and lease["session"] == self._session

    def _beat(self) -> None:
        self._num_beats += 1
        lease: LeaseState = {
            "session": self._session,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "beat": self._num_beats,
        }
        self._folder.write_text(LEASE, json.dumps(lease) + "\n")

    def _loop(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                if not self.holds():
                    # as Ctrl-C: the run ends, and finds out why with `check`. A job in the background of a script
                    # has SIGINT ignored; SIGTERM ends a run likewise (`ending.stop_on_sigterm`).
                    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                    stop = signal.SIGTERM if is_deaf else signal.SIGINT
                    signal.pthread_kill(threading.main_thread().ident or 0, stop)
                    return
                self._beat()
            except OSError as error:  # the store may be back at the next beat
                self._note(f"lease: {error}")


def read_lease(folder: RunFolder) -> LeaseState | None:
    """The lease on the folder, None where there is none (or none that can be read)."""
    try:
        lease: LeaseState | None = json.loads(folder.read_text(LEASE) or "null")
    except ValueError:
        return None
    return lease if isinstance(lease, dict) and {"session", "host", "machine", "pid"} <= lease.keys() else None


def _machine() -> str:
    """Where a process id means the same process: one boot of one machine, one pid namespace (containers)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def may_live(lease: LeaseState) -> bool:
    """False only for a process of this machine that is gone."""
    if lease["machine"] != _machine():
        return True
    try:
        os.kill(int(lease["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process: it is there
    return True
