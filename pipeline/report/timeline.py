"""Where the time of a run went: throughput over time, and busy and idle time of each worker, from the metrics files.

Times are seconds of the run: its sessions joined end to end, without the time between a session and its resume.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report.document import ActorFigures, Lane, Rates, Tail
from pipeline.report.metrics_schemas import StoredStart
from pipeline.store.run_state import Session

NUM_BINS = 60
SPAN_PARTS = ("prefill_s", "decode_s", "score_s", "full_prefill_s", "full_decode_s")
BATCH_COLUMNS = ("started_at", "output_tokens", *SPAN_PARTS)
WINDOW_COLUMNS = ("worker", "started_at", "ended_at", "rows", "window")
GONE_AFTER_WINDOWS = 4  # twice what Ray Data lets a worker have ahead (`generate.data_pipeline`)


@dataclass(frozen=True)
class Clock:
    """Epoch seconds to seconds of the run."""

    sessions: tuple[tuple[float, float], ...]
    """Start and end of each session, epoch seconds."""

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> "Clock":
        """A session without an end counts no time; set an end before if it is known."""
        return cls(tuple((s["started_at"], s["ended_at"] or s["started_at"]) for s in sessions))

    @property
    def duration_s(self) -> float:
        return sum(end - start for start, end in self.sessions)

    def at(self, moments: float | np.ndarray) -> np.ndarray:
        """A moment, or an array of them. What lies outside of all sessions is moved to the nearest moment before it."""
        starts, ends = np.array(self.sessions).T
        before = np.concatenate([[0.0], np.cumsum(ends - starts)])
        session = self.session(moments)
        moved: np.ndarray = before[session] + np.clip(moments - starts[session], 0.0, (ends - starts)[session])
        return moved

    def session(self, moments: float | np.ndarray) -> np.ndarray:
        """The number of the session that was on, or was the next to begin."""
        return np.minimum(np.searchsorted([end for _, end in self.sessions], moments), len(self.sessions) - 1)


class Throughput:
    """Output tokens per second in NUM_BINS equal parts of the run; a batch's tokens are spread over its time, a
    full-depth pass included."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._edges = clock, np.linspace(0.0, clock.duration_s, NUM_BINS + 1)
        self._made = np.zeros(NUM_BINS)

    def add(self, batches: pa.Table) -> None:
        """`batches`: BATCH_COLUMNS of `metrics_schemas.BATCH_SCHEMA`, and maybe more."""
        started = batches["started_at"].to_numpy()
        took = sum(pc.fill_null(batches[part], 0.0).to_numpy() for part in SPAN_PARTS)
        start, end = self._clock.at(started), self._clock.at(started + took)
        tokens, length = batches["output_tokens"].to_numpy(), np.maximum(end - start, 1e-9)
        done = [float((tokens * np.clip((edge - start) / length, 0.0, 1.0)).sum()) for edge in self._edges[:-1]]
        self._made += np.diff([*done, float(tokens.sum())])

    def figures(self) -> Rates:
        bin_s = self._clock.duration_s / NUM_BINS
        return {"bin_s": bin_s, "output_tokens_per_s": (self._made / bin_s).tolist()}


@dataclass(frozen=True)
class Windows:
    """The parts of windows that workers decoded, as arrays of equal length, since a large run has millions of them."""

    workers: list[str]
    worker: np.ndarray
    """Index into `workers`."""
    started_at: np.ndarray
    ended_at: np.ndarray
    rows: np.ndarray
    window: np.ndarray
    """The column `window` of `metrics_schemas.WINDOW_SCHEMA`; -1 where the file lacks it."""

    @classmethod
    def of(cls, tables: Iterable[pa.Table]) -> "Windows":
        numbers: dict[str, int] = {}
        columns: list[list[np.ndarray]] = [[np.empty(0, kind)] for kind in ("i4", "f8", "f8", "i4", "i4")]
        for table in tables:
            encoded = table["worker"].combine_chunks().dictionary_encode()
            known = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
            window = pc.fill_null(table["window"], -1).to_numpy()
            rest = [table[name].to_numpy() for name in ("started_at", "ended_at", "rows")]
            made = [np.array(known, "i4")[encoded.indices.to_numpy()], *rest, window]
            for column, part in zip(columns, made, strict=True):
                column.append(part)
        return cls(list(numbers), *(np.concatenate(column) for column in columns))

    def session(self, clock: Clock, number: int) -> "Windows":
        """The parts that began in that session."""
        own = clock.session(self.started_at) == number
        rest = (self.worker, self.started_at, self.ended_at, self.rows, self.window)
        return Windows(self.workers, *(column[own] for column in rest))

    def ends(self) -> np.ndarray:
        """When each worker had its last part done; -inf: it never had one."""
        ends = np.full(len(self.workers), -np.inf)
        np.maximum.at(ends, self.worker, self.ended_at)
        return ends

    def handed_out_until(self) -> float:
        """The latest moment after which some worker still began GONE_AFTER_WINDOWS windows.

        Free workers get the next window, so a worker that decoded nothing after that moment was gone: its node left,
        or the pool shrank.
        """
        own = self.window > 0
        worker, window, start = self.worker[own], self.window[own], self.started_at[own]
        order = np.lexsort((start, window, worker))
        worker, window, start = worker[order], window[order], start[order]
        is_first = np.ones(len(start), bool)  # part of its window
        is_first[1:] = (np.diff(worker) != 0) | (np.diff(window) != 0)
        worker, start = worker[is_first], start[is_first]
        order = np.lexsort((start, worker))
        worker, start = worker[order], start[order]
        ends = np.searchsorted(worker, np.unique(worker), side="right") - GONE_AFTER_WINDOWS
        ends = ends[ends >= np.searchsorted(worker, np.unique(worker))]
        return float(start[ends].max(initial=-np.inf))


def actors(starts: Sequence[StoredStart], windows: Windows, clock: Clock) -> list[ActorFigures]:
    """Per worker: load, busy and idle seconds, rows, restarts, and whether it `left` before the end.

    Idle: from ready to the end of its session (or to the last sign of a worker that left), neither busy nor loading
    again; what it was decoding when it died is in there too.
    """
    count, numbers = len(windows.workers), {name: number for number, name in enumerate(windows.workers)}
    busy = np.bincount(windows.worker, windows.ended_at - windows.started_at, count)
    rows = np.bincount(windows.worker, windows.rows, count)
    ends = windows.ends()
    limits = [windows.session(clock, number).handed_out_until() for number in range(len(clock.sessions))]
    result: list[ActorFigures] = []
    for worker, own in sorted(_by_worker(starts).items()):
        number, ready_at = numbers.get(worker), own[0]["ready_at"]
        session = int(clock.session(ready_at))
        seen_at = ready_at if number is None else max(float(ends[number]), own[-1]["ready_at"])
        has_left = number is not None and seen_at < limits[session]
        busy_s = 0.0 if number is None else float(busy[number])
        there_s = (seen_at if has_left else clock.sessions[session][1]) - ready_at
        result.append(
            {
                "worker": worker,
                "host": own[-1]["host"],
                "device": own[0]["device"],
                "dtype": own[0]["dtype"],
                "backend": own[-1].get("backend"),
                "why_slow": own[-1].get("why_slow"),
                "load_s": sum(start["load_s"] or 0.0 for start in own),
                "busy_s": busy_s,
                "idle_s": max(0.0, there_s - busy_s - sum(start["load_s"] or 0.0 for start in own[1:])),
                "restarts": len(own) - 1,
                "rows": 0 if number is None else int(rows[number]),
                "left": has_left,
            }
        )
    return result


def tail(windows: Windows, clock: Clock) -> Tail | None:
    """How long workers of the last session were idle after their last row while others were still decoding.

    `duration_s`: from the moment the first of them had nothing left to the end of decoding. `idle_s`: summed over the
    workers. `idle_share`: of the time that all of them had, from the first window on. Workers that `left` before are
    not among them.
    """
    last = windows.session(clock, len(clock.sessions) - 1)
    if not len(last.rows):
        return None
    begin, end = float(last.started_at.min()), float(last.ended_at.max())
    ends = last.ends()[np.unique(last.worker)]
    there = ends[ends >= last.handed_out_until()]
    idle_s = float((end - there).sum())
    return {
        "duration_s": end - float(there.min()),
        "idle_s": idle_s,
        "idle_share": idle_s / (len(there) * (end - begin)) if end > begin else 0.0,
        "left": len(ends) - len(there),
    }


def lanes(starts: Sequence[StoredStart], windows: Windows, clock: Clock, limit: int) -> list[Lane]:
    """For the plot: of the first `limit` workers `load` and `busy` spans (start, length) and `restarts`, in seconds of
    the run.

    Busy spans with gaps below a five-hundredth of the run are joined, since they would be invisible.
    """
    numbers = {name: number for number, name in enumerate(windows.workers)}
    result: list[Lane] = []
    for worker, own in sorted(_by_worker(starts).items())[:limit]:
        load = [(float(clock.at(s["ready_at"] - (s["load_s"] or 0.0))), float(clock.at(s["ready_at"]))) for s in own]
        mine = windows.worker == numbers.get(worker, -1)
        busy = _joined(clock.at(windows.started_at[mine]), clock.at(windows.ended_at[mine]), clock.duration_s / 500)
        result.append(
            {
                "worker": worker,
                "load": [(a, b - a) for a, b in load],
                "busy": [(a, b - a) for a, b in busy],
                "restarts": [b for _, b in load[1:]],
            }
        )
    return result


def _joined(starts: np.ndarray, ends: np.ndarray, gap: float) -> list[tuple[float, float]]:
    """The spans in order; spans less than `gap` apart are merged."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    is_first = np.ones(len(starts), bool)
    is_first[1:] = starts[1:] - ends[:-1] >= gap
    is_last = np.roll(is_first, -1)
    return list(zip(starts[is_first].tolist(), ends[is_last].tolist(), strict=True))


def _by_worker(starts: Sequence[StoredStart]) -> dict[str, list[StoredStart]]:
    """Starts grouped by worker, in the order in which they became ready."""
    grouped: dict[str, list[StoredStart]] = defaultdict(list)
    for start in sorted(starts, key=lambda one: one["ready_at"]):
        grouped[start["worker"]].append(start)
    return grouped
