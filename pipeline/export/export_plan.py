"""Options of an export, checked against the run folder and the target before anything is written."""

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config.job import ConfigError
from pipeline.export.hub import HUB_URI, HubTarget, open_hub
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.run_state import RunState

Format: TypeAlias = Literal["dataset", "jsonl", "parquet"]
Compression: TypeAlias = Literal["none", "gzip", "zstd"]
Rows: TypeAlias = Literal["good", "failed", "all"]
STATUSES_OF: Final[dict[Rows, tuple[str, ...]]] = {"good": ("ok",), "failed": ("failed",), "all": STATUSES}
ROWS_PER_FILE: Final = 100_000


@dataclass(frozen=True)
class Options:
    run: str
    target: str
    format: Format = "dataset"
    compression: Compression | None = None
    """None: zstd for Parquet, none for JSON Lines."""
    rows: Rows = "good"
    columns: tuple[str, ...] | None = None
    """None: all of them."""
    rows_per_file: int = ROWS_PER_FILE
    is_partial: bool = False
    """Whether to export the rows that an unfinished run has so far."""


@dataclass(frozen=True)
class ExportPlan:
    options: Options
    folder: RunFolder
    state: RunState
    files: Sequence[str]
    """Data files, in order."""
    schema: pa.Schema
    """The columns that are exported, in order."""
    num_rows: int
    target: RunFolder | HubTarget
    """The folder to write; empty or missing."""

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.options.rows_per_file)


def plan_export(options: Options) -> ExportPlan:
    """Checks the options; ConfigError."""
    if options.rows_per_file < 1:
        raise ConfigError("--rows-per-file", f"{options.rows_per_file} rows; give 1 or more")
    folder = RunFolder.open(options.run)
    state = folder.read_state()
    if state is None:
        raise ConfigError("", f"{folder.shown}: not a run folder (it has no run.json)")
    _check_state(folder, state, options)
    target = _open_target(options, folder)
    files = folder.run_files(state, STATUSES_OF[options.rows])
    num_rows = sum(pq.read_metadata(path, filesystem=folder.filesystem).num_rows for path in files)
    if not num_rows:
        raise ConfigError("", f"{folder.shown} holds no {'' if options.rows == 'all' else options.rows + ' '}rows")
    schema = pq.read_schema(files[0], filesystem=folder.filesystem).remove_metadata()
    schema = _pick(schema, options.columns)
    if options.format == "dataset":
        schema = pa.schema([field.with_type(_without_maps(field.type)) for field in schema])
    return ExportPlan(options, folder, state, files, schema, num_rows, target)


def _check_state(folder: RunFolder, state: RunState, options: Options) -> None:
    phase = state["state"]
    if phase in ("committing", "retrying"):
        raise ConfigError(
            "", f"{folder.shown}: a retry was interrupted; finish it first: skipdecode retry {folder.shown}"
        )
    if phase != "finished" and not options.is_partial:
        raise ConfigError(
            "",
            f"{folder.shown}: the run is {phase}; finish it (generate --resume), or export what it has (--partial)",
        )


def _open_target(options: Options, run: RunFolder) -> RunFolder | HubTarget:
    if options.target.startswith(HUB_URI):
        return open_hub(options.target)
    target = RunFolder.open(options.target)
    kind = target.filesystem.get_file_info(target.root).type
    selector = pafs.FileSelector(target.root, allow_not_found=True)
    if kind == pafs.FileType.File or (kind == pafs.FileType.Directory and target.filesystem.get_file_info(selector)):
        raise ConfigError("--output", f"{target.shown} exists already; name another folder, or remove it")
    if target.filesystem.equals(run.filesystem) and f"{_real(target)}/".startswith(f"{_real(run)}/"):
        raise ConfigError("--output", f"{target.shown} lies in the run folder; name a folder elsewhere")
    return target


def _real(folder: RunFolder) -> str:
    """The path, without symbolic links if it is local."""
    return os.path.realpath(folder.root) if folder.is_local else folder.root


def _pick(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    if unknown := [name for name in columns if name not in schema.names]:
        raise ConfigError("--columns", f"no column {unknown[0]!r}; there are: {', '.join(schema.names)}")
    if len(set(columns)) < len(columns) or not columns:
        raise ConfigError("--columns", f"{','.join(columns)!r}: name each column once, and at least one")
    return pa.schema([schema.field(name) for name in columns])


def _without_maps(type_: pa.DataType) -> pa.DataType:
    """The type with maps as lists of keys and values, since `datasets` has no maps."""
    if pa.types.is_map(type_):
        parts = (("key", type_.key_type), ("value", type_.item_type))
        return pa.list_(pa.struct([(name, _without_maps(part)) for name, part in parts]))
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_without_maps(type_.value_type)))
    if pa.types.is_large_list(type_):
        return pa.large_list(type_.value_field.with_type(_without_maps(type_.value_type)))
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(type_.value_field.with_type(_without_maps(type_.value_type)), type_.list_size)
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(_without_maps(child.type)) for child in type_])
    return type_


def shard_name(plan: ExportPlan, shard: int) -> str:
    """The path of a file in the target; a data set's are named as the hub expects."""
    number = f"{shard:05d}-of-{plan.num_shards:05d}"
    if plan.options.format == "dataset":
        return posixpath.join("data", f"train-{number}.parquet")
    if plan.options.format == "parquet":
        return f"part-{number}.parquet"
    suffix: dict[str | None, str] = {"gzip": ".gz", "zstd": ".zst"}
    return f"part-{number}.jsonl{suffix.get(plan.options.compression, '')}"
