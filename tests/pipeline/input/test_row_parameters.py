"""`input.sampling_column`: the sampling parameters of each row, in every format and form, good and bad."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import JobConfig, build_config
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.line_reader import RowError
from pipeline.input.row_parameters import ROW_KEYS, row_parameters
from pipeline.processor.dataset_rows import to_rows
from pipeline.stages.tokenize import row_sampling
from skipdecode.config.sampling import RepetitionDetection, Sampling
from tests.support.input_helpers import read_rows, refuse, write_jsonl

OWN: list[Any] = [
    {"temperature": 0.5, "top_k": 3, "stop": ["\n"], "logit_bias": {"7": -2.0}},
    {"max_new_tokens": 5, "repetition_detection": {"max_pattern_size": 4}},
    None,
]
WANTED = [
    Sampling(temperature=0.5, top_k=3, stop=("\n",), logit_bias=((7, -2.0),)),
    Sampling(5, repetition_detection=RepetitionDetection(4)),
    Sampling(),
]


def parquet(path: Path, values: pa.Array) -> Path:
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "how": values}), path)
    return path


def write_csv(path: Path, values: list[str | None]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "how"], *(["a", value or ""] for value in values)])
    return path


FORMS: dict[str, Callable[[Path], Path]] = {
    "struct": lambda folder: parquet(folder / "a.parquet", pa.array(OWN)),
    "json": lambda folder: parquet(folder / "a.parquet", pa.array([own and json.dumps(own) for own in OWN])),
    "jsonl": lambda folder: write_jsonl(folder / "a.jsonl", [{"prompt": "a", "how": own} for own in OWN]),
    "text in jsonl": lambda folder: write_jsonl(
        folder / "a.jsonl", [{"prompt": "a", "how": own and json.dumps(own)} for own in OWN]
    ),
    "csv": lambda folder: write_csv(folder / "a.csv", [own and json.dumps(own) for own in OWN]),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_bring_their_own_parameters(tmp_path: Path, form: str) -> None:
    rows = read_rows(FORMS[form](tmp_path), sampling_column="how")
    assert [row["error_message"] for row in rows] == ["", "", ""]
    assert [row_sampling(Sampling(), row["_sampling"]) for row in rows] == WANTED
    assert all("how" in row for row in rows), "it goes to the output like any column"


def test_a_map_has_numbers_of_one_type(tmp_path: Path) -> None:
    values = pa.array([[("top_k", 3.0), ("temperature", 0.5)], None, []], pa.map_(pa.string(), pa.float64()))
    rows = read_rows(parquet(tmp_path / "a.parquet", values), sampling_column="how")
    assert row_sampling(Sampling(), rows[0]["_sampling"]) == Sampling(temperature=0.5, top_k=3)
    assert [row["_sampling"] for row in rows[1:]] == [None, None]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON: maximum recursion depth"),
        ("5", "must be an object of sampling parameters, or its JSON, got 5"),
        ('{"temprature": 1}', '"temprature" is no key of sampling (or is it temperature?)'),
        ('{"n": 2}', "n is the same for all rows of a run; set sampling.n"),
        ('{"logprobs": 2}', "logprobs is the same for all rows of a run; set sampling.logprobs"),
    ],
)
def test_what_is_no_object_of_parameters_fails_its_row(tmp_path: Path, value: str, reason: str) -> None:
    bad, good = read_rows(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "how": value}, {"prompt": "b", "how": '{"seed": 1}'}]),
        sampling_column="how",
    )
    assert (bad["error_code"], bad["_sampling"]) == ("bad_parameters", None)
    assert bad["error_message"].startswith("a.jsonl line 1: column 'how' ")
    assert reason in bad["error_message"]
    assert (good["error_code"], good["_sampling"]) == ("", '{"seed": 1}')
    table = pa.table({"prompt": ["a", "b"], "how": [value, '{"seed": 1}']})
    staged = next(to_rows(table, build_config(JobConfig, {"input": {"sampling_column": "how"}}))).to_pylist()
    assert [row["error_code"] for row in staged] == ["bad_parameters", ""]
    assert [row["_sampling"] for row in staged] == [None, '{"seed": 1}']
    assert reason in staged[0]["error_message"]


def test_nulls_of_a_schema_stay_where_they_are_its_own(tmp_path: Path) -> None:
    own = {"structured_outputs": {"json": {"properties": {"a": {"const": None}}}}}
    wanted = Sampling().with_parameters(own)
    lines = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "how": own}, {"prompt": "b", "how": json.dumps(own)}])
    for row in read_rows(lines, sampling_column="how"):
        assert row_sampling(Sampling(), row["_sampling"]) == wanted


def test_samples_at_temperature_0_are_refused() -> None:
    with pytest.raises(RowError, match="temperature must be above 0: 3 answers at 0 are the same"):
        row_parameters({"temperature": 0}, Expansion(("",), 3, 1.0))
    assert row_parameters({"temperature": 0}, ONE_ROW) == '{"temperature": 0}'


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    refuse(path, r"input.sampling_column: the input has no column 'how'; there are: prompt", sampling_column="how")
    lines = write_jsonl(
        tmp_path / "b.jsonl", [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}]
    )
    refuse(lines, r"input.sampling_column: OpenAI batch lines bring", sampling_column="how")


def test_row_keys_are_those_of_a_sampling() -> None:
    assert Sampling.names() >= ROW_KEYS
