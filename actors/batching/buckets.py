"""Batches cut from a window of rows by length: rows of one batch have the same schedule and the same length bucket."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of a window that are to be decoded together."""

    rows: tuple[int, ...]
    """Indices into the window."""
    bucket: int
    """The width in tokens that fits every prompt of the batch, shared prefixes excluded."""
    prefix_lengths: tuple[tuple[int, ...], ...] = ()
    """Per row, the lengths of the (nested) prefixes that it shares with others; empty if nothing is shared."""
    max_rows: int = 1 << 30
    """The most rows of such prompts that may be decoded at a time."""

    def of(self, numbers: Sequence[int]) -> "PlannedBatch":
        """The batch of some of the rows, given by their numbers in this one."""
        prefixes = tuple(self.prefix_lengths[at] for at in numbers) if self.prefix_lengths else ()
        return replace(self, rows=tuple(self.rows[at] for at in numbers), prefix_lengths=prefixes)


def merged(batches: Sequence[PlannedBatch]) -> PlannedBatch:
    """The rows of several batches, those of long prompts first, as one that more rows join as others end."""
    order = sorted(batches, key=lambda batch: -batch.bucket)
    prefixes = [batch.prefix_lengths or ((),) * len(batch.rows) for batch in order]
    return PlannedBatch(
        tuple(row for batch in order for row in batch.rows),
        order[0].bucket,
        tuple(own for part in prefixes for own in part) if any(batch.prefix_lengths for batch in order) else (),
        min(batch.max_rows for batch in order),
    )


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
        size = batch_size(bucket)
        count = -(-len(rows) // size)
        edges = [len(rows) * i // count for i in range(count + 1)]
        batches += [PlannedBatch(tuple(rows[a:b]), bucket, max_rows=size) for a, b in itertools.pairwise(edges)]
    return batches
