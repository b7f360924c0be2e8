"""Checks of a run's data files: each must be whole, have the run's columns, and hold no contradictory row.

Every page of a file is read once, in batches, so that damage is found (data files have page checksums). One call checks
a group of files and needs nothing else, so that it can run as a task anywhere. Ids are compared in `verify`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.input.ids import ID_MODULUS, OUTPUT_ENTRY, output_entries, sum_entries
from pipeline.schema import (
    CHOICE,
    ERROR_CODES,
    LOGPROBS,
    OUTPUT_SCHEMA,
    PROMPT,
    PROMPT_LOGPROBS,
    SAMPLE,
    SOURCE_ID,
    list_columns,
    type_words,
)

BATCH_ROWS = 4096
NUM_SHOWN = 20  # problems of each kind that are listed; the rest is counted
NEVER_NULL = tuple(name for name in OUTPUT_SCHEMA.names if name != PROMPT)


@dataclass
class Problems:
    """Problems by kind: their number, and the first ones in words."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, texts: Sequence[str], count: int | None = None) -> None:
        """`count`: how many there are, if more than `texts`."""
        number = len(texts) if count is None else count
        if number:
            self.counts[kind] = self.counts.get(kind, 0) + number
            shown = self.first.setdefault(kind, [])
            shown += texts[: NUM_SHOWN - len(shown)]

    def join(self, other: "Problems") -> None:
        for kind, count in other.counts.items():
            self.add(kind, other.first[kind], count)


@dataclass
class FilesFound:
    """The contents of a group of data files."""

    problems: Problems = field(default_factory=Problems)
    num_rows: dict[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"num_input_tokens": 0, "num_generated_tokens": 0})
    """Sums over good rows."""
    errors: dict[str, int] = field(default_factory=dict)
    num_documents: int | None = None
    """First samples; None where rows do not say which sample they are."""
    id_sum: int = 0
    """The sum of the ids (`ids.sum_outputs`)."""

    def join(self, other: "FilesFound") -> None:
        self.problems.join(other.problems)
        self.id_sum = (self.id_sum + other.id_sum) % ID_MODULUS
        if other.num_documents is not None:
            self.num_documents = (self.num_documents or 0) + other.num_documents
        for mine, theirs in (
            (self.num_rows, other.num_rows), (self.tokens, other.tokens), (self.errors, other.errors)
        ):  # fmt: skip
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value


def check_files(
    filesystem: pafs.FileSystem,
    files: Sequence[tuple[int, str]],
    columns: list[list[str]],
    scores: Collection[str] = (),
) -> tuple[FilesFound, NDArray[np.void]]:
    """Looks at data files (number and path); `columns`: names and types, `scores`: those of them that hold the run's
    own log-probabilities. Gives the entries of their rows too."""
    found, parts = FilesFound(), [np.empty(0, OUTPUT_ENTRY)]
    columns = [[name, type_words(text)] for name, text in columns]
    for number, path in files:
        try:
            with pq.ParquetFile(filesystem.open_input_file(path), page_checksum_verification=True) as file:
                own = list_columns(file.schema_arrow)
                if own != columns:
                    found.problems.add("schema", [f"{path}: columns {describe_columns(own, columns)}"])
                    continue
                parts += _check_rows(file, number, path, scores, found)
        except (OSError, pa.ArrowException) as error:
            found.problems.add("file", [f"{path}: not a whole Parquet file: {error}"])
    entries = np.concatenate(parts)
    found.id_sum = sum_entries(entries)
    return found, entries


def describe_columns(own: list[list[str]], wanted: list[list[str]]) -> str:
    """How the columns of a file differ from those of the run."""
    mine, theirs = ({(name, kind) for name, kind in columns} for columns in (own, wanted))
    if mine == theirs:
        return "are in another order"
    words = [("more", mine - theirs), ("missing", theirs - mine)]
    return "; ".join(f"{word}: {', '.join(f'{n} {k}' for n, k in sorted(some))}" for word, some in words if some)


def _check_rows(
    file: pq.ParquetFile, number: int, path: str, scores: Collection[str], found: FilesFound
) -> list[NDArray[np.void]]:
    status = "ok" if "/status=ok/" in path else "failed"
    parts, first = [], 0
    for batch in file.iter_batches(BATCH_ROWS):
        for reason, is_bad in contradictions(batch, status, scores):
            rows = np.flatnonzero(is_bad)
            shown = [
                f"{path} row {first + row + 1} (id {batch['id'][row].as_py()!r}): {reason}" for row in rows[:NUM_SHOWN]
            ]
            found.problems.add("row", shown, len(rows))
        if not batch["id"].null_count:
            parts.append(output_entries(batch, number, first))
        first += batch.num_rows
        found.num_rows[status] += batch.num_rows
        if SOURCE_ID in batch.schema.names and pa.field(SAMPLE, pa.int32()) in batch.schema:
            firsts = pc.sum(pc.equal(batch[SAMPLE], 0)).as_py() or 0
            found.num_documents = (found.num_documents or 0) + firsts
        if status == "ok":
            for name in found.tokens:
                found.tokens[name] += pc.sum(batch[name]).as_py() or 0
        for item in batch["error_code"].value_counts().to_pylist() if status == "failed" else []:
            found.errors[item["values"]] = found.errors.get(item["values"], 0) + item["counts"]
    return parts


def contradictions(batch: pa.RecordBatch, status: str, scores: Collection[str]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Reasons and which rows they hold for: bool [rows]. A row says something its status or another column denies.

    `scores`: without one of these names a column of log-probabilities is the corpus's own.
    """

    def where(condition: pa.Array) -> NDArray[np.bool_]:
        return np.asarray(pc.fill_null(condition, False))

    names = batch.schema.names
    checks = [(f"{name} is null", where(pc.is_null(batch[name]))) for name in NEVER_NULL]
    length = pc.list_value_length(batch["generated_tokens"])
    checks.append(
        ("num_generated_tokens is not their number", where(pc.not_equal(batch["num_generated_tokens"], length)))
    )
    known = pa.array(["stop", "length", "repetition"] if status == "ok" else ["error"])
    checks.append(
        (f"finish_reason of a row that is {status}", where(pc.invert(pc.is_in(batch["finish_reason"], known))))
    )
    if status == "ok":
        checks.append(("error_code of a good row", where(pc.not_equal(batch["error_code"], ""))))
        checks.append(("error_message of a good row", where(pc.not_equal(batch["error_message"], ""))))
        is_bare = pc.equal(length, 0)
        alone = ({PROMPT_LOGPROBS} & {*scores}) | (
            {CHOICE} & {*names}
        )  # a prompt that was scored, or given back, alone
        for name in alone:
            is_bare = pc.and_(is_bare, pc.is_null(batch[name]))
        checks.append(("no token in a good row", where(is_bare)))
        for name, count in ((LOGPROBS, "num_generated_tokens"), (PROMPT_LOGPROBS, "num_input_tokens")):
            if name in scores:
                is_other = pc.not_equal(pc.list_value_length(batch[name]), batch[count])
                checks.append((f"{name} are not one for each token", where(pc.fill_null(is_other, True))))
        checks.append(("prompt is null in a good row", where(pc.is_null(batch[PROMPT]))))
    else:
        is_known = pc.is_in(batch["error_code"], pa.array(sorted(ERROR_CODES)))
        checks.append(("error_code is none of ours", where(pc.invert(is_known))))
        checks.append(("no error_message in a failed row", where(pc.equal(batch["error_message"], ""))))
        checks.append(("tokens in a failed row", where(pc.greater(length, 0))))
    return checks
