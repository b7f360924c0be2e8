"""Sessions of one machine that want the same folder at the same moment go through a step one after the other.

Nothing depends on it: it spares a holder from being taken for lost (`lease`). Left out: other machines.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S, TURN_LOOKS = 0.25, 25


@contextmanager
def exclusively(root: str) -> Iterator[None]:
    """Alone in the folder `root`, where its file system can lock a folder. Who stands still in here is not waited for
    longer than TURN_S."""
    folder = os.open(root, os.O_RDONLY)
    try:
        for _ in range(TURN_LOOKS):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TURN_S / TURN_LOOKS)
            except OSError:  # some network file systems
                break
        yield
    finally:
        os.close(folder)  # and with it the lock
