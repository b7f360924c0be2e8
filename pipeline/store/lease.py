"""The lease on a run folder: only one session at a time works in it, and a killed session does not block the next.

`lease.json` names the holder, who updates it every BEAT_S seconds (a heartbeat). A session that finds a lease checks
whether its holder is dead (a process of this machine that is gone) or has sent no heartbeat for LEASE_S seconds; clocks
are never compared. If several sessions start at once on a disk, exactly one gets the lease: the file is created by a
hard link, which fails if the name exists, and a holder only writes to the file that it created. An object store has no
such operation; there the last writer wins. The lease is not a lock, since a holder may be suspended between a check and
the operation after it. The data are safe even then, because a session removes only what is older than itself
(`RunFolder.fence`, `RunFolder.late_files`).
"""

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipeline.config.job import ConfigError
from pipeline.fault_injection import fault_point
from pipeline.formatting import Log
from pipeline.store.atomic_files import may_vanish
from pipeline.store.run_folder import LEASE, RunFolder
from pipeline.store.run_state import LeaseState

LEASE_S = float(os.environ.get("SKIPDECODE_LEASE_S", "30"))  # set it for tests only, and equally for all sessions
BEAT_S = LEASE_S / 6
TAKEOVER_WAIT_S = 2.0  # on an object store: sessions that start together have all written their lease by then
RETRY_WAITS_S = 0.1, 0.2, 0.4, 0.8  # between attempts to read a lease that seems to be missing
BEAT_DIGITS = 12
LOCK_S, LOCK_POLL_S = 0.25, 0.01


class Lease:
    """`with Lease(folder, session, log):` raises ConfigError if another session holds the folder."""

    def __init__(self, folder: RunFolder, session: str, log: Log) -> None:
        self._folder, self._session, self._log = folder, session, log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="lease")
        self._num_beats = 0
        self._file: int | None = None
        """On a disk, the lease file that we created; another file may have its name by now."""
        self.previous_session: str | None = None
        """The session whose lease we have taken over."""
        self._is_lost = False
        self._beat_began_s: float | None = None
        """When the current heartbeat began; None between heartbeats."""

    def __enter__(self) -> "Lease":
        while not self._take(self._wait_for_holder()):
            pass  # another session was faster: check whether it is alive
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._file is None:
            # only the text that we wrote last: neither the lease of `previous_session` nor that of a successor
            if not self._is_lost and _look(self._folder) == self._text():
                self._folder.remove(LEASE)
            return
        if self.holds():
            self._remove_if(lambda text: _session_of(text) == self._session)
        os.close(self._file)
        self._file = None

    def check(self) -> None:
        """Raises RuntimeError if another session has taken the folder over (this process was suspended for long)."""
        if self._is_lost or self._is_overdue() or not self.holds():
            raise RuntimeError(f"{self._folder.shown}: another run has taken over this folder; this one ends")

    def holds(self) -> bool:
        """True if the lease is ours at this moment."""
        found = _session_of(_look(self._folder))
        if self._file is None:  # if the previous session was only suspended, it may write once more before it ends
            return found is not None and found in (self._session, self.previous_session)
        return found == self._session and self._is_in_place(self._file)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._folder.path(LEASE)))
        except FileNotFoundError:
            return False

    def _wait_for_holder(self) -> str | None:
        """The text of a lease that may be taken over, None if there is none. ConfigError if its holder is alive."""
        first = _look(self._folder)
        if first is None or not _may_hold(first):
            return first
        lease = _parse(first)
        who = (
            "a run whose lease.json cannot be read"
            if lease is None
            else f"run {lease['session']} (process {lease['pid']} on {lease['host']})"
        )
        self._log(f"{self._folder.shown}: {who} holds this folder; waiting {LEASE_S:g} s for a sign of life")
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, LEASE_S / 10))
            now = _look(self._folder)
            if now is None or not _may_hold(now):
                return now
            if now != first:
                raise ConfigError(
                    "output.path",
                    f"{who} is at work in {self._folder.shown}; wait for it, or choose another output.path",
                )
        return first

    def _take(self, expected_text: str | None) -> bool:
        """Takes the lease if its text is still `expected_text` (None: if there is none). Returns whether it is ours."""
        self.previous_session = _session_of(expected_text)
        if self._folder.is_local:
            return self._take_on_disk(expected_text)
        self._beat()
        time.sleep(TAKEOVER_WAIT_S)
        return _session_of(_look(self._folder)) == self._session

    def _take_on_disk(self, expected_text: str | None) -> bool:
        target = self._folder.path(LEASE)
        own = f"{target}.{self._session}.tmp"
        os.makedirs(self._folder.root, exist_ok=True)
        file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._write(file)
            fault_point("lease made")
            with exclusively(self._folder.root):  # otherwise a slower session would briefly remove the winner's lease
                if expected_text is not None and not self._remove_if(lambda text: text == expected_text):
                    raise FileExistsError(target)
                _link(own, target)
        except (FileExistsError, FileNotFoundError):  # the second: the holder has cleared the folder
            os.close(file)
            return False
        except BaseException:  # a disk that is full
            os.close(file)
            raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(own)
        if not self._is_in_place(file):  # the file system has no links, so the lease is a copy
            os.close(file)
            file = os.open(target, os.O_RDWR)
        self._file = file
        return True

    def _remove_if(self, matches: Callable[[str], bool]) -> bool:
        """Removes the lease if it matches; a different one is put back. Returns whether it is gone."""
        target = self._folder.path(LEASE)
        aside = f"{target}.{self._session}.gone"
        now = _read(self._folder)
        if now is None or not matches(now):
            return now is None
        try:
            os.rename(target, aside)
        except FileNotFoundError:
            return True
        fault_point("lease aside")
        did_match = matches(_read(self._folder, os.path.basename(aside)) or "")
        if not did_match:  # it changed hands between the check and the rename
            with suppress(FileExistsError):
                _link(aside, target)
        with suppress(FileNotFoundError):
            os.unlink(aside)
        return did_match

    def _beat(self) -> None:
        self._num_beats += 1
        if self._file is None:
            self._folder.write_text(LEASE, self._text())
        else:
            self._write(self._file)

    def _write(self, file: int) -> None:
        """The same length in a single write, so that no reader sees a partial text; flushed, since network file systems
        may show what is written to other machines only then."""
        os.pwrite(file, self._text().encode(), 0)
        os.fsync(file)

    def _text(self) -> str:
        lease: LeaseState = {
            "session": self._session,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "beat": self._num_beats,
        }
        return json.dumps(lease) + " " * (BEAT_DIGITS - len(str(self._num_beats))) + "\n"

    def _is_overdue(self) -> bool:
        """True if the current heartbeat takes too long; on a store it may overwrite a successor's lease."""
        began_s = self._beat_began_s
        return self._file is None and began_s is not None and _running_s() - began_s >= LEASE_S / 2

    def _loop(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat_began_s = _running_s()
                if self.holds():
                    self._beat()
                    if not self._is_overdue():
                        self._beat_began_s = None
                        continue
                    self._is_lost = True
                if self._stop.is_set():
                    return
                # Like Ctrl-C: the run ends, and `check` tells why. A background job of a script ignores SIGINT;
                # SIGTERM ends a run likewise (`generate.stopping.stop_on_sigterm`).
                ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                stop = signal.SIGTERM if ignores_sigint else signal.SIGINT
                signal.pthread_kill(threading.main_thread().ident or 0, stop)
                return
            except Exception as error:  # every store has its own exceptions; it may be back at the next heartbeat
                self._beat_began_s = None
                self._log(f"lease: {type(error).__name__}: {error}")


def _link(source: str, target: str) -> None:
    """Links `target` to `source`, or copies it if the file system has no links. FileExistsError if `target` exists."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        with open(source, "rb") as file, open(target, "xb") as made:
            made.write(file.read())


def read_lease(folder: RunFolder) -> LeaseState | None:
    """The lease on the folder; None if there is none, or it cannot be read."""
    return _parse(_look(folder))


def _look(folder: RunFolder) -> str | None:
    """The text of the lease; None if there is none. If every heartbeat removes it for a moment, it is looked for
    several times."""
    text = _read(folder)
    for wait_s in RETRY_WAITS_S if may_vanish(folder.filesystem) else ():
        if text is not None:
            break
        time.sleep(wait_s)
        text = _read(folder)
    return text


def _read(folder: RunFolder, name: str = LEASE) -> str | None:
    try:
        return folder.read_text(name)
    except UnicodeDecodeError:
        return ""  # torn


def _parse(text: str | None) -> LeaseState | None:
    try:
        lease: LeaseState | None = json.loads(text or "null")
    except ValueError:
        return None
    return lease if isinstance(lease, dict) and {"session", "host", "machine", "pid"} <= lease.keys() else None


def _session_of(text: str | None) -> str | None:
    lease = _parse(text)
    return None if lease is None else lease["session"]


def _may_hold(text: str) -> bool:
    """True if the holder of the lease may be alive, even if the text cannot be parsed: it may be half written."""
    lease = _parse(text)
    return lease is None or may_live(lease)


def _running_s() -> float:
    """A monotonic clock in seconds that includes time in which the process or the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def _machine() -> str:
    """Identifies where a process id means the same process: one boot of one machine, one pid namespace (containers)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
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
        pass  # the process exists, but belongs to another user
    return True


@contextmanager
def exclusively(root: str, wait_s: float = LOCK_S) -> Iterator[None]:
    """A lock on the folder `root` among processes and threads of this machine, if the file system supports it. Gives up
    waiting after `wait_s`.

    Correctness of a lease does not depend on it; it keeps a holder from being considered lost when several sessions
    start at once.
    """
    folder = os.open(root, os.O_RDONLY)
    ends_at = time.monotonic() + wait_s
    try:
        while time.monotonic() < ends_at:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
            except OSError:  # some network file systems
                break
        yield
    finally:
        os.close(folder)  # releases the lock
