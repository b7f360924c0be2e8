"""Cutting a window of rows into batches: same schedule, same length bucket, sorted by length. Pure functions."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    rows: tuple[int, ...]
    """Indices into the window."""
    bucket: int
    """Columns that hold every prompt of the batch, or what is behind its heads: the length bucket."""
    marks: tuple[tuple[int, ...], ...] = ()
    """Where the heads end that each row shares with others (`actors.batching.prefix_batches`); empty: nothing is
    shared."""

    def of(self, part: slice) -> "Batch":
        """Some of its rows."""
        return Batch(self.rows[part], self.bucket, self.marks[part])


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket (sorted) that holds `length`; behind the last one, the length rounded up to its multiple."""
    at = bisect_left(buckets, length)
    if at < len(buckets):
        return buckets[at]
    return -(-length // buckets[-1]) * buckets[-1]


def cut_batches(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    buckets: Sequence[int],
    batch_size: Callable[[int], int],
) -> list[Batch]:
    """A partition of range(len(lengths)): rows of one batch share group and bucket, `batch_size(bucket)` at most.

    Rows that do not fill the last batch are spread evenly, so that there is no tiny one behind full ones.
    """
    members: dict[tuple[Hashable, int], list[int]] = {}
    for row, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        members.setdefault((group, bucket_of(length, buckets)), []).append(row)
    batches = []
    for (_, bucket), rows in members.items():
        rows.sort(key=lambda row: lengths[row])
        count = -(-len(rows) // batch_size(bucket))
        edges = [len(rows) * i // count for i in range(count + 1)]
        batches += [Batch(tuple(rows[a:b]), bucket) for a, b in itertools.pairwise(edges)]
    return batches
