"""Live metrics of a run on Ray's Prometheus endpoint; every name is defined here.

Ray prefixes names with `ray_` and ends those of counters with `_total`. Every series is tagged with `run`, the
session's id in run.json. `deploy/grafana-dashboard.json` draws these names and no others; a test compares. Use no
`_sum` of a histogram: Ray's agent makes it from the middles of the buckets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ray.util.metrics import Counter, Gauge, Histogram

from pipeline.cluster.ray_internals import record_zero
from pipeline.cluster.worker_records import BatchRecord, WindowRecord
from pipeline.report.batches import per_token_ratio


@dataclass(frozen=True)
class Metric:
    kind: str
    """counter, gauge or histogram."""
    name: str
    help: str
    tags: tuple[str, ...] = ()
    """Beside `run`."""
    boundaries: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """On the endpoint."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

METRICS = (
    Metric("counter", "skipdecode_rows", "Rows decoded or failed; those of a repeated window count again", ("status",)),
    Metric("counter", "skipdecode_batches", "Decoded batches"),
    Metric("counter", "skipdecode_batch_rows", "Rows of decoded batches"),
    Metric("counter", "skipdecode_input_tokens", "Prompt tokens of decoded batches"),
    Metric("counter", "skipdecode_output_tokens", "Generated tokens"),
    Metric("counter", "skipdecode_layers_run", "Layers run for decode steps, summed over rows"),
    Metric("counter", "skipdecode_decode_steps", "Decode steps, summed over rows: what layers_run is divided by"),
    Metric("counter", "skipdecode_busy_seconds", "Time in which workers had rows to decode"),
    Metric("counter", "skipdecode_worker_starts", "Workers that were ready; more than workers: restarts"),
    Metric("counter", "skipdecode_load_seconds", "Time for workers to load the model, summed over worker_starts"),
    Metric("gauge", "skipdecode_split_batches", "Parts of batches that could not be decoded whole, so far"),
    Metric("gauge", "skipdecode_rows_planned", "Rows that this start of the run has to do"),
    Metric("gauge", "skipdecode_workers", "Workers seen so far"),
    Metric("gauge", "skipdecode_speedup", "Measured speedup over full depth so far, prompts included"),
    Metric("gauge", "skipdecode_token_match", "Share of tokens as at full depth so far"),
    Metric("histogram", "skipdecode_batch_seconds", "Time of one batch, measuring left out", (), SECONDS),
)

KINDS: Final = {"counter": Counter, "gauge": Gauge}


class LiveMetrics:
    """Updates Ray's metrics from the records that the collector receives, in its process."""

    def __init__(self, run: str, rows_planned: int) -> None:
        self._metrics = {metric.name.removeprefix("skipdecode_"): _make(metric, run) for metric in METRICS}
        self._workers: set[str] = set()
        self._num_pairs, self._log_ratios = 0, 0.0
        self._gauges: dict[str, float] = {"rows_planned": rows_planned, "workers": 0, "split_batches": 0}
        self._matched = self._compared = 0
        for metric in METRICS:
            if metric.kind == "counter":
                self._start_at_zero(metric)

    def refresh(self) -> None:
        """Tells the gauges again: Ray forgets a gauge once it has passed it on. Call every few seconds."""
        for name, value in self._gauges.items():
            self._metrics[name].set(value)

    def worker_started(self, worker: str, load_s: float) -> None:
        self._workers.add(worker)
        self._gauges["workers"] = len(self._workers)
        self._add("worker_starts", 1)
        self._add("load_seconds", load_s)
        self.refresh()  # a start reported before its worker would look like a restart

    def window_done(self, window: WindowRecord, batches: Sequence[BatchRecord]) -> None:
        self._add("rows", window["rows"] - window["failed"], {"status": "ok"})
        self._add("rows", window["failed"], {"status": "failed"})
        self._add("busy_seconds", window["ended_at"] - window["started_at"])
        for batch in batches:
            self._batch_done(batch)

    def _start_at_zero(self, metric: Metric) -> None:
        """Else Prometheus first sees a counter with its first figures in it, and `rate` never counts those."""
        for tags in [{"status": "ok"}, {"status": "failed"}] if metric.tags else [None]:
            record_zero(self._metrics[metric.name.removeprefix("skipdecode_")], tags)

    def _add(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        if value > 0:  # Ray's counters refuse 0
            self._metrics[name].inc(value, tags)

    def _batch_done(self, batch: BatchRecord) -> None:
        self._add("batches", 1)
        self._add("batch_rows", batch["rows"])
        self._add("input_tokens", batch["input_tokens"])
        self._add("output_tokens", batch["output_tokens"])
        self._add("layers_run", batch["layers_run"])
        self._add("decode_steps", batch["output_tokens"] - batch["rows"])
        self._gauges["split_batches"] += batch.get("split_error") is not None
        self._metrics["batch_seconds"].observe(batch["prefill_s"] + batch["decode_s"])
        if batch.get("full_output_tokens") is not None:
            self._pair_done(batch)

    def _pair_done(self, batch: BatchRecord) -> None:
        self._num_pairs += 1
        ours_s, full_s = batch["prefill_s"] + batch["decode_s"], batch["full_prefill_s"] + batch["full_decode_s"]
        ratio = per_token_ratio(ours_s, batch["output_tokens"], full_s, batch["full_output_tokens"])
        self._log_ratios += math.log(ratio)
        self._gauges["speedup"] = math.exp(self._log_ratios / self._num_pairs)  # as the report's `measured`
        self._matched += batch["matched_tokens"]
        self._compared += batch["compared_tokens"]
        self._gauges["token_match"] = self._matched / self._compared


def _make(metric: Metric, run: str) -> Counter | Gauge | Histogram:
    keys = ("run", *metric.tags)
    if metric.kind == "histogram":
        made = Histogram(metric.name, metric.help, boundaries=list(metric.boundaries), tag_keys=keys)
    else:
        made = KINDS[metric.kind](metric.name, metric.help, tag_keys=keys)
    return made.set_default_tags({"run": run})
