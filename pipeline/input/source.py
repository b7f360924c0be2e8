"""The normalised input as a Ray Data source: one read task per file, each streaming its blocks.

The only module here that imports Ray, so that the others run and are tested without it. A read task carries two
object references, an index and the config, so that a plan of 10^5 files is stored once and not once per task.
Left out: cutting one large file into several tasks; give the corpus in files.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from pipeline.config import InputConfig
from pipeline.input.ids import DIGEST, row_digests
from pipeline.input.plan import InputPlan
from pipeline.input.read import read_file


class CorpusDatasource(Datasource):  # type: ignore[misc]
    """`ray.data.read_datasource(CorpusDatasource(plan, config))`: all rows of `plan`.

    `skip_digests`: sorted 'S16' array of the `row_digests` that are done already; those rows are left out.
    Needs a running Ray. Ray joins the blocks of a task up to `DataContext.target_max_block_size` (128 MiB):
    repartition by rows behind it where smaller blocks are wanted.
    """

    def __init__(self, plan: InputPlan, config: InputConfig, skip_digests: np.ndarray[Any, Any] | None = None) -> None:
        super().__init__()
        if skip_digests is not None and (skip_digests.dtype != DIGEST or (skip_digests[1:] < skip_digests[:-1]).any()):
            raise ValueError(f"skip_digests: expected a sorted array of {DIGEST}, got {skip_digests.dtype}")
        self._num_rows = plan.num_rows_per_file
        self._num_bytes = plan.num_bytes_per_file
        self._paths = tuple(file.path for file in plan.listing.files)
        self._schema = plan.schema
        self._config = config
        self._plan = ray.put(plan)
        self._skip = None if skip_digests is None or not len(skip_digests) else ray.put(skip_digests)

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(self._num_bytes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One per file that has rows, whatever `parallelism` says."""
        return [
            ReadTask(
                _reader(self._plan, self._skip, index, self._config),
                BlockMetadata(
                    num_rows=num_rows if self._skip is None else None,
                    size_bytes=max(self._num_bytes[index], 1),  # Ray takes 0 for an empty dataset
                    input_files=(self._paths[index],),
                    exec_stats=None,
                ),
                schema=self._schema,
                per_task_row_limit=per_task_row_limit,
            )
            for index, num_rows in enumerate(self._num_rows)
            if num_rows
        ]


def _reader(plan: Any, skip: Any, index: int, config: InputConfig) -> Callable[[], Iterator[pa.Table]]:
    """A function that captures references only, not the datasource."""

    def read_corpus_file() -> Iterator[pa.Table]:
        yield from _read_rest(ray.get(plan), None if skip is None else ray.get(skip), index, config)

    return read_corpus_file


def _read_rest(
    plan: InputPlan, skip: np.ndarray[Any, Any] | None, index: int, config: InputConfig
) -> Iterator[pa.Table]:
    is_empty = True
    for block in read_file(plan, index, config):
        rest = block if skip is None else without_done(block, skip)
        if len(rest):
            is_empty = False
            yield rest
    if is_empty:
        yield plan.schema.empty_table()  # a task without a block would leave a dataset without columns


def without_done(block: pa.Table, skip_digests: np.ndarray[Any, Any]) -> pa.Table:
    """The rows of `block` whose digest is not among `skip_digests` (sorted, not empty)."""
    digests = row_digests(block)
    places = np.minimum(np.searchsorted(skip_digests, digests), len(skip_digests) - 1)
    return block.filter(pa.array(skip_digests[places] != digests))
