"""Ids of rows: ids made from file and row number, digests of ids, and entries that represent rows for matching.

Which ids occur twice and which rows are done is determined in `id_matching`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.job import ConfigError
from pipeline.schema import DUPLICATE_ID, ID

Digests: TypeAlias = NDArray[np.bytes_]
"""'S16' [rows]: digests of ids (`digest_id`)."""
Entries: TypeAlias = NDArray[np.void]
"""[rows] of INPUT_ENTRY or OUTPUT_ENTRY."""
Locations: TypeAlias = NDArray[np.uint64]
"""[rows]: file << 32 | row."""
Rows: TypeAlias = NDArray[np.int64]
"""Row numbers in one file, from 0, blank lines not counted."""
Mask: TypeAlias = NDArray[np.bool_]
"""[rows]"""


DIGEST: Final = np.dtype("S16")
INPUT_ENTRY: Final = np.dtype([("digest", DIGEST), ("location", "<u8")])
"""A row of the input. `location`: file << 32 | row (0-based, blank lines not counted)."""
OUTPUT_ENTRY: Final = np.dtype([("digest", DIGEST), ("location", "<u8"), ("origin", "<u8")])
"""A row of a data file. `origin`: 0, or of a `duplicate_id` row the hash of its location in the input."""
ROW_BITS: Final = np.uint64(32)
ID_MODULUS: Final = 2**128
SUMMED_AT_ONCE: Final = 65536
MOST_INDEXED: Final = 1 << 28
"""Rows of one file whose ids are held one by one, at 16 to 40 bytes each."""


def check_indexed(num_rows: int, path: str) -> None:
    """ConfigError where a file with ids becomes more rows than a task can hold the ids of.

    Made ids are unique and held by a resume alone, which must not be refused.
    """
    if num_rows > MOST_INDEXED:
        raise ConfigError(
            "input.path",
            f"{path} becomes {num_rows} rows or more, and a task holds the ids of {MOST_INDEXED}; split the file, "
            "or make fewer rows of each document (sampling.n, input.templates)",
        )


def digest_id(id: str) -> bytes:
    """16 bytes that stand for an id (blake2b): two of 10^12 ids collide with a probability of 10^-15."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


def digest_ids(ids: Sequence[str]) -> Digests:
    return np.frombuffer(b"".join(map(digest_id, ids)), dtype=DIGEST)


def digest_texts(ids: pa.Array) -> bytes:
    """`digest_id` of each value of a string array without nulls."""
    return b"".join([hashlib.blake2b(id, digest_size=16).digest() for id in ids.view(pa.binary()).to_pylist()])


def sum_digests(digests: Digests) -> int:
    """The sum of digests as numbers, modulo 2^128: the same in any order, another where one is lost and one doubled."""
    words = np.frombuffer(digests.tobytes(), "<u4").reshape(-1, DIGEST.itemsize // 4)
    return sum(int(column) << (32 * word) for word, column in enumerate(words.sum(0, dtype=np.uint64))) % ID_MODULUS


def digest_made_ids(file: str, count: int, expand: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[Digests]:
    """Digests of the made ids of the first `count` documents of a file, some at a time.

    `expand` turns ids of documents into the ids of all their output rows.
    """
    step = max(SUMMED_AT_ONCE // len(expand([""])), 1)
    for start in range(0, count, step):
        yield digest_ids(expand([made_id(file, row) for row in range(start, min(start + step, count))]))


def sum_made_ids(file: str, count: int, expand: Callable[[Sequence[str]], Sequence[str]]) -> int:
    """`sum_digests` of all digests of `digest_made_ids`."""
    return sum(map(sum_digests, digest_made_ids(file, count, expand))) % ID_MODULUS


def row_keys(table: pa.Table) -> list[int]:
    """A number for each row of a table with `id`, `error_code` and `error_message`, which depends on its row of the
    input alone. Their sum is that of `sum_outputs`, modulo 2^128."""
    entries = output_entries(table, 0)
    digests, size = entries["digest"].tobytes(), DIGEST.itemsize
    numbers = (int.from_bytes(digests[at : at + size], "little") for at in range(0, len(digests), size))
    return [number + int(origin) for number, origin in zip(numbers, entries["origin"], strict=True)]


def sum_outputs(table: pa.Table) -> int:
    """The sum for a table with `id`, `error_code` and `error_message`: of the ids, and the origins of duplicates."""
    return sum_entries(output_entries(table, 0))


def sum_entries(entries: Entries) -> int:
    """`sum_outputs` for entries of data files."""
    return (sum_digests(entries["digest"]) + sum(map(int, entries["origin"][entries["origin"] > 0]))) % ID_MODULUS


def made_id(file: str, number: int) -> str:
    return f"{file}:{number}"  # a number has no colon: no two files can make the same id


def locations(file: int, first: int, count: int) -> Locations:
    """Locations of `count` rows of file number `file`, from row `first` on."""
    return np.arange(first, first + count, dtype=np.uint64) | (np.uint64(file) << ROW_BITS)


def split_location(location: int) -> tuple[int, int]:
    """The file number and the row of a `location`."""
    return int(location) >> 32, int(location) & 0xFFFFFFFF


def input_entries(digests: Digests, file: int) -> Entries:
    entries = np.empty(len(digests), INPUT_ENTRY)
    entries["digest"], entries["location"] = digests, locations(file, 0, len(digests))
    return entries


def output_entries(table: pa.Table, file: int, first: int = 0) -> Entries:
    """Entries of rows with the columns `id`, `error_code`, `error_message`, from row `first` of data file `file` on.

    A `duplicate_id` row shares its id with the good row. They are distinguished by the input row that its message
    begins with; otherwise a run that was killed between the two would consider the second one done.
    """
    ids = table[ID].to_pylist()
    entries = np.empty(len(ids), OUTPUT_ENTRY)
    entries["digest"], entries["location"], entries["origin"] = digest_ids(ids), locations(file, first, len(ids)), 0
    # by length first: a comparison would import pandas, slower than the whole file
    for row in pc.indices_nonzero(pc.binary_length(table["error_code"])).to_pylist():
        if table["error_code"][row].as_py() != DUPLICATE_ID:
            continue
        message = table["error_message"][row].as_py()
        entries["origin"][row] = hash_origin(message.partition(already_used(ids[row]))[0])
    return entries


def already_used(id: str) -> str:
    """The middle of the message of a `duplicate_id` row, between the names of that row and of the first with the id."""
    return f": id {id!r} was already used by "


def describe_location(name: str, row: int) -> str:
    """How messages name a row, counting from 1."""
    return f"{name} row {row + 1}"


@dataclass(frozen=True)
class RowNames(Sequence[str]):
    """A lazy sequence of `describe_location` for rows of one file."""

    file: str
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, part: int) -> str: ...
    @overload
    def __getitem__(self, part: slice) -> "RowNames": ...
    def __getitem__(self, part: int | slice) -> "str | RowNames":
        if isinstance(part, slice):
            return RowNames(self.file, self.rows[part])
        return describe_location(self.file, self.rows[part])


def hash_origin(described: str) -> int:
    """A hash of the text of `describe_location`; never 0."""
    return int.from_bytes(hashlib.blake2b(described.encode(), digest_size=8).digest(), "little") or 1
