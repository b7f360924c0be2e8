"""Which input rows have the id of an earlier one, and which rows of the data files belong to which input row.

Works on entries (`ids`), and on any part of them that has all entries of each digest it has: `split` makes such parts,
so that no process needs all rows at once. Opens no file; `pipeline.generate.row_index` runs this on a cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.input.ids import (
    DIGEST,
    ROW_BITS,
    Digests,
    Entries,
    Locations,
    Mask,
    Rows,
    describe_location,
    hash_origin,
    split_location,
)

NUM_SHOWN = 20  # rows of each kind that a `Match` lists; the rest is counted


@dataclass(frozen=True, eq=False)
class Match:
    """The matches of one part. Rows are given by their `location` (`ids.INPUT_ENTRY`), uint64, sorted."""

    duplicates: Locations
    """Input rows whose id an earlier row has."""
    duplicate_of: Locations
    """The first row with that id, for each of them."""
    done: Locations
    """Input rows that a data file has."""
    num_inputs: int
    num_outputs: int
    missing: Locations
    """Input rows that no data file has, the first NUM_SHOWN."""
    num_missing: int
    doubled: Locations
    """Rows of data files whose input row an earlier one has already, the first NUM_SHOWN."""
    num_doubled: int
    unknown: Locations
    """Rows of data files that belong to no input row, the first NUM_SHOWN."""
    num_unknown: int


def match(inputs: Entries, outputs: Entries, names: Sequence[str]) -> Match:
    """Matches a part; `inputs` are in the order of their locations, `names` are those of the input files.

    An output row belongs to the first input row with its id; a `duplicate_id` row to the later one at its origin.
    Peak memory: about 150 bytes per entry.
    """
    count = len(inputs)
    codes = _encode(np.concatenate([inputs["digest"], outputs["digest"]]))
    own, theirs = codes[:count], codes[count:]
    first = np.full(int(codes.max(initial=-1)) + 1, -1, dtype=np.int64)
    first[own[::-1]] = np.arange(count - 1, -1, -1)  # the earliest is written last
    later = np.flatnonzero(first[own] != np.arange(count))
    owner = first[theirs]
    located = np.flatnonzero(outputs["origin"])
    if len(located):
        by_origin = {(own[row], _origin(int(inputs["location"][row]), names)): row for row in later}
        owner[located] = [by_origin.get((theirs[row], int(outputs["origin"][row])), -1) for row in located]
    known = owner >= 0
    done, firsts = np.unique(owner[known], return_index=True)
    is_again = known.copy()
    is_again[np.flatnonzero(known)[firsts]] = False
    is_missing = np.ones(count, dtype=bool)
    is_missing[done] = False
    lost, again, strange = (np.flatnonzero(mask) for mask in (is_missing, is_again, ~known))
    return Match(
        duplicates=inputs["location"][later],
        duplicate_of=inputs["location"][first[own[later]]],
        done=inputs["location"][done],
        num_inputs=count,
        num_outputs=len(outputs),
        missing=inputs["location"][lost[:NUM_SHOWN]],
        num_missing=len(lost),
        doubled=outputs["location"][again[:NUM_SHOWN]],
        num_doubled=len(again),
        unknown=outputs["location"][strange[:NUM_SHOWN]],
        num_unknown=len(strange),
    )


def match_alone(outputs: Entries) -> Match:
    """Matches data files without the input, which finds only duplicates."""
    keys = np.empty(len(outputs), [("digest", DIGEST), ("origin", "<u8")])
    keys["digest"], keys["origin"] = outputs["digest"], outputs["origin"]
    again = np.ones(len(outputs), dtype=bool)
    again[np.unique(_encode(keys), return_index=True)[1]] = False
    locations, none = outputs["location"][again], np.empty(0, np.uint64)
    return Match(none, none, none, 0, len(outputs), none, 0, locations[:NUM_SHOWN], len(locations), none, 0)


def _encode(keys: Digests | Entries) -> Rows:
    """An integer per key, equal for equal bytes."""
    data = [None, pa.py_buffer(keys)]
    array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(keys.itemsize), len(keys), data)
    codes: Rows = array.dictionary_encode().indices.to_numpy()
    return codes


def _origin(location: int, names: Sequence[str]) -> int:
    file, row = split_location(location)
    return hash_origin(describe_location(names[file], row))


def split(entries: Entries, num_parts: int) -> list[Entries]:
    """Cuts entries by digest into `num_parts` of about the same size; the order within each stays."""
    leading = np.frombuffer(entries["digest"].tobytes(), dtype=">u2")[:: DIGEST.itemsize // 2]
    part = (leading.astype(np.int64) * num_parts) >> 16
    order = np.argsort(part, kind="stable")
    cuts = np.searchsorted(part[order], np.arange(1, num_parts))
    return np.split(entries[order], cuts)


class DoneRows:
    """Which rows of each input file are done: a bit per row."""

    def __init__(self, num_rows_per_file: Sequence[int]) -> None:
        num_bytes = -(-np.asarray(num_rows_per_file, dtype=np.int64) // 8)
        self._starts = np.concatenate([[0], np.cumsum(num_bytes)])
        self._bits = np.zeros(int(self._starts[-1]), dtype=np.uint8)
        self.num_rows_per_file = np.zeros(len(num_rows_per_file), dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return int(self.num_rows_per_file.sum())

    def add(self, done: Locations) -> None:
        """Marks rows as done, each row at most once in the life of this object."""
        files = (done >> ROW_BITS).astype(np.int64)
        self.num_rows_per_file += np.bincount(files, minlength=len(self.num_rows_per_file))
        rows = (done & np.uint64(0xFFFFFFFF)).astype(np.int64)
        at, bit = self._starts[files] + (rows >> 3), np.left_shift(1, rows & 7).astype(np.uint8)
        order = np.argsort(at, kind="stable")
        at, bit = at[order], bit[order]
        heads = np.flatnonzero(np.diff(at, prepend=-1))
        if len(heads):
            self._bits[at[heads]] |= np.bitwise_or.reduceat(bit, heads)

    def of_file(self, file: int, num_rows: int) -> Mask:
        """bool [num_rows]"""
        own = self._bits[self._starts[file] : self._starts[file + 1]]
        return np.unpackbits(own, count=num_rows, bitorder="little").astype(bool)
