"""The estimate that a run logs: from the tokens of a sample before it starts, and once from its first batches.

It reads a few hundred rows, and decodes nothing. The progress line has its own estimate, which follows the current pace
(`pipeline.cluster.progress`).
"""

import time
from typing import Final

from pipeline.cluster.worker_records import Pace
from pipeline.estimate.forecast import Shape, count_tokens, hours, lines
from pipeline.estimate.sample import Sample
from pipeline.formatting import Log, count
from pipeline.store.run_state import EstimateState

SAMPLED_ROWS, SAMPLED_FILES = 512, 4
SEEN_SHARE: Final = 0.01  # of the rows, at least one window, after which the pace so far is extrapolated


class EarlyEstimate:
    """The estimate for the rows that a session has to decode."""

    def __init__(self, sample: Sample, shape: Shape, price_per_hour: float | None, log: Log) -> None:
        self._shape, self._price_per_hour, self._log = shape, price_per_hour, log
        self._started = time.monotonic()
        self._known = count_tokens(sample, shape, price_per_hour)
        self.found: EstimateState | None = None
        log(lines(self._known)[0])

    def is_ready(self, rows: int) -> bool:
        """True if this many rows are enough for the estimate, and it has not been made yet."""
        enough = max(self._shape.window_rows, SEEN_SHARE * self._shape.rows)
        return self.found is None and enough <= rows < self._shape.rows

    def log_once(self, pace: Pace) -> None:
        """Logs the estimate for the whole run, once; `pace` is that of the first rows."""
        good, batches = pace["rows"] - pace["failed"], max(pace["batches"], 1)
        if not self.is_ready(pace["rows"]) or not good or not pace["workers"]:
            return
        left = self._shape.rows - pace["rows"]
        at_full_depth = self._shape.baseline_fraction * batches * pace["full_s"] / max(pace["pairs"], 1)
        rest_s = left * (pace["own_s"] + at_full_depth) / pace["rows"] / pace["workers"]
        duration_s = time.monotonic() - self._started + rest_s
        scale = self._shape.rows / pace["rows"]
        price = self._price_per_hour
        self.found = {
            "rows": self._shape.rows,
            "seen_rows": pace["rows"],
            "input_tokens": self._known.input_tokens,
            "output_tokens": round(scale * pace["output_tokens"]),
            "duration_s": duration_s,
            "cost": None if price is None else price * duration_s / 3600,
        }
        self._log(
            f"expected: {hours(duration_s, self.found['cost'])} and about {self.found['output_tokens']:,} new tokens "
            f"(from the first {count(pace['rows'], 'row')})"
        )
