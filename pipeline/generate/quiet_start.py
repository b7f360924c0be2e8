"""Starting decode actors without a line on the screen that looks like an error and is none.

The first actor that a driver starts with arguments it holds by reference makes Ray's C++ part say on stderr that
restarts will fail once these go out of scope. Ray Data passes every actor of a pool such arguments (its transformation,
its context, a handle), and holds them until the stream of rows ends, as long as any restart could happen. There is no
switch for that line, so it is taken out where it is written; whatever else is written meanwhile is passed on.
"""

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

P = ParamSpec("P")
T = TypeVar("T")
STDERR = 2
ONE_AT_A_TIME = threading.Lock()  # two threads would put back each other's file
HARMLESS = re.compile(
    rb"[^\n]*core_worker\.cc:\d+: Actor with class name: [^\n]* has constructor arguments in the object store and "
    rb"max_restarts > 0\.[^\n]*\n"
)


@contextmanager
def without_harmless_lines() -> Iterator[None]:
    """What this process writes to its stderr meanwhile comes at the end, without the harmless lines."""
    with ONE_AT_A_TIME, tempfile.TemporaryFile() as file:  # no pipe: a child born meanwhile would keep its end open
        try:
            screen = os.dup(STDERR)
        except OSError:  # closed: there is nobody to spare
            yield
            return
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(screen, STDERR)
            file.seek(0)
            os.write(screen, HARMLESS.sub(b"", file.read()))
            os.close(screen)


def quietly(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with `without_harmless_lines` around each call."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with without_harmless_lines():
            return function(*args, **kwargs)

    return call


def start_actors_quietly() -> None:
    """From now on, in this process; a second time does nothing."""
    if not hasattr(ActorPoolMapOperator._start_actor, "__wrapped__"):
        ActorPoolMapOperator._start_actor = quietly(ActorPoolMapOperator._start_actor)
