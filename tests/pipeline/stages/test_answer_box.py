"""Who decodes a window, by what the `AnswerBox` says to replicas and workers. Without Ray."""

import asyncio
from typing import Any

from pipeline.stages.answer_box import AnswerBox, Delivery

FIRST: Any = "a replica"
SECOND: Any = "another"


def test_one_replica_decodes_a_window() -> None:
    """The first that asks; whether it has died meanwhile is for the worker to find out."""

    async def ask() -> None:
        box = AnswerBox()
        await box.open("a")
        assert [await box.claim("a", one) for one in (FIRST, SECOND, FIRST)] == [True, False, False]
        assert await box.taker("a") == FIRST
        assert await box.take("a", 0) is None
        await box.put("a", Delivery([None]))
        assert await box.take("a", 0) == Delivery([None])

    asyncio.run(ask())


def test_a_call_that_comes_late_gets_no_window() -> None:
    """Ray Serve may hold it back until a replica has started, and the worker has offered the window again."""

    async def ask() -> None:
        box = AnswerBox()
        await box.open("given up")
        assert await box.taker("given up") is None
        assert not await box.claim("given up", FIRST)
        await box.close("given up")
        assert not await box.claim("given up", FIRST)
        await box.put("given up", Delivery([None]))
        await box.open("again")
        assert await box.claim("again", SECOND)
        assert await box.taker("again") == SECOND

    asyncio.run(ask())
