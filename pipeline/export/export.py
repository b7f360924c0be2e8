"""Exports the rows of a run, in order, into files of equal numbers of rows. Memory use is constant."""

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa

from pipeline.export.card import make_card
from pipeline.export.export_plan import ExportPlan, Options, plan_export, shard_name
from pipeline.export.shards import open_shard, read_parts
from pipeline.export.target import Destination, open_destination
from pipeline.formatting import Json, Log, count


def export(options: Options, log: Log) -> dict[str, Json]:
    """Runs an export. ConfigError: nothing was written; after any other error the target is removed."""
    plan = plan_export(options)
    _check_books(plan)
    log(f"{plan.folder.shown}: {count(plan.num_rows, 'row')} into {count(plan.num_shards, 'file')}")
    with open_destination(plan.target) as destination:
        written = write_shards(plan, destination)
        if written != plan.num_rows:
            raise RuntimeError(f"{plan.folder.shown}: read {written} rows, expected {plan.num_rows}; start again")
        if options.format == "dataset":
            with destination.file("README.md") as file:
                file.write(make_card(plan).encode())
    return {
        "output": plan.target.root,
        "run": plan.folder.root,
        "format": options.format,
        "rows": plan.num_rows,
        "files": plan.num_shards,
        "columns": list(plan.schema.names),
    }


def _check_books(plan: ExportPlan) -> None:
    books, rows = plan.state["books"], plan.options.rows
    expected = [books["ok"] if rows != "failed" else 0, books["failed"] if rows != "good" else 0]
    if plan.state["state"] == "finished" and plan.num_rows != sum(number or 0 for number in expected):
        raise RuntimeError(
            f"{plan.folder.shown}: the data files hold {plan.num_rows} such rows, but run.json says "
            f"{sum(number or 0 for number in expected)}; `skipdecode verify` tells which are missing"
        )


def write_shards(plan: ExportPlan, destination: Destination) -> int:
    """Writes all files; returns the number of rows."""
    written = 0
    rows = _Rows(read_parts(plan))
    with closing(rows):
        for number in range(plan.num_shards):
            with destination.file(shard_name(plan, number)) as sink:
                shard = open_shard(plan, sink)
                for part in rows.take(plan.options.rows_per_file):
                    shard.write(part)
                    written += part.num_rows
                shard.close()
        for part in rows.take(1):  # more than the plan counted
            written += part.num_rows
    return int(written)


class _Rows:
    """Batches, split where a file is full."""

    def __init__(self, parts: Iterator[pa.RecordBatch]) -> None:
        self._parts = parts
        self._rest: pa.RecordBatch | None = None

    def take(self, most: int) -> Iterator[pa.RecordBatch]:
        """The next `most` rows, or those that are left."""
        while most and (part := self._rest or next(self._parts, None)) is not None:
            own, rest = part[:most], part[most:]
            self._rest = rest if rest.num_rows else None
            most -= own.num_rows
            if own.num_rows:
                yield own

    def close(self) -> None:
        if close := getattr(self._parts, "close", None):
            close()
