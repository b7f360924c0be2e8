"""Cutting a window into batches: a partition, one group and bucket each, nothing larger than allowed, no tiny rest."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.batching.buckets import bucket_of, cut_batches

buckets_of = st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).map(sorted)


@given(
    rows=st.lists(st.tuples(st.integers(1, 150), st.sampled_from("abc")), max_size=80),
    buckets=buckets_of,
    sizes=st.integers(1, 12),
    shrink=st.booleans(),
)
def test_partition(rows: list[tuple[int, str]], buckets: list[int], sizes: int, shrink: bool) -> None:
    def limit(bucket: int) -> int:
        return max(1, sizes - bucket // 20) if shrink else sizes

    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    batches = cut_batches(lengths, groups, buckets, limit)
    placed = [row for batch in batches for row in batch.rows]
    assert sorted(placed) == list(range(len(rows)))  # nothing lost, nothing doubled
    members = Counter((bucket_of(n, buckets), g) for n, g in rows)
    per_member: dict[tuple[int, str], list[int]] = {}
    for batch in batches:
        assert 1 <= len(batch.rows) <= limit(batch.bucket)
        assert len({groups[row] for row in batch.rows}) == 1
        assert {bucket_of(lengths[row], buckets) for row in batch.rows} == {batch.bucket}
        assert max(lengths[row] for row in batch.rows) <= batch.bucket
        assert [lengths[row] for row in batch.rows] == sorted(lengths[row] for row in batch.rows)
        per_member.setdefault((batch.bucket, groups[batch.rows[0]]), []).append(len(batch.rows))
    for (bucket, group), count in members.items():
        cut = per_member[bucket, group]
        assert len(cut) == -(-count // limit(bucket))  # no batch more than needed
        assert max(cut) - min(cut) <= 1  # and no tiny one behind full ones


@given(length=st.integers(1, 500), buckets=buckets_of)
def test_bucket_is_the_smallest_that_holds(length: int, buckets: list[int]) -> None:
    bucket = bucket_of(length, buckets)
    assert bucket >= length
    if length <= buckets[-1]:
        assert bucket == min(b for b in buckets if b >= length)
    else:
        assert bucket % buckets[-1] == 0
        assert bucket - length < buckets[-1]


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 48)])
def test_bucket_by_hand(length: int, bucket: int) -> None:
    assert bucket_of(length, (8, 16)) == bucket


def test_cut_by_hand() -> None:
    batches = cut_batches([3, 9, 2, 8, 1, 4, 12], "aaaabaa", (8, 16), lambda bucket: 2 if bucket == 8 else 5)
    assert [(batch.rows, batch.bucket) for batch in batches] == [((2, 0), 8), ((5, 3), 8), ((1, 6), 16), ((4,), 8)]


def test_shorter_rows_are_together() -> None:
    """Within a bucket batches go by length, so that a batch without fixed shapes has little padding."""
    lengths = [20, 1, 18, 2, 19, 3]
    batches = cut_batches(lengths, [0] * 6, (32,), lambda _: 3)
    assert [sorted(lengths[row] for row in batch.rows) for batch in batches] == [[1, 2, 3], [18, 19, 20]]


def test_nothing_in_nothing_out() -> None:
    assert cut_batches([], [], (8,), lambda _: 4) == []
    with pytest.raises(ValueError, match="shorter"):
        cut_batches([1, 2], ["a"], (8,), lambda _: 4)
