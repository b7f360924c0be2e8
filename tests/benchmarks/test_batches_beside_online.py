"""The benchmark of batches beside online requests: its sums, and its phases. What it measures takes a quiet machine."""

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from benchmarks.batches_beside_online import lines_per_s, measure, summary
from pipeline.batches.ending import end_batch
from pipeline.batches.storage import ClientStorage, Storage, StoredBatch
from pipeline.bench.load import Outcome, Work
from tests.support.service_helpers import local, make_endpoint

SESSION = "0" * 12


def test_the_pace_of_a_batch_is_that_of_its_files(tmp_path: Path) -> None:
    for at in (2, 7, 12, 20):
        pq.write_table(pa.table({"id": [str(n) for n in range(64)]}), tmp_path / f"{at}.parquet")
        os.utime(tmp_path / f"{at}.parquet", (at, at))
    assert lines_per_s(tmp_path, 1.5, 15) == pytest.approx(128 / 10), "the 64 lines at 7 s and at 12 s, since 2 s"
    with pytest.raises(ValueError, match="1 files of rows came in 4 s"):
        lines_per_s(tmp_path, 10, 14)


def test_bursts_of_files_do_not_change_the_pace(tmp_path: Path) -> None:
    """Three windows come home together every ten seconds: 19.2 lines per second, wherever the phase begins."""
    for burst in (10, 20, 30, 40):
        for at in (burst, burst + 0.1, burst + 0.2):
            pq.write_table(pa.table({"id": [str(n) for n in range(64)]}), tmp_path / f"{at}.parquet")
            os.utime(tmp_path / f"{at}.parquet", (at, at))
    for began in (5, 10.05, 10.15):
        assert lines_per_s(tmp_path, began, 45) == pytest.approx(19.2, rel=0.08)


def test_latencies_are_of_all_rounds_and_ratios_of_each() -> None:
    def answers(*seconds: float) -> list[Outcome]:
        work = Work(1.0, "a", 8)
        return [Outcome(work, status=200, sent_s=1.002, first_s=1.0 + value) for value in seconds]

    rates = {
        "batch": [100.0, 200.0, 100.0],
        "both": [80.0, 90.0, 70.0],
        "online": [1, 1, 1],
        "online beside": [10.0] * 3,
    }
    found = summary({"online": answers(0.1, 0.1, 0.1), "both": answers(0.2, 0.2, 0.3)}, rates)
    assert found["ttft_ratio"] == {"p50": pytest.approx(2), "p99": pytest.approx(2.98)}
    assert found["throughput_ratio"] == {"median": pytest.approx(0.8), "rounds": pytest.approx([0.9, 0.5, 0.8])}
    assert found["requests"] == {"online": 3, "both": 3}
    assert found["late_p99_ms"] == {"online": pytest.approx(2), "both": pytest.approx(2)}


class Rows(threading.Thread):
    """Takes the place of the batches' runs: 128 rows every tenth of a second, until a batch is cancelled."""

    def __init__(self, own: ClientStorage) -> None:
        super().__init__()
        self.own, self.stops = own, threading.Event()

    def run(self) -> None:
        while not self.stops.wait(0.1):
            for record in self.own.batches():
                if self.own.cancelled_at(record["id"]) is None:
                    self._add(record)
                elif self.own.ending(record["id"]) is None:
                    end_batch(self.own, record, "cancelled", lambda _: None)

    def _add(self, record: StoredBatch) -> None:
        run = self.own.run(record["id"])
        files = Path(run.path("data/status=ok"))
        count = len(list(files.glob("*.parquet"))) if files.exists() else 0
        if not count:
            began = {"id": SESSION, "started_at": time.time(), "ended_at": None}
            state: Any = {
                "version": "1.0.0", "state": "running", "fingerprint": {}, "former": [], "known": [],
                "books": {"input": 100_000}, "input": {"documents": 100_000}, "sessions": [began],
            }  # fmt: skip
            run.write_state(state)
            files.mkdir(parents=True)
        text = pa.array([""] * 128)
        names = "id", "generated_text", "finish_reason", "error_code", "error_message"
        columns = dict.fromkeys(names, text) | dict.fromkeys(
            ("num_input_tokens", "num_generated_tokens"), pa.array([1] * 128)
        )
        aside = files.parent / "aside"
        pq.write_table(pa.table(columns), aside)
        aside.rename(files / f"part-{SESSION}-0a0b0c-{count}-0-88888888.parquet")


@pytest.mark.slow
def test_the_phases(tiny_checkpoint: Path, tmp_path: Path) -> None:
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", num_threads=1))
    endpoint = make_endpoint(generator, storage={"path": str(tmp_path)})
    decoding = Rows(Storage(str(tmp_path)).of("local"))
    decoding.start()
    asked = argparse.Namespace(rate=4.0, seconds=1.5, tokens=4, lines=600, rounds=2, seed=0)
    try:
        with local(endpoint) as url:
            found = measure(url, tmp_path, asked)
    finally:
        decoding.stops.set()
        decoding.join()
        endpoint.close()
    assert {name: len(rates) for name, rates in found["rates"].items()} == dict.fromkeys(found["rates"], 2)
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert found["requests"]["online"] == found["requests"]["both"] > 0
    assert found["ttft_ms"]["both"]["p99"] >= found["ttft_ms"]["both"]["p50"] > 0
    states = [decoding.own.ending(own)["status"] for own in decoding.own.batch_ids()]  # type: ignore[index]
    assert states == ["cancelled", "cancelled"]
