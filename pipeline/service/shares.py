"""What one client may hold of a replica: prompts in progress, bytes of bodies that are being read, and threads.

A client is an API key, or an address where there are no keys. Without these shares the requests of one would hold up
all others. Used in the event loop only; no Ray.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from pipeline.service.api_error import ApiError
from pipeline.service.config import LimitsSection

NUM_THREADS: Final = 6
THREADS_PER_CLIENT: Final = 3
RETRY_AFTER_S: Final = 1

P = ParamSpec("P")
T = TypeVar("T")


class Shares:
    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._prompts: Counter[str] = Counter()
        """Prompts in progress; a request whose body is being read counts as one."""
        self._bytes: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "beside-the-loop")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def prompts(self, client: str, count: int, retry_after_s: int = RETRY_AFTER_S) -> Iterator[None]:
        """Holds `count` prompts of the client's share; ApiError if it has not so many left."""
        limit = self._limits.max_client_prompts
        if limit is not None and count > limit:  # can never be accepted
            message = f"{count} prompts in one request (limits.max_client_prompts is {limit})"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if limit is not None and (mine := self._prompts[client]) + count > limit:
            message = f"{mine} prompts of yours are being answered (limits.max_client_prompts is {limit})"
            raise ApiError.overloaded(message, retry_after_s)
        with _held(self._prompts, client) as add:
            add(count)
            yield

    @contextmanager
    def body(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yields a function to be called with the number of bytes that have arrived of a body; ApiError 429 if all
        bodies together, or those of this client, are too large. The bytes count until the block is left."""
        most = max(self._limits.max_reading_bytes, self._limits.max_body_bytes)
        own = max(most // 2, self._limits.max_body_bytes)
        with _held(self._bytes, client) as add:

            def arrived(num_bytes: int) -> None:
                add(num_bytes)
                if self._bytes.total() > most or self._bytes[client] > own:
                    message = f"the bodies that are being read have more than {most} bytes (limits.max_reading_bytes)"
                    raise ApiError.overloaded(message, RETRY_AFTER_S)

            yield arrived

    async def in_thread(self, client: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that takes long, called in a thread; a client has half of the threads at most."""
        turn = self._turns.setdefault(client, asyncio.Semaphore(THREADS_PER_CLIENT))
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _held(counter: "Counter[str]", client: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds to a client's count what is taken off again at the end."""
    total = 0

    def add(count: int) -> None:
        nonlocal total
        total += count
        counter[client] += count

    try:
        yield add
    finally:
        counter[client] -= total
        if not counter[client]:
            del counter[client]
