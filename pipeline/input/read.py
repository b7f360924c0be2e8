"""Streams one file of a plan as blocks of rows with the columns of the plan. Knows nothing of Ray (`datasource`)."""

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config.job import InputConfig
from pipeline.input.arrow_files import arrow_batches, open_arrow, stored_schema
from pipeline.input.columns import (
    bad_text,
    cast_plain,
    cast_views,
    parquet_ids,
    python_values,
    to_text,
    without_invalid_utf8,
)
from pipeline.input.expansion import Documents, Expansion, expand
from pipeline.input.files import SourceFile, open_stream
from pipeline.input.formats import ARROW, BINARY, iter_rows
from pipeline.input.id_matching import DoneRows
from pipeline.input.ids import Mask, RowNames, Rows, already_used, describe_location, made_id, split_location
from pipeline.input.input_plan import ROW_SCHEMA, InputPlan
from pipeline.input.json_rows import to_json
from pipeline.input.line_reader import BLOCK_BYTES, InputRow, RowError
from pipeline.input.memory_limits import block_cuts, own_rows, parquet_batches, row_sizes, without_oversized_rows
from pipeline.input.prompt_templates import PromptMaker, prompt_columns, prompt_fields
from pipeline.input.row_parameters import arrow_parameters, row_parameters
from pipeline.schema import BAD_LINE, BAD_PARAMETERS, DUPLICATE_ID, ID, PROMPT_MISSING, PROMPT_TOKENS

READ_ROWS = 16384  # of Parquet at a time, while dictionaries stay encoded

Blocks = Generator[Documents, None, None]


def read_rest(
    plan: InputPlan, done: DoneRows | None, index: int, config: InputConfig, prompter: PromptMaker | None = None
) -> Iterator[pa.Table]:
    """The rows of file `index` that are not done."""
    is_done = None if done is None else done.of_file(index, plan.num_rows_per_file[index])
    first = 0
    for block in read_file(plan, index, config, prompter=prompter, is_done=is_done):
        rest = block if is_done is None else block.filter(pa.array(~is_done[first : first + len(block)]))
        first += len(block)
        if len(rest):
            yield rest


def read_file(
    plan: InputPlan,
    index: int,
    config: InputConfig,
    rows_per_block: int = 1024,
    prompter: PromptMaker | None = None,
    is_done: Mask | None = None,
) -> Generator[pa.Table, None, None]:
    """The rows of file `index` as blocks of `plan.schema`, of up to `rows_per_block` rows and about 32 MiB.

    `prompter` renders prompts, but not for rows that are done (bool [rows]). Raises RuntimeError if the file is not the
    one that was scanned, since with other rows the books would not close.
    """
    file, expansion = plan.listing.files[index], plan.listing.expansion
    wanted = plan.num_documents_per_file[index]
    _check_unchanged(plan.listing.filesystem, file)
    reader = _read_batches if plan.listing.format in BINARY else _read_rows
    done = num_rows = 0
    try:
        with closing(reader(plan, index, config, rows_per_block)) as blocks:
            while done < wanted and (documents := next(blocks, None)) is not None:
                documents = documents[: wanted - done]
                done += len(documents.table)
                mask = None if is_done is None else is_done[num_rows:]
                for block in expand(documents, expansion, plan.schema, prompter, mask, rows_per_block):
                    yield _mark_duplicates(block, num_rows, plan, index)
                    num_rows += len(block)
    except (OSError, pa.ArrowException) as error:
        raise RuntimeError(f"input file {file.path}: cannot be read after row {done}: {error}") from error
    found, expected = (done, num_rows), (wanted, plan.num_rows_per_file[index])
    if found != expected:
        raise RuntimeError(f"input file {file.path}: {found} documents and rows now, {expected} when it was scanned")


def _check_unchanged(filesystem: pafs.FileSystem, file: SourceFile) -> None:
    info = filesystem.get_file_info(file.path)
    if (info.size, info.mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise RuntimeError(f"input file {file.path}: changed or removed since it was scanned; start again")


def _read_rows(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file, wanted = plan.listing.files[index], plan.num_documents_per_file[index]
    with open_stream(plan.listing.filesystem, file) as stream:
        block: list[InputRow] = []
        num_bytes = 0
        listing = plan.listing
        rows = iter_rows(stream, file.name, listing.format, config, listing.max_line_bytes, listing.expansion)
        for row in islice(rows, wanted):
            if config.sampling_column is not None and not row.error_code:
                set_parameters(row, config.sampling_column, listing.expansion, name_of(row, file, listing.format))
            block.append(row)
            num_bytes += row.num_bytes
            if len(block) == rows_per_block or num_bytes >= BLOCK_BYTES:
                yield _documents(block, file, plan)
                block, num_bytes = [], 0
        if block:
            yield _documents(block, file, plan)


def _documents(rows: Sequence[InputRow], file: SourceFile, plan: InputPlan) -> Documents:
    columns = [
        [row.id or made_id(file.name, row.number) for row in rows],
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
    schema, format = plan.document_schema, plan.listing.format
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
    return Documents(
        pa.Table.from_arrays(arrays, schema=schema),
        num_bytes=[row.num_bytes for row in rows],
        locations=[name_of(row, file, format) for row in rows],
        fields=[prompt_fields(row, format) for row in rows],
        samples=[row.samples for row in rows] if format == "openai_batch" else (),
    )


def name_of(row: InputRow, file: SourceFile, format: str) -> str:
    """Where the row is, for messages."""
    return f"{file.name} {'row' if format == 'csv' else 'line'} {row.number + 1}"


def set_parameters(row: InputRow, column: str, expansion: Expansion, location: str) -> None:
    """Takes the row's sampling parameters from a column, or marks it as failed."""
    try:
        row.sampling = row_parameters(row.fields.get(column), expansion)
    except RowError as error:
        row.fail(error.code, f"{location}: column {column!r} {error.reason}")


def _read_batches(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    """The documents of a Parquet or Arrow file."""
    listing, file, limit = plan.listing, plan.listing.files[index], plan.listing.max_line_bytes
    with ExitStack() as stack:
        if listing.format == ARROW:
            schema, stored = stack.enter_context(open_arrow(listing.filesystem, file))
            batches = arrow_batches(stored, stored_schema(schema, file), rows_per_block)
        else:
            source = listing.filesystem.open_input_file(file.path)
            batches = parquet_batches(source, stack.enter_context(pq.ParquetFile(source)), READ_ROWS)
        first = 0
        for whole in batches:
            batch, is_oversized = without_oversized_rows(cast_views(whole), limit, config.id_column)
            sizes = row_sizes(batch)
            for start, end in itertools.pairwise(block_cuts(sizes, BLOCK_BYTES, rows_per_block)):
                errors = _Errors(end - start, file.name, first + start)
                reason = f"its values hold more bytes than limits.max_line_bytes allows ({limit})"
                errors.set(is_oversized[start:end], BAD_LINE, reason)
                part = own_rows(batch, start, end)
                yield _from_batch(part, sizes[start:end], file, first + start, plan, config, errors)
            first += batch.num_rows


def _from_batch(
    batch: pa.RecordBatch,
    sizes: Rows,
    file: SourceFile,
    first: int,
    plan: InputPlan,
    config: InputConfig,
    errors: "_Errors",
) -> Documents:
    count = batch.num_rows
    if config.id_column in batch.schema.names:
        ids, _, bad_ids = parquet_ids(batch.column(config.id_column), file, first)
        why = bad_text(batch.schema.field(config.id_column).type)
        errors.set(bad_ids, BAD_LINE, f"column {config.id_column!r} {why}")
    else:
        ids = pa.array([made_id(file.name, first + row) for row in range(count)], pa.string())
    prompts, bad_prompts = pa.nulls(count, pa.string()), np.zeros(count, bool)
    if config.text_column is not None:
        prompts, bad_prompts = to_text(batch.column(config.text_column))
        errors.set(bad_prompts, BAD_LINE, f"column {config.text_column!r} is not valid UTF-8")
    extras = []
    for field in plan.extra_schema:
        if field.name not in batch.schema.names:
            extras.append(pa.nulls(count, field.type))
            continue
        column, bad = without_invalid_utf8(cast_plain(batch.column(field.name), field.type))
        errors.set(bad, BAD_LINE, f"column {field.name!r} is not valid UTF-8")
        extras.append(column)
    source = config.text_column or config.messages_column
    if source is not None:
        column = batch.column(source) if config.text_column is None else prompts
        missing = np.asarray(column.is_null()) & ~bad_prompts
        errors.set(missing, PROMPT_MISSING, f"column {source!r} is null")
    fields = _prompt_fields(batch, config, errors)
    own = _parameters(batch, config.sampling_column, plan.listing.expansion, errors)
    columns = [ids, prompts, pa.nulls(count, ROW_SCHEMA.field(PROMPT_TOKENS).type), own, *errors.columns(), *extras]
    return Documents(
        pa.Table.from_arrays(columns, schema=plan.document_schema),
        num_bytes=sizes.tolist(),
        locations=RowNames(file.name, range(first, first + count)),
        fields=fields,
        samples=(),
    )


def _parameters(batch: pa.RecordBatch, column: str | None, expansion: Expansion, errors: "_Errors") -> pa.Array:
    """The rows' own sampling parameters as JSON, null where they have none."""
    own: list[str | None] = [None] * batch.num_rows
    if column is None or column not in batch.schema.names:
        return pa.array(own, pa.string())
    values, bad = python_values(batch.select([column]))
    for row, value in enumerate(values):
        try:
            own[row] = arrow_parameters(value.get(column), expansion)
        except RowError as error:
            errors.set(np.arange(batch.num_rows) == row, error.code, f"column {column!r} {error.reason}")
    for row, reason in bad.items():
        errors.set(np.arange(batch.num_rows) == row, BAD_PARAMETERS, f"column {column!r} cannot be read: {reason}")
    return pa.array(own, pa.string())


def _prompt_fields(batch: pa.RecordBatch, config: InputConfig, errors: "_Errors") -> Sequence[Mapping[str, object]]:
    """The columns that prompts are rendered from, as Python values by row; empty for rows that cannot be converted."""
    part = batch.select(prompt_columns(config, batch.schema.names))
    if not part.num_columns:
        return [{}] * batch.num_rows
    found, bad = python_values(part)
    for row, reason in bad.items():
        is_here = np.arange(batch.num_rows) == row
        errors.set(is_here, BAD_LINE, f"a column of the prompt cannot be read: {reason}")
    return found


class _Errors:
    """The error columns of a block that begins with row `first` of a file; the first reason of a row stays."""

    def __init__(self, count: int, name: str, first: int) -> None:
        self._names = RowNames(name, range(first, first + count))
        self._found: dict[int, tuple[str, str]] = {}

    def set(self, mask: Mask, code: str, reason: str) -> None:
        for row in np.flatnonzero(mask).tolist():
            self._found.setdefault(row, (code, f"{self._names[row]}: {reason}"))

    def columns(self) -> list[pa.Array]:
        nothing = pa.repeat(pa.scalar(""), len(self._names))
        if not self._found:
            return [nothing, nothing]
        rows = [self._found.get(row, ("", "")) for row in range(len(nothing))]
        return [pa.array(values, pa.string()) for values in zip(*rows, strict=True)]


def _mark_duplicates(block: pa.Table, first: int, plan: InputPlan, index: int) -> pa.Table:
    """Marks rows whose id an earlier row has. The id belongs to that one, whatever else is wrong with the later
    ones."""
    rows = plan.duplicates[index]
    low, high = np.searchsorted(rows, [first, first + len(block)])
    if low == high:
        return block
    codes, messages = block["error_code"].to_pylist(), block["error_message"].to_pylist()
    is_expanded = plan.num_rows_per_file != plan.num_documents_per_file
    counted = " (counting a row for each template and sample)" if is_expanded else ""
    for row, origin in zip(rows[low:high], plan.duplicate_of[index][low:high], strict=True):
        at = int(row) - first
        here = describe_location(plan.listing.files[index].name, int(row))
        used = f"{here}{already_used(block[ID][at].as_py())}{_describe_row(plan, int(origin))}{counted}"
        codes[at], messages[at] = DUPLICATE_ID, f"{used}; {codes[at]}: {messages[at]}" if codes[at] else used
    for column, values in (("error_code", codes), ("error_message", messages)):
        position = block.schema.get_field_index(column)
        block = block.set_column(position, ROW_SCHEMA.field(column), pa.array(values, pa.string()))
    return block


def _describe_row(plan: InputPlan, location: int) -> str:
    file, row = split_location(location)
    return describe_location(plan.listing.files[file].name, row)
