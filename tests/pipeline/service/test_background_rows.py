"""Rows of a batch in the background of an engine that ends."""

import asyncio

import pytest

from actors.generator import Generator
from actors.serving.engine_thread import EngineDead, EngineThread
from pipeline.service.background import BackgroundRows
from skipdecode.engine.results import Completion
from tests.support.engine_helpers import engine_of, pool_of


def test_rows_of_an_engine_that_has_ended_are_not_waited_for(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it has answered before are there."""
    engine = engine_of(generator, scheduler="continuous", batch_size=2)
    thread = EngineThread(engine, lambda _: None, max_waiting=5, stall_s=60)

    async def decode() -> None:
        first, later = BackgroundRows(thread, pool_of(2)), BackgroundRows(thread, pool_of(3))
        await asyncio.to_thread(first.submit)
        assert await first.wait(60)
        assert all(isinstance(answer, Completion) for answer in first.answers)
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        await asyncio.to_thread(later.submit)
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await later.wait(1)
        assert later.answers == [None] * 3

    asyncio.run(decode())
