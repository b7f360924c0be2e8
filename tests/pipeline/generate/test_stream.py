"""The end of a run's stream: the last line of the progress is of all rows."""

from typing import Any

import pytest
import ray

from pipeline.generate import stream


class Counts:
    """A collector that hears of more rows each time it is asked."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.counts = list(rows), self

    def remote(self) -> int:
        return self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]


@pytest.mark.parametrize(("heard", "left"), [((0, 7, 9, 10, 99), [99]), ((10,), [10])])
def test_records_that_are_on_their_way_are_waited_for(
    heard: tuple[int, ...], left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers do not wait until the collector has their records: the last ones come when the rows are written."""
    monkeypatch.setattr(ray, "get", lambda rows, timeout: {"rows": rows})
    collector: Any = Counts(*heard)
    stream._await_records(collector, 10)
    assert collector.rows == left


def test_records_that_do_not_come_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RECORDS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray, "get", lambda rows, timeout: {"rows": rows})
    collector: Any = Counts(9)
    stream._await_records(collector, 10)

    def gone(rows: int, timeout: float) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", gone)
    stream._await_records(collector, 10)
