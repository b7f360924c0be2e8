"""Where the time of a run went, from its metrics files: tokens over time, work and idleness of each worker.

Times are seconds of the run: sessions joined end to end, without the time between a session and its resume.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUM_BINS = 60


@dataclass(frozen=True)
class Clock:
    """Epoch seconds to seconds of the run."""

    sessions: tuple[tuple[float, float], ...]
    """Start and end of each session, epoch seconds."""

    @classmethod
    def of(cls, sessions: Sequence[dict[str, Any]]) -> "Clock":
        return cls(tuple((s["started_at"], s["ended_at"]) for s in sessions))

    @property
    def duration_s(self) -> float:
        return sum(end - start for start, end in self.sessions)

    def at(self, time_s: float) -> float:
        """What lies outside of all sessions is moved to the nearest moment before it."""
        passed = 0.0
        for start, end in self.sessions:
            if time_s <= end:
                return passed + max(0.0, time_s - start)
            passed += end - start
        return passed

    def session_end(self, time_s: float) -> float:
        """The end, in epoch seconds, of the session that was on at `time_s`."""
        return next((end for _, end in self.sessions if time_s <= end), self.sessions[-1][1])


def batch_span(batch: dict[str, Any]) -> tuple[float, float]:
    """From when to when a batch was decoded, a full-depth pass included."""
    parts = ("prefill_s", "decode_s", "full_prefill_s", "full_decode_s")
    return batch["started_at"], batch["started_at"] + sum(batch[part] or 0.0 for part in parts)


def throughput(batches: Sequence[dict[str, Any]], clock: Clock) -> dict[str, Any]:
    """Output tokens per second in NUM_BINS equal parts of the run; a batch's tokens are spread over its time."""
    bin_s = clock.duration_s / NUM_BINS
    tokens = [0.0] * NUM_BINS
    for batch in batches:
        start, end = (clock.at(moment) for moment in batch_span(batch))
        first, last = min(int(start / bin_s), NUM_BINS - 1), min(int(end / bin_s), NUM_BINS - 1)
        for place in range(first, last + 1):
            inside = min(end, (place + 1) * bin_s) - max(start, place * bin_s)
            tokens[place] += batch["output_tokens"] * (inside / (end - start) if end > start else 1.0)
    return {"bin_s": bin_s, "output_tokens_per_s": [count / bin_s for count in tokens]}


def actors(starts: Sequence[dict[str, Any]], windows: Sequence[dict[str, Any]], clock: Clock) -> list[dict[str, Any]]:
    """Per worker: load, busy and idle seconds, rows, restarts. Idle: from ready to the end of its session, not busy."""
    by_worker = _by_worker(sorted(starts, key=lambda start: start["ready_at"]))
    done = _by_worker(windows)
    result = []
    for worker, own in sorted(by_worker.items()):
        mine = done.get(worker, [])
        busy_s = sum(w["ended_at"] - w["started_at"] for w in mine)
        ready_at = own[0]["ready_at"]
        result.append(
            {
                "worker": worker,
                "host": own[-1]["host"],
                "device": own[0]["device"],
                "dtype": own[0]["dtype"],
                "load_s": sum(start["load_s"] for start in own),
                "busy_s": busy_s,
                "idle_s": max(0.0, clock.session_end(ready_at) - ready_at - busy_s),
                "restarts": len(own) - 1,
                "rows": sum(w["rows"] for w in mine),
            }
        )
    return result


def tail(windows: Sequence[dict[str, Any]], clock: Clock) -> dict[str, Any] | None:
    """How long workers of the last session stood still behind their last row while others still decoded.

    `duration_s`: from the moment the first of them had nothing left to the end of decoding. `idle_s`: summed over the
    workers. `idle_share`: of the time that all of them had, from the first window on.
    """
    started_at = clock.sessions[-1][0]
    last = [w for w in windows if w["started_at"] >= started_at]
    if not last:
        return None
    begin, end = min(w["started_at"] for w in last), max(w["ended_at"] for w in last)
    ends = [max(w["ended_at"] for w in own) for own in _by_worker(last).values()]
    idle_s = sum(end - own for own in ends)
    return {
        "duration_s": end - min(ends),
        "idle_s": idle_s,
        "idle_share": idle_s / (len(ends) * (end - begin)) if end > begin else 0.0,
    }


def lanes(starts: Sequence[dict[str, Any]], windows: Sequence[dict[str, Any]], clock: Clock) -> list[dict[str, Any]]:
    """For the plot: per worker `load` and `busy` spans (start, length) and `restarts`, in seconds of the run.

    Busy spans with gaps below a five-hundredth of the run are joined: nobody could see them.
    """
    gap_s = clock.duration_s / 500
    done = _by_worker(windows)
    result = []
    for worker, own in sorted(_by_worker(sorted(starts, key=lambda start: start["ready_at"])).items()):
        load = [(clock.at(s["ready_at"] - s["load_s"]), clock.at(s["ready_at"])) for s in own]
        spans: list[tuple[float, float]] = []
        for window in sorted(done.get(worker, []), key=lambda w: w["started_at"]):
            start, end = clock.at(window["started_at"]), clock.at(window["ended_at"])
            if spans and start - spans[-1][1] < gap_s:
                start, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((start, end))
        result.append(
            {
                "worker": worker,
                "load": [(a, b - a) for a, b in load],
                "busy": [(a, b - a) for a, b in spans],
                "restarts": [b for _, b in load[1:]],
            }
        )
    return result


def _by_worker(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        grouped[record["worker"]].append(record)
    return grouped
