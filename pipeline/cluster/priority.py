"""Lets a process use what everything else on its machine leaves of the CPUs. GPUs know no such priorities."""

import os
from contextlib import suppress

LOWEST = 19


def run_in_background(pid: int = 0) -> None:
    """For this thread and all that it starts later: Linux schedules them only while a core would be idle, and takes the
    core away as soon as anything else wants it. Any process may do so; it cannot be undone without privileges.
    `pid`: for the first thread of that process.

    Where Linux groups processes by session (`/proc/sys/kernel/sched_autogroup_enabled` is 1), sessions share the cores
    equally, and this counts inside one. All that a raylet starts is of its session: workers, replicas, and what these
    start without a session of its own.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, LOWEST)
