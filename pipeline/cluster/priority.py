"""Lets a process use what everything else on its machine leaves of the CPUs. GPUs know no such priorities."""

import os
from contextlib import suppress

LOWEST = 19


def run_in_background() -> None:
    """For this thread and all that it starts later: Linux schedules them only while a core would be idle, and takes the
    core away as soon as anything else wants it. Any process may do so; it cannot be undone without privileges."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return
    with suppress(OSError):
        os.nice(LOWEST)
