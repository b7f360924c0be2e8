"""The input as a Ray Data source: one read task per file, each streaming its blocks.

The only module here that imports Ray, so that the others run and are tested without it. A read task carries object
references, an index and the configuration, so that a plan of 10^5 files is stored once and not once per task. A large
file is not cut into several tasks.
"""

from collections.abc import Callable, Iterator

import pyarrow as pa
import ray
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from pipeline.config.job import InputConfig
from pipeline.input.id_matching import DoneRows
from pipeline.input.input_plan import InputPlan
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_rest


class CorpusDatasource(Datasource):  # type: ignore[misc]
    """`ray.data.read_datasource(CorpusDatasource(plan, config))`: all rows of `plan` except those in `done`.

    Needs a running Ray. Ray joins the blocks of a task up to `DataContext.target_max_block_size` (128 MiB):
    repartition by rows afterwards if smaller blocks are wanted.
    """

    def __init__(
        self,
        plan: InputPlan,
        config: InputConfig,
        done: DoneRows | None = None,
        prompter: Prompter | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`prepare`: called at the start of each read task, in its process."""
        super().__init__()
        self._prepare = prepare
        self._num_rows = plan.num_rows_per_file
        self._num_left = self._num_rows if done is None else tuple(self._num_rows - done.num_rows_per_file)
        sizes = zip(plan.num_bytes_per_file, plan.num_rows_per_file, plan.num_documents_per_file, strict=True)
        self._num_bytes = tuple(size * rows // max(documents, 1) for size, rows, documents in sizes)
        self._paths = tuple(file.path for file in plan.listing.files)
        self._schema = plan.schema
        self._config = config
        self._plan = ray.put(plan)
        self._done = None if done is None else ray.put(done)
        self._prompter = ray.put(prompter)

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(self._num_bytes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """A read task per file that has rows left; `parallelism` is ignored."""
        return [
            ReadTask(
                _reader(self._plan, self._done, self._prompter, index, self._config, self._prepare),
                BlockMetadata(
                    num_rows=int(num_left),
                    # Ray takes 0 for an empty dataset
                    size_bytes=max(self._num_bytes[index] * int(num_left) // self._num_rows[index], 1),
                    input_files=(self._paths[index],),
                    exec_stats=None,
                ),
                schema=self._schema,
                per_task_row_limit=per_task_row_limit,
            )
            for index, num_left in enumerate(self._num_left)
            if num_left
        ]


def _reader(
    plan: "ray.ObjectRef[InputPlan]",
    done: "ray.ObjectRef[DoneRows] | None",
    prompter: "ray.ObjectRef[Prompter | None]",
    index: int,
    config: InputConfig,
    prepare: Callable[[], None] | None,
) -> Callable[[], Iterator[pa.Table]]:
    """The read function of a task, which captures references and not the datasource."""

    def read_corpus_file() -> Iterator[pa.Table]:
        if prepare is not None:
            prepare()
        yield from read_rest(ray.get(plan), None if done is None else ray.get(done), index, config, ray.get(prompter))

    return read_corpus_file
