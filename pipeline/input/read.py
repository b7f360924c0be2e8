"""One file of a plan -> blocks of rows with the columns of the plan, as a stream.

Left out: rows that are done already, and Ray (`source`).
"""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config import InputConfig
from pipeline.input.arrays import Mask
from pipeline.input.arrow_files import arrow_batches, open_arrow, stored_schema
from pipeline.input.files import SourceFile, open_stream
from pipeline.input.formats import ARROW, iter_rows
from pipeline.input.ids import already_used, describe_place, made_id, split_place
from pipeline.input.json_rows import to_json
from pipeline.input.parquet_columns import (
    block_cuts,
    encoded_columns,
    own_values,
    parquet_ids,
    plain_type,
    row_bytes,
    settle_views,
    to_text,
    without_bombs,
    without_invalid_utf8,
)
from pipeline.input.plan import ROW_SCHEMA, InputPlan
from pipeline.input.row import BLOCK_BYTES, Row
from pipeline.schema import BAD_LINE, DUPLICATE_ID, ID, PROMPT_MISSING, PROMPT_TOKENS, SAMPLING

Blocks = Generator[pa.Table, None, None]


def read_file(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int = 1024) -> Iterator[pa.Table]:
    """The rows of file `index` as blocks of `plan.schema`, of up to `rows_per_block` rows and about 32 MiB.

    Raises `RuntimeError` if the file is not the one that was scanned: with other rows the books cannot close.
    """
    file = plan.listing.files[index]
    wanted = plan.num_rows_per_file[index]
    _check_unchanged(plan.listing.filesystem, file)
    reader = {"parquet": _read_parquet, ARROW: _read_arrow}.get(plan.listing.format, _read_rows)
    done = 0
    try:
        with closing(reader(plan, index, config, rows_per_block)) as blocks:
            while done < wanted and (block := next(blocks, None)) is not None:
                block = _mark_duplicates(block[: wanted - done], done, plan, index)
                done += len(block)
                yield block
    except (OSError, pa.ArrowException) as error:
        raise RuntimeError(f"input file {file.path}: cannot be read after row {done}: {error}") from error
    if done != wanted:
        raise RuntimeError(f"input file {file.path}: {done} rows now, {wanted} when it was scanned")


def _check_unchanged(filesystem: pafs.FileSystem, file: SourceFile) -> None:
    info = filesystem.get_file_info(file.path)
    if (info.size, info.mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise RuntimeError(f"input file {file.path}: changed or removed since it was scanned; start again")


def _read_rows(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file, wanted = plan.listing.files[index], plan.num_rows_per_file[index]
    with open_stream(plan.listing.filesystem, file) as stream:
        block: list[Row] = []
        num_bytes = 0
        rows = iter_rows(stream, file.name, plan.listing.format, config, plan.listing.max_line_bytes)
        for row in islice(rows, wanted):
            block.append(row)
            num_bytes += row.num_bytes
            if len(block) == rows_per_block or num_bytes >= BLOCK_BYTES:
                yield _to_table(block, file, plan)
                block, num_bytes = [], 0
        if block:
            yield _to_table(block, file, plan)


def _to_table(rows: Sequence[Row], file: SourceFile, plan: InputPlan) -> pa.Table:
    columns = [
        [row.id or made_id(file, row.number) for row in rows],
        [row.prompt for row in rows],
        [row.tokens for row in rows],
        [row.sampling for row in rows],
        [row.error_code for row in rows],
        [row.error_message for row in rows],
    ]
    for name in plan.extra_schema.names:
        values = [row.fields.get(name) for row in rows]
        if name in plan.json_columns:
            values = [None if value is None else to_json(value) for value in values]
        columns.append(values)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, plan.schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=plan.schema)


def _read_parquet(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file = plan.listing.files[index]
    source = plan.listing.filesystem.open_input_file(file.path)
    with pq.ParquetFile(source) as footer:
        metadata, encoded = footer.metadata, encoded_columns(footer)
        batch_rows = max(1, min(rows_per_block, BLOCK_BYTES // max(row_bytes(metadata), 1)))
        # text stays encoded until it is known how much of it there is: a dictionary of one value may stand for a
        # thousand of them
        with pq.ParquetFile(
            source, metadata=metadata, page_checksum_verification=True, read_dictionary=encoded
        ) as parquet:
            yield from _from_batches(parquet.iter_batches(batch_rows), file, plan, config)


def _read_arrow(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file = plan.listing.files[index]
    with open_arrow(plan.listing.filesystem, file) as reader:
        batches = arrow_batches(reader, stored_schema(reader.schema, file), rows_per_block)
        yield from _from_batches(batches, file, plan, config)


def _from_batches(batches: Iterable[pa.RecordBatch], file: SourceFile, plan: InputPlan, config: InputConfig) -> Blocks:
    first, limit = 0, plan.listing.max_line_bytes
    for whole in batches:
        batch, bad = without_bombs(settle_views(whole), limit)
        for start, end in itertools.pairwise(block_cuts(batch, BLOCK_BYTES)):
            errors = _Errors(end - start, file.name, first + start)
            errors.set(bad[start:end], BAD_LINE, f"its lists hold more than limits.max_line_bytes ({limit})")
            part = batch[start:end]
            if part.num_rows < batch.num_rows:
                part = pa.RecordBatch.from_arrays(list(map(own_values, part.columns)), schema=part.schema)
            yield _from_batch(part, file, first + start, plan, config, errors)
        first += batch.num_rows


def _from_batch(
    batch: pa.RecordBatch, file: SourceFile, first: int, plan: InputPlan, config: InputConfig, errors: "_Errors"
) -> pa.Table:
    count = batch.num_rows
    if config.id_column in batch.schema.names:
        ids, _, bad_ids = parquet_ids(batch.column(config.id_column), file, first)
        errors.set(bad_ids, BAD_LINE, f"column {config.id_column!r} is not valid UTF-8")
    else:
        ids = [made_id(file, first + row) for row in range(count)]
    prompts, bad_prompts = to_text(batch.column(config.prompt_column))
    errors.set(bad_prompts, BAD_LINE, f"column {config.prompt_column!r} is not valid UTF-8")
    extras = []
    for field in plan.extra_schema:
        if field.name not in batch.schema.names:
            extras.append(pa.nulls(count, field.type))
            continue
        plain = batch.column(field.name)
        plain = plain.cast(plain_type(plain.type)).cast(field.type)
        column, bad = without_invalid_utf8(plain)
        errors.set(bad, BAD_LINE, f"column {field.name!r} is not valid UTF-8")
        extras.append(column)
    missing = np.asarray(prompts.is_null()) & ~bad_prompts
    errors.set(missing, PROMPT_MISSING, f"column {config.prompt_column!r} is null")
    nothing = [pa.nulls(count, ROW_SCHEMA.field(name).type) for name in (PROMPT_TOKENS, SAMPLING)]
    return pa.Table.from_arrays(
        [pa.array(ids, pa.string()), prompts, *nothing, *errors.columns(), *extras], schema=plan.schema
    )


class _Errors:
    """`error_code` and `error_message` of a block that begins with row `first` of a file; the first reason stays."""

    def __init__(self, count: int, name: str, first: int) -> None:
        self._codes, self._messages = [""] * count, [""] * count
        self._name, self._first = name, first

    def set(self, mask: Mask, code: str, reason: str) -> None:
        for row in np.flatnonzero(mask):
            if not self._codes[row]:
                self._codes[row], self._messages[row] = code, f"{self._name} row {self._first + row + 1}: {reason}"

    def columns(self) -> list[pa.Array]:
        return [pa.array(self._codes, pa.string()), pa.array(self._messages, pa.string())]


def _mark_duplicates(block: pa.Table, first: int, plan: InputPlan, index: int) -> pa.Table:
    """An id belongs to its first row, whatever else is wrong with the later ones: so ids stay unique beside these."""
    rows = plan.duplicates[index]
    low, high = np.searchsorted(rows, [first, first + len(block)])
    if low == high:
        return block
    codes, messages = block["error_code"].to_pylist(), block["error_message"].to_pylist()
    for row, origin in zip(rows[low:high], plan.duplicate_of[index][low:high], strict=True):
        at = int(row) - first
        here = describe_place(plan.listing.files[index].name, int(row))
        used = f"{here}{already_used(block[ID][at].as_py())}{_describe_row(plan, int(origin))}"
        codes[at], messages[at] = DUPLICATE_ID, f"{used}; {codes[at]}: {messages[at]}" if codes[at] else used
    for column, values in (("error_code", codes), ("error_message", messages)):
        position = block.schema.get_field_index(column)
        block = block.set_column(position, ROW_SCHEMA.field(column), pa.array(values, pa.string()))
    return block


def _describe_row(plan: InputPlan, place: int) -> str:
    file, row = split_place(place)
    return describe_place(plan.listing.files[file].name, row)
