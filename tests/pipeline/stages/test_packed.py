"""A decoded window reaches its writer in one piece, however large it is. A real Ray Data pipeline."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.data import ActorPoolStrategy

from pipeline.cluster.pool import STAGE_CPUS
from pipeline.generate.execution import prepare
from pipeline.stages.packed_window import pack, unpack

ROWS = 8
LIGHT: dict[str, Any] = {"batch_format": "pyarrow", "num_cpus": STAGE_CPUS, "batch_size": None}


def window(first: int, row_bytes: int) -> pa.Table:
    return pa.table({"id": pa.array(range(first, first + ROWS)), "text": [os.urandom(row_bytes).hex()] * ROWS})


def test_packed_tables_are_unpacked() -> None:
    tables = [window(0, 10), window(8, 3)]
    packed = pa.concat_tables([pack(table) for table in tables])
    assert packed.num_rows == 2
    assert unpack(packed).equals(pa.concat_tables(tables))
    nothing = tables[0].slice(0, 0)
    assert unpack(pack(nothing)).schema == nothing.schema


class Decoding:
    """Answers of 24 MiB a window, in other places of it whenever it is asked."""

    def __call__(self, table: pa.Table) -> pa.Table:
        return pack(window(int(table["id"][0].as_py()) * ROWS, 3 << 19))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
@pytest.mark.slow
def test_a_window_of_more_bytes_than_a_block_has_is_not_cut(tmp_path: Path) -> None:
    """Unpacked it comes in pieces of 8 to 12 MiB."""
    prepare(keep_workers=False, no_progress_timeout_s=60)

    def written(table: pa.Table) -> pa.Table:
        whole = unpack(table)
        (tmp_path / f"{whole['id'][0]}-{whole.num_rows}").touch()
        return whole.select(["id"]).slice(0, 0)

    rows = ray.data.range(3, override_num_blocks=3)
    rows = rows.map_batches(Decoding, **LIGHT, compute=ActorPoolStrategy(size=1))
    for _ in rows.map_batches(written, **LIGHT).iter_batches():
        pytest.fail("a row came out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-8", "16-8", "8-8"]
