"""Folders as `datasets.Dataset.save_to_disk` leaves them, written by hand; a slow test compares with the real one."""

import json
from pathlib import Path

import pyarrow as pa

BATCH_ROWS = 1000  # datasets.config.DEFAULT_MAX_BATCH_SIZE


def write_stream(path: Path, table: pa.Table, batch_rows: int = BATCH_ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def save_to_disk(folder: Path, table: pa.Table, num_shards: int = 1) -> Path:
    names = [f"data-{shard:05d}-of-{num_shards:05d}.arrow" for shard in range(num_shards)]
    rows = -(-table.num_rows // num_shards)
    for shard, name in enumerate(names):
        write_stream(folder / name, table.slice(shard * rows, rows))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "17b1f98415cc13be", "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": {}}, indent=2))
    return folder


def save_splits(folder: Path, **tables: pa.Table) -> Path:
    for name, table in tables.items():
        save_to_disk(folder / name, table)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(tables)}))
    return folder
