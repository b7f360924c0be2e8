"""What the tests of `pipeline.input` share: writers of files, and a reader that checks what holds for every input."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.expansion import Expansion
from pipeline.input.files import Listing, list_input
from pipeline.input.id_matching import match
from pipeline.input.ids import OUTPUT_ENTRY, input_entries
from pipeline.input.input_plan import InputPlan, plan_input
from pipeline.input.read import read_file
from pipeline.input.scan import scan_file
from pipeline.schema import ERROR_CODES

BASE = ["id", "prompt", "_prompt_tokens", "_sampling", "error_code", "error_message"]


def make_config(path: Any, **keys: Any) -> InputConfig:
    paths = path if isinstance(path, tuple) else (path,)
    return InputConfig(path=tuple(str(p) for p in paths), **keys)


def make_plan(config: InputConfig, expansion: Expansion | None = None) -> InputPlan:
    listing = list_input(config, expansion=expansion)
    # Through pickle, because scans run on other machines.
    scanned = [pickle.loads(pickle.dumps(scan_file(listing, i, config))) for i in range(len(listing.files))]
    plan: InputPlan = pickle.loads(pickle.dumps(plan_input(listing, [scan for scan, _ in scanned], config)))
    if not any(scan.has_own_ids for scan, _ in scanned):
        return plan
    found = match(input_rows(listing, config, plan), np.empty(0, OUTPUT_ENTRY), [file.name for file in listing.files])
    return plan.with_duplicates(found.duplicates, found.duplicate_of)


def input_rows(listing: Listing, config: InputConfig, plan: InputPlan) -> NDArray[Any]:
    """The entries of all rows of the plan."""
    digests = [scan_file(listing, index, config, index_all=True)[1] for index in range(len(listing.files))]
    cut = zip(digests, plan.num_rows_per_file, strict=True)
    return np.concatenate([input_entries(own[:count], index) for index, (own, count) in enumerate(cut)])


def read_table(path: Any, rows_per_block: int = 1024, **keys: Any) -> pa.Table:
    """All rows, after checking what holds for every input."""
    config = make_config(path, **keys)
    plan = make_plan(config)
    blocks: list[pa.Table] = []
    for index, wanted in enumerate(plan.num_rows_per_file):
        own = list(read_file(plan, index, config, rows_per_block))
        assert sum(map(len, own)) == wanted
        assert all(0 < len(block) <= rows_per_block for block in own)
        blocks += own
    table = pa.concat_tables(blocks)  # refuses blocks of another schema
    table.validate(full=True)
    assert table.schema == plan.schema
    assert table.column_names[:6] == BASE
    assert table.num_rows == plan.num_rows
    assert set(table["error_code"].to_pylist()) <= ERROR_CODES | {""}
    for code, message in zip(table["error_code"].to_pylist(), table["error_message"].to_pylist(), strict=True):
        assert (code == "") == (message == "")
    assert table["id"].null_count == 0
    assert "" not in table["id"].to_pylist()
    return table


def read_rows(path: Any, rows_per_block: int = 1024, **keys: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(path, rows_per_block, **keys).to_pylist()
    return rows


def refuse(path: Any, match: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        make_plan(make_config(path, **keys))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_jsonl(path: Path, rows: list[Any], **keys: Any) -> Path:
    return write(path, "".join(json.dumps(row, **keys) + "\n" for row in rows))


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]
