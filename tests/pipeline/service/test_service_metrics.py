"""The endpoint's page of metrics: its own figures alone, and no wait for a head that is silent."""

import asyncio
import threading
from typing import Any

import pytest

from pipeline.service.metrics import ours, urls


def test_a_head_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.nodes()` waits for minutes when the head is down."""
    monkeypatch.setattr("pipeline.service.metrics.SCRAPE_S", 0.2)
    is_back, asked = threading.Event(), list[int]()

    def ask() -> list[str]:
        asked.append(1)
        assert is_back.wait(30)
        return ["http://node/metrics"]

    async def some_at_once() -> list[Any]:
        ticks = 0
        scrapes = [asyncio.ensure_future(urls(ask)) for _ in range(5)]
        while not all(scrape.done() for scrape in scrapes):
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10, "the event loop went on"
        return await asyncio.gather(*scrapes, return_exceptions=True)

    found = asyncio.run(some_at_once())
    assert [(error.status, error.body["error"]["code"]) for error in found] == [(503, "head_silent")] * 5
    assert len(asked) == 1
    is_back.set()
    assert asyncio.run(urls(ask)) == ["http://node/metrics"]


def test_metrics_are_ours_alone() -> None:
    """Not those of a run, of another endpoint, or of anybody else on the same nodes."""
    page = [
        "# HELP ray_skipdecode_serve_waiting w",
        "# TYPE ray_skipdecode_serve_waiting gauge",
        'ray_skipdecode_serve_waiting{application="our \\"own\\"",replica="a"} 0',
        'ray_skipdecode_serve_requests_total{application="our \\"own\\"",status="200"} 2',
        'ray_skipdecode_serve_waiting{application="our",replica="b"} 1',
        'ray_skipdecode_serve_waiting{old_application="our \\"own\\""} 1',
        "# HELP ray_skipdecode_output_tokens_total t",
        'ray_skipdecode_output_tokens_total{run="r"} 5',
        'ray_other_total{application="our \\"own\\"",help="ray_skipdecode_serve_"} 1',
    ]
    assert ours([*page, *page], 'our "own"') == page[:4]
