"""Where replicas of an endpoint leave the answers to windows of a run that they decode, and its workers wait for them.

A replica is called by Ray Serve, which counts the calls that it has not answered and starts and stops replicas by that
number. So a call that hands over a window returns at once, and the answers come here.

Plain Python; `start_answer_box` makes it an actor on the driver's node. If it is lost, so is the driver's node, and the
run ends.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from pipeline.cluster.pool import on_this_node

if TYPE_CHECKING:  # this process needs no torch
    from actors.generator import Answer


@dataclass(frozen=True)
class Delivery:
    """What a replica has made of a window."""

    answers: "Sequence[Answer | None] | None"
    """One per row; None for a row that it cannot decode. None in place of all: it gives the window back."""


class AnswerBox:
    def __init__(self) -> None:
        self._windows: dict[str, asyncio.Future[Delivery]] = {}
        self._takers: dict[str, ActorHandle | None] = {}
        """The replica that has claimed a window; None: no replica may any more."""
        self._loads_model: str | None = None

    async def open(self, key: str) -> None:
        """A worker is about to hand over the window of that key."""
        self._windows[key] = asyncio.get_running_loop().create_future()

    async def claim(self, key: str, replica: ActorHandle) -> bool:
        """Whether that replica may decode the window: it is the first to ask, and a worker still offers it.

        Ray Serve sends a call again, to another replica, if one dies before the caller knows that it has begun. A row
        that ends its process would so end one replica after the other.
        """
        if key not in self._windows or key in self._takers:
            return False
        self._takers[key] = replica
        return True

    async def taker(self, key: str) -> ActorHandle | None:
        """The replica that has claimed the window. If there is none, none can from now on."""
        return self._takers.setdefault(key, None)

    async def is_open(self, key: str) -> bool:
        """Whether a worker waits for the answers."""
        return key in self._windows

    async def put(self, key: str, delivery: Delivery) -> None:
        """Leaves the answers; they are dropped if nobody waits for them any more."""
        window = self._windows.get(key)
        if window is not None and not window.done():
            window.set_result(delivery)

    async def take(self, key: str, timeout_s: float) -> Delivery | None:
        """The answers; None if there are none within `timeout_s`."""
        await asyncio.wait([self._windows[key]], timeout=timeout_s)
        return self._windows[key].result() if self._windows[key].done() else None

    async def close(self, key: str) -> None:
        """Nobody waits for the answers any more."""
        self._windows.pop(key, None)
        self._takers.pop(key, None)

    async def may_load(self, worker: str) -> bool:
        """Whether the worker may load the model, which it has to say `has_dropped` of: one of the run at a time does. A
        worker that dies with it is started again under its name."""
        self._loads_model = self._loads_model or worker
        return self._loads_model == worker

    async def has_dropped(self, worker: str) -> None:
        """The worker has the model no more."""
        if self._loads_model == worker:
            self._loads_model = None


def start_answer_box() -> ActorHandle:
    """An actor on this node, which takes no CPU from the pool."""
    return ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(AnswerBox).remote()
