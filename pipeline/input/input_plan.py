"""The scans of all files -> `InputPlan`: one schema, the limit, and which rows have the id of an earlier one.

Opens no file. Duplicate ids are found in `id_matching`; rows that are done already are skipped in `read`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.config.job import ConfigError, InputConfig
from pipeline.formatting import count
from pipeline.input.arrow_types import Merge, final_json_type, merge_json_leaf, merge_parquet_leaf, merge_types
from pipeline.input.columns import check_chosen_id, check_source
from pipeline.input.files import Listing
from pipeline.input.ids import ROW_BITS, Locations, Rows
from pipeline.input.openai_rows import WANTED_URL
from pipeline.input.prompt_templates import check_format, check_templates, reads_column
from pipeline.input.row_parameters import ROW_KEYS, check_sampling_column
from pipeline.input.scan import FileScan
from pipeline.schema import ID, PROMPT, PROMPT_TOKENS, SAMPLING, SOURCE_SCHEMA

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field(ID, pa.string()),
        pa.field(PROMPT, pa.string()),
        pa.field(PROMPT_TOKENS, pa.list_(pa.int32())),
        pa.field(SAMPLING, pa.string()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)
"""The columns of every row that is read, in order; the other columns of the input follow."""


@dataclass(frozen=True, eq=False)
class InputPlan:
    """Everything that a reader of any file has to know. The same input and configuration give the same plan."""

    listing: Listing
    num_documents_per_file: tuple[int, ...]  # after `input.limit`
    num_rows_per_file: tuple[int, ...]  # output rows that these become
    etags: tuple[str | None, ...]  # per file
    num_bytes_per_file: tuple[int, ...]  # about what the documents take in memory
    has_sources: bool  # whether rows say which document they come from
    has_choices: bool  # whether some batch line asks for more than text
    extra_schema: pa.Schema
    json_columns: frozenset[str]
    duplicates: tuple[Rows, ...]  # per file, sorted
    duplicate_of: tuple[Locations, ...]  # per file: the first row with that id

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_file)

    @property
    def num_documents(self) -> int:
        return sum(self.num_documents_per_file)

    @property
    def num_duplicates(self) -> int:
        return sum(map(len, self.duplicates))

    @property
    def schema(self) -> pa.Schema:
        """The schema of every block that `read_file` yields."""
        return pa.schema([*ROW_SCHEMA, *self.carried_schema])

    @property
    def document_schema(self) -> pa.Schema:
        """The schema of a block before its documents become output rows."""
        return pa.schema([*ROW_SCHEMA, *self.extra_schema])

    @property
    def carried_schema(self) -> pa.Schema:
        """The columns that go to the output as they are read."""
        return pa.schema([*(SOURCE_SCHEMA if self.has_sources else ()), *self.extra_schema])

    def describe(self) -> str:
        """The number of rows in words, and that of documents where it differs."""
        rows = count(self.num_rows, "row")
        return f"{count(self.num_documents, 'document')}, {rows}" if self.has_sources else rows

    def with_duplicates(self, rows: Locations, firsts: Locations) -> "InputPlan":
        """The plan with these rows marked as duplicates of `firsts`; both are given by their `location`."""
        order = np.argsort(rows)
        files = (rows[order] >> ROW_BITS).astype(np.int64)
        cuts = np.searchsorted(files, np.arange(1, len(self.num_rows_per_file)))
        local = (rows[order] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return replace(self, duplicates=tuple(np.split(local, cuts)), duplicate_of=tuple(np.split(firsts[order], cuts)))


SAMPLING_NAMES: Final = ROW_KEYS | {"max_tokens", "max_completion_tokens", "min_tokens", "sampling_params"}
PARTITION: Final = re.compile(r"([^=]+)=.+")
"""The name of a folder that stands for a column and its value."""


def columns_of(scans: Sequence[FileScan], format: str) -> set[str]:
    """The columns of all files, by the names that templates use for them."""
    return {name for scan in scans for name in scan.columns} | ({PROMPT} if format == "text" else set())


def unused_sampling(columns: Collection[str], format: str, config: InputConfig) -> str | None:
    """A remark on columns with the names of sampling parameters, which are carried through and do not sample."""
    used = {config.sampling_column, config.text_column, config.messages_column}
    names = sorted(name for name in SAMPLING_NAMES & set(columns) - used if not reads_column(config, name))
    if format == "openai_batch" or not names:
        return None
    listed, verb = ", ".join(names), "does" if len(names) == 1 else "do"
    return (
        f"input: the column{'s' * (len(names) > 1)} {listed} {verb} not change how rows are sampled; "
        "input.sampling_column names a column with parameters of each row, a struct or JSON"
    )


def unread_partitions(listing: Listing, columns: Collection[str]) -> str | None:
    """A remark on folders that hold a column in their names, as Hive and Spark write them: it is not read."""
    folders = {part for file in listing.files for part in file.name.split("/")[:-1]}
    keys = {found[1]: found[0] for folder in sorted(folders, reverse=True) if (found := PARTITION.fullmatch(folder))}
    names = sorted(keys.keys() - set(columns))
    if not names:
        return None
    listed = ", ".join(names)
    return (
        f"input: the value of {listed} is in the names of folders alone (such as {keys[names[0]]}), which are not read "
        "as columns; write it into the files if templates or the output need it"
    )


def plan_input(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> InputPlan:
    """The plan for one scan per file, in the order of the listing; duplicates are not marked yet.

    A JSONL column whose values fit no single Arrow type becomes a string column with the JSON of every value. Parquet
    columns may differ in width between files, or be missing (null); anything else is a ConfigError.
    """
    assert tuple(scan.file for scan in scans) == listing.files, "scans and listing are not of the same files"
    if not any(scan.num_rows for scan in scans):
        raise ConfigError("input.path", f"no rows in {', '.join(config.path)}")
    _check_columns(listing, scans, config)
    schema, json_columns = _unify(listing.format, scans)
    left, documents = config.limit or sum(scan.num_documents for scan in scans), []
    for scan in scans:
        documents.append(min(scan.num_documents, left))
        left -= documents[-1]
    num_rows = [_rows_of(scan, wanted) for scan, wanted in zip(scans, documents, strict=True)]
    if max(num_rows) >= 2**32:
        raise ConfigError("input.path", f"a file becomes {max(num_rows)} rows; cut it, so that it has less than 2^32")
    return InputPlan(
        listing,
        num_documents_per_file=tuple(documents),
        num_rows_per_file=tuple(num_rows),
        etags=tuple(scan.etag for scan in scans),
        num_bytes_per_file=tuple(scan.num_bytes for scan in scans),
        has_sources=listing.expansion.is_on or sum(num_rows) > sum(documents),
        has_choices=any(scan.has_choices for scan in scans),
        extra_schema=schema,
        json_columns=json_columns,
        duplicates=tuple(np.empty(0, np.int64) for _ in scans),
        duplicate_of=tuple(np.empty(0, np.uint64) for _ in scans),
    )


def _rows_of(scan: FileScan, num_documents: int) -> int:
    """How many rows the first documents of a file become."""
    if num_documents == scan.num_documents:
        return scan.num_rows
    if scan.counts is not None:
        return int(scan.counts[:num_documents].sum())
    return scan.num_rows // scan.num_documents * num_documents


def _check_columns(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> None:
    kinds = {scan.is_batch: scan.file.path for scan in reversed(scans) if scan.is_batch is not None}
    if len(kinds) == 2:
        raise ConfigError(
            "input.path",
            f"{kinds[True]} holds OpenAI batch lines and {kinds[False]} does not; one run reads one format",
        )
    check_format(listing.format, config)
    if listing.format == "openai_batch":
        unknown = next((scan for scan in scans if scan.unknown_url is not None), None)
        if unknown is not None and not any(scan.num_requests for scan in scans):
            found = f"{unknown.unknown_url!r} in {unknown.file.path}"
            raise ConfigError("input.path", f"{WANTED_URL}; no line has one of these, the first is {found}")
        return
    names = {PROMPT} if listing.format == "text" else {name for scan in scans for name in scan.columns}
    if not names:
        error = next(scan.first_error for scan in scans if scan.num_rows)
        raise ConfigError(
            "input.path",
            f"no line is a JSON object; the first: {error}. "
            "JSON Lines needs one object per line (a JSON array: jq -c '.[]')",
        )
    check_templates(config, names)
    check_sampling_column(names, config)
    if listing.format == "text" and config.messages_column is None:
        return
    check_source(names, "the input", config)
    check_chosen_id(names, "the input", config)


def _unify(format: str, scans: Sequence[FileScan]) -> tuple[pa.Schema, frozenset[str]]:
    """The type of every column, and which columns are JSON text."""
    leaf: Merge = merge_json_leaf if format == "jsonl" else merge_parquet_leaf
    json_columns = {name for scan in scans for name in scan.json_columns}
    types: dict[str, pa.DataType] = {}
    seen_in: dict[str, str] = {}
    for scan in scans:
        for field in scan.extra_schema:
            both = merge_types(types.get(field.name, pa.null()), field.type, leaf)
            if both is None and format != "jsonl":
                raise ConfigError(
                    "input.path",
                    f"column {field.name!r} is {types[field.name]} in {seen_in[field.name]} "
                    f"and {field.type} in {scan.file.path}; give it one type, or run the files apart",
                )
            if both is None:
                json_columns.add(field.name)
            types[field.name] = pa.string() if both is None else both
            seen_in.setdefault(field.name, scan.file.path)
    if format == "jsonl":
        final = {name: final_json_type(type_) for name, type_ in types.items()}
        json_columns |= {name for name, type_ in final.items() if type_ is None}
        types = {name: pa.string() if name in json_columns else final[name] for name in types}
    return pa.schema(list(types.items())), frozenset(json_columns)
