"""All scans -> `InputPlan`: one schema for all files, the limit, and room for the rows whose id occurs twice.

Touches no file. Left out: finding those rows (`match`) and skipping rows that an earlier run finished (`source`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.config import ConfigError, InputConfig
from pipeline.input.arrays import Places, Rows
from pipeline.input.arrow_types import Merge, final_json_type, merge_json_leaf, merge_parquet_leaf, merge_types
from pipeline.input.files import Listing
from pipeline.input.ids import ROW_BITS
from pipeline.input.scan import FileScan, unknown_columns
from pipeline.schema import ID, PROMPT, PROMPT_TOKENS, SAMPLING

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
"""The columns of every normalised row, in order; the input's other columns follow."""


@dataclass(frozen=True, eq=False)
class InputPlan:
    """Everything a reader of any file has to know; the same input and config give the same plan."""

    listing: Listing
    num_rows_per_file: tuple[int, ...]  # after `input.limit`
    etags: tuple[str | None, ...]  # per file
    num_bytes_per_file: tuple[int, ...]  # of the rows in memory, about
    extra_schema: pa.Schema
    json_columns: frozenset[str]
    duplicates: tuple[Rows, ...]  # per file, sorted
    duplicate_of: tuple[Places, ...]  # per file: the first row with that id

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_file)

    @property
    def num_duplicates(self) -> int:
        return sum(map(len, self.duplicates))

    @property
    def schema(self) -> pa.Schema:
        """Of every block that `read_file` yields."""
        return pa.schema([*ROW_SCHEMA, *self.extra_schema])

    def with_duplicates(self, rows: Places, firsts: Places) -> "InputPlan":
        """The plan with these rows (places) marked as having the id of `firsts` (places)."""
        order = np.argsort(rows)
        files = (rows[order] >> ROW_BITS).astype(np.int64)
        cuts = np.searchsorted(files, np.arange(1, len(self.num_rows_per_file)))
        local = (rows[order] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return replace(self, duplicates=tuple(np.split(local, cuts)), duplicate_of=tuple(np.split(firsts[order], cuts)))


def plan_input(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> InputPlan:
    """Puts the scans together, one per file in the order of the listing: columns and limit; no duplicates yet.

    A JSONL column whose values fit no single Arrow type becomes a string column with JSON text for every
    value. Parquet columns may differ in width between files, or be missing (null); anything else is a
    `ConfigError`.
    """
    assert tuple(scan.file for scan in scans) == listing.files, "scans and listing are not of the same files"
    if not any(scan.num_rows for scan in scans):
        raise ConfigError("input.path", f"no rows in {', '.join(config.path)}")
    _check_columns(listing, scans, config)
    schema, json_columns = _unify(listing.format, scans)
    left, num_rows = config.limit or sum(scan.num_rows for scan in scans), []
    for scan in scans:
        num_rows.append(min(scan.num_rows, left))
        left -= num_rows[-1]
    return InputPlan(
        listing,
        num_rows_per_file=tuple(num_rows),
        etags=tuple(scan.etag for scan in scans),
        num_bytes_per_file=tuple(scan.num_bytes for scan in scans),
        extra_schema=schema,
        json_columns=json_columns,
        duplicates=tuple(np.empty(0, np.int64) for _ in scans),
        duplicate_of=tuple(np.empty(0, np.uint64) for _ in scans),
    )


def _check_columns(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> None:
    kinds = {scan.is_batch: scan.file.path for scan in reversed(scans) if scan.is_batch is not None}
    if len(kinds) == 2:
        raise ConfigError(
            "input.path",
            f"{kinds[True]} holds OpenAI batch lines and {kinds[False]} does not; one run reads one format",
        )
    if listing.format in ("text", "openai_batch"):
        return
    names = {name for scan in scans for name in scan.extra_schema.names}
    if not any(scan.has_prompt for scan in scans):
        if not names and not any(scan.has_id for scan in scans):
            error = next(scan.first_error for scan in scans if scan.num_rows)
            raise ConfigError(
                "input.path",
                f"no line is a JSON object; the first: {error}. "
                "JSON Lines needs one object per line (a JSON array: jq -c '.[]')",
            )
        names |= {config.id_column} if any(scan.has_id for scan in scans) else set()
        missing = unknown_columns(config.prompt_column, names)
        raise ConfigError("input.prompt_column", f"the input has {missing}")
    # "id" is only the default, and an input without ids is fine; a name that somebody chose is meant.
    is_chosen = config.id_column != InputConfig.model_fields["id_column"].default
    if is_chosen and not any(scan.has_id for scan in scans):
        missing = unknown_columns(config.id_column, names | {config.prompt_column})
        raise ConfigError("input.id_column", f"the input has {missing}")


def _unify(format: str, scans: Sequence[FileScan]) -> tuple[pa.Schema, frozenset[str]]:
    """One type per column, and which columns are JSON text."""
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
