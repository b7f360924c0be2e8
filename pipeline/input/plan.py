"""All scans -> `InputPlan`: one schema for all files, the limit, and which ids occur twice.

Touches no file. Left out: skipping rows that an earlier run finished (`source`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config import ConfigError, InputConfig
from pipeline.input.arrow_types import Merge, final_json_type, merge_json_leaf, merge_parquet_leaf, merge_types
from pipeline.input.files import Listing
from pipeline.input.ids import digest_ids, made_id
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
    num_bytes_per_file: tuple[int, ...]  # of the rows in memory, about
    extra_schema: pa.Schema
    json_columns: frozenset[str]
    duplicates: tuple[NDArray[Any], ...]  # per file: int64, rows (0-based, blank lines not counted), sorted
    duplicate_of: tuple[NDArray[Any], ...]  # per file: int64, the first row with that id, counted over all files

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


def plan_input(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> InputPlan:
    """Puts the scans together, one per file in the order of the listing: columns, limit, duplicate ids.

    A JSONL column whose values fit no single Arrow type becomes a string column with JSON text for every
    value. Parquet columns may differ in width between files, or be missing (null); anything else is a
    `ConfigError`.
    """
    assert tuple(scan.file for scan in scans) == listing.files, "scans and listing are not of the same files"
    if not any(scan.num_rows for scan in scans):
        raise ConfigError(f"input.path: no rows in {', '.join(config.path)}")
    _check_columns(listing, scans, config)
    schema, json_columns = _unify(listing.format, scans)
    left, num_rows = config.limit or sum(scan.num_rows for scan in scans), []
    for scan in scans:
        num_rows.append(min(scan.num_rows, left))
        left -= num_rows[-1]
    duplicates, duplicate_of = _find_duplicates(scans, num_rows)
    return InputPlan(
        listing,
        num_rows_per_file=tuple(num_rows),
        num_bytes_per_file=tuple(scan.num_bytes for scan in scans),
        extra_schema=schema,
        json_columns=json_columns,
        duplicates=duplicates,
        duplicate_of=duplicate_of,
    )


def _check_columns(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> None:
    kinds = {scan.is_batch: scan.file.path for scan in reversed(scans) if scan.is_batch is not None}
    if len(kinds) == 2:
        raise ConfigError(
            f"input.path: {kinds[True]} holds OpenAI batch lines and {kinds[False]} does not; one run reads one format"
        )
    if listing.format in ("text", "openai_batch"):
        return
    names = {name for scan in scans for name in scan.extra_schema.names}
    if not any(scan.has_prompt for scan in scans):
        if not names and not any(scan.has_id for scan in scans):
            error = next(scan.first_error for scan in scans if scan.num_rows)
            raise ConfigError(
                f"input.path: no line is a JSON object; the first: {error}. "
                "JSON Lines needs one object per line (a JSON array: jq -c '.[]')"
            )
        names |= {config.id_column} if any(scan.has_id for scan in scans) else set()
        missing = unknown_columns(config.prompt_column, names)
        raise ConfigError(f"input.prompt_column: the input has {missing}")
    # "id" is only the default, and an input without ids is fine; a name that somebody chose is meant.
    is_chosen = config.id_column != InputConfig.model_fields["id_column"].default
    if is_chosen and not any(scan.has_id for scan in scans):
        missing = unknown_columns(config.id_column, names | {config.prompt_column})
        raise ConfigError(f"input.id_column: the input has {missing}")


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
                    f"input.path: column {field.name!r} is {types[field.name]} in {seen_in[field.name]} "
                    f"and {field.type} in {scan.file.path}; give it one type, or run the files apart"
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


def _find_duplicates(
    scans: Sequence[FileScan], num_rows: Sequence[int]
) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
    """Per file: rows whose id an earlier row has, and which row that is. Peak memory: 48 bytes per row."""
    none = tuple(np.empty(0, dtype=np.int64) for _ in scans)
    if all(scan.id_digests is None for scan in scans):
        return none, none  # made ids only: unique by construction
    digests = np.concatenate([_all_digests(scan)[:count] for scan, count in zip(scans, num_rows, strict=True)])
    order = np.argsort(digests, kind="stable")  # stable: of equal ids the earliest row comes first
    ranked = digests[order]
    is_first = np.ones(len(ranked), dtype=bool)
    is_first[1:] = ranked[1:] != ranked[:-1]
    if is_first.all():
        return none, none
    group_start = np.maximum.accumulate(np.where(is_first, np.arange(len(ranked)), 0))
    rows, first_rows = order[~is_first], order[group_start[~is_first]]
    by_row = np.argsort(rows)
    rows, first_rows = rows[by_row], first_rows[by_row]
    ends = np.cumsum(num_rows)
    cuts = np.searchsorted(rows, ends)[:-1]
    starts = ends - np.asarray(num_rows)
    local = tuple(part - start for part, start in zip(np.split(rows, cuts), starts, strict=True))
    return local, tuple(np.split(first_rows, cuts))


def _all_digests(scan: FileScan) -> NDArray[Any]:
    """With those of made ids: the user's own id in another file may look like one."""
    if scan.id_digests is not None:
        return scan.id_digests
    numbers = range(scan.num_rows) if scan.row_numbers is None else scan.row_numbers
    return digest_ids([made_id(scan.file, int(number)) for number in numbers])
