"""Batches cut from a window of rows by length: rows of one batch have the same schedule and the same length bucket."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of a window that are to be decoded together."""

    rows: tuple[int, ...]
    """Indices into the window."""
    bucket: int
    """The width in tokens that fits every prompt of the batch, shared prefixes excluded."""
    prefix_lengths: tuple[tuple[int, ...], ...] = ()
    """Per row, the lengths of the (nested) prefixes that it shares with others; empty if nothing is shared."""

    def part(self, which: slice) -> "PlannedBatch":
        """The batch of some of the rows."""
        return PlannedBatch(self.rows[which], self.bucket, self.prefix_lengths[which])


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest of the sorted buckets that fits `length`; beyond the last one, the next multiple of it."""
    at = bisect_left(buckets, length)
    if at < len(buckets):
        return buckets[at]
    return -(-length // buckets[-1]) * buckets[-1]


def cut_batches(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    buckets: Sequence[int],
    batch_size: Callable[[int], int],
) -> list[PlannedBatch]:
    """Partitions range(len(lengths)) into batches of one group and one bucket, with at most `batch_size(bucket)` rows.

    The rows of a bucket are spread evenly over its batches, so that no tiny batch follows full ones.
    """
    members: dict[tuple[Hashable, int], list[int]] = {}
    for row, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        members.setdefault((group, bucket_of(length, buckets)), []).append(row)
    batches = []
    for (_, bucket), rows in members.items():
        rows.sort(key=lambda row: lengths[row])
        count = -(-len(rows) // batch_size(bucket))
        edges = [len(rows) * i // count for i in range(count + 1)]
        batches += [PlannedBatch(tuple(rows[a:b]), bucket) for a, b in itertools.pairwise(edges)]
    return batches
