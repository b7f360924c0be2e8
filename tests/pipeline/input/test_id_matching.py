"""Matching input rows with data rows, against a slow count by hand; and the bits that say what is done."""

import random

import numpy as np
import pyarrow as pa
import pytest

from pipeline.input.id_matching import NUM_SHOWN, DoneRows, Match, match, split
from pipeline.input.ids import (
    DIGEST,
    OUTPUT_ENTRY,
    already_used,
    describe_location,
    digest_ids,
    input_entries,
    locations,
    output_entries,
    split_location,
)

NAMES = ["a.jsonl", "b: c.jsonl"]


def inputs(*files: list[str]) -> np.ndarray:
    return np.concatenate([input_entries(digest_ids(ids), file) for file, ids in enumerate(files)])


def outputs(rows: list[tuple[str, tuple[int, int] | None]]) -> np.ndarray:
    """`(id, None)` or `(id, (file, row))` for a duplicate row of that place."""
    if not rows:
        return np.empty(0, OUTPUT_ENTRY)
    messages = [
        location and f"{describe_location(NAMES[location[0]], location[1])}{already_used(id)}x" for id, location in rows
    ]
    columns = {
        "id": [id for id, _ in rows],
        "error_code": ["duplicate_id" if message else "" for message in messages],
        "error_message": [message or "" for message in messages],
    }
    return output_entries(pa.table(columns), 5)


def shown(rows: np.ndarray) -> list[tuple[int, int]]:
    return [split_location(location) for location in rows]


def test_each_duplicate_is_a_row_of_its_own() -> None:
    rows = inputs(["x", "y", "x"], ["x", "z"])
    found = match(rows, outputs([("x", (1, 0)), ("y", None), ("q", None), ("x", (0, 1)), ("y", None)]), NAMES)
    assert shown(found.duplicates) == [(0, 2), (1, 0)]
    assert shown(found.duplicate_of) == [(0, 0), (0, 0)]
    assert shown(found.done) == [(0, 1), (1, 0)]
    assert shown(found.missing) == [(0, 0), (0, 2), (1, 1)]
    assert shown(found.unknown) == [(5, 2), (5, 3)], "there is no duplicate in row 1 of the first file"
    assert shown(found.doubled) == [(5, 4)]
    assert (found.num_inputs, found.num_outputs, found.num_missing, found.num_unknown, found.num_doubled) == (
        5, 5, 3, 2, 1,
    )  # fmt: skip


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_matching_in_parts_equals_counting_by_hand(num_parts: int) -> None:
    rng = random.Random(num_parts)
    files = [[f"i{rng.randrange(400)}" for _ in range(300)] for _ in NAMES]
    first: dict[str, tuple[int, int]] = {}
    duplicates = {}
    for location, id in (((f, r), id) for f, ids in enumerate(files) for r, id in enumerate(ids)):
        if first.setdefault(id, location) != location:
            duplicates[location] = id
    everything = [(id, None) for id in first] + [(id, location) for location, id in duplicates.items()]
    kept = [row for row in everything if rng.random() < 0.7]
    written = kept + rng.sample(kept, 30) + [(f"s{i}", None) for i in range(40)]
    rng.shuffle(written)
    cut = zip(split(inputs(*files), num_parts), split(outputs(written), num_parts), strict=True)
    parts: list[Match] = [match(own, theirs, NAMES) for own, theirs in cut]
    assert sorted(p for part in parts for p in shown(part.duplicates)) == sorted(duplicates)
    for part in parts:
        pairs = zip(shown(part.duplicates), shown(part.duplicate_of), strict=True)
        assert all(first[duplicates[location]] == origin for location, origin in pairs)
    assert sorted(p for part in parts for p in shown(part.done)) == sorted(
        location or first[id] for id, location in kept
    )
    assert sum(part.num_missing for part in parts) == len(everything) - len(kept)
    assert sum(part.num_doubled for part in parts) == 30
    assert sum(part.num_unknown for part in parts) == 40
    assert all(len(part.unknown) == min(part.num_unknown, NUM_SHOWN) for part in parts)


def test_equal_digests_meet_in_one_part() -> None:
    digests = np.frombuffer(random.Random(0).randbytes(16 * 1000), DIGEST)
    entries = np.concatenate([input_entries(digests, 0), input_entries(digests, 1)])
    parts = split(entries, 9)
    assert [len(np.unique(part["digest"])) * 2 for part in parts] == [len(part) for part in parts]
    assert sum(map(len, parts)) == 2000
    assert all((np.diff(part["location"].astype(np.int64)) > 0).all() for part in parts), "the order of places stays"


def test_done_rows_are_the_bits_that_were_set() -> None:
    num_rows = [13, 0, 8, 1000, 1]
    rng = random.Random(1)
    chosen = {(f, r) for f, count in enumerate(num_rows) for r in range(count) if rng.random() < 0.4}
    done = DoneRows(num_rows)
    shuffled = sorted(chosen)
    rng.shuffle(shuffled)
    for part in (shuffled[:200], [], shuffled[200:]):
        done.add(np.array([f << 32 | r for f, r in part], dtype=np.uint64))
    assert done.num_rows == len(chosen)
    for file, count in enumerate(num_rows):
        mask = done.of_file(file, count)
        assert mask.dtype == bool
        assert {(file, int(r)) for r in np.flatnonzero(mask)} == {(f, r) for f, r in chosen if f == file}
        assert done.num_rows_per_file[file] == mask.sum()


def test_places_of_large_files() -> None:
    assert split_location(locations(70_000, 2**32 - 2, 2)[1]) == (70_000, 2**32 - 1)
