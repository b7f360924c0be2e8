"""What data files may say and what contradicts: without Ray."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from pipeline.generate.verify_files import check_files
from pipeline.input.ids import sum_outputs
from pipeline.schema import LOGPROBS, LOGPROBS_TYPE, OUTPUT_SCHEMA, PROMPT_LOGPROBS, list_columns

ROW: dict[str, Any] = {
    "id": "a", "prompt": "p", "generated_text": "t", "generated_tokens": [1, 2], "num_input_tokens": 3,
    "num_generated_tokens": 2, "finish_reason": "stop", "layers_run": 4, "ffns_run": 4, "error_code": "",
    "error_message": "",
}  # fmt: skip


def write(folder: Path, *rows: dict[str, Any]) -> tuple[list[tuple[int, str]], list[list[str]]]:
    """Two columns more than the output has."""
    scores = [pa.field(name, LOGPROBS_TYPE) for name in (LOGPROBS, PROMPT_LOGPROBS)]
    table = pa.Table.from_pylist(list(rows), schema=pa.schema([*OUTPUT_SCHEMA, *scores]))
    path = folder / "status=ok/part.parquet"
    path.parent.mkdir()
    pq.write_table(table, path)
    return [(0, str(path))], list_columns(table.schema)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5, 0.5], None])
def test_log_probabilities_of_the_corpus_are_its_own(tmp_path: Path, values: list[float] | None) -> None:
    files, columns = write(tmp_path, ROW | {LOGPROBS: values, PROMPT_LOGPROBS: values})
    found, _ = check_files(pafs.LocalFileSystem(), files, columns)
    assert not found.problems.counts
    found, _ = check_files(pafs.LocalFileSystem(), files, columns, [LOGPROBS, PROMPT_LOGPROBS])
    assert found.problems.counts == {"row": 2}, "in a run that makes them there is one for each token"


def test_a_row_without_tokens_is_good_where_its_prompt_was_scored(tmp_path: Path) -> None:
    bare = ROW | {"generated_tokens": [], "num_generated_tokens": 0, PROMPT_LOGPROBS: [None, 0.5, 0.5]}
    files, columns = write(tmp_path, bare)
    assert not check_files(pafs.LocalFileSystem(), files, columns, [PROMPT_LOGPROBS])[0].problems.counts
    assert check_files(pafs.LocalFileSystem(), files, columns)[0].problems.counts == {"row": 1}


def test_the_sum_of_ids_is_that_of_the_books(tmp_path: Path) -> None:
    files, columns = write(tmp_path, *(ROW | {"id": id, LOGPROBS: None} for id in "abc"))
    table = pq.read_table(files[0][1], partitioning=None)
    found, entries = check_files(pafs.LocalFileSystem(), files, columns)
    assert (found.id_sum, len(entries)) == (sum_outputs(table), 3)
