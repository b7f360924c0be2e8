"""Rows of datasets as the stages take them: ids, bad prompts, columns that pass through, columns that are refused."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.input.prompt_templates import Prompter
from pipeline.processor.build import build_processor, ignored_keys
from pipeline.processor.dataset_rows import check_columns, made_id, merged, to_rows
from pipeline.processor.stage import with_key, without_key
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

CONFIG = JobConfig()


def test_rows_have_ids_errors_and_their_own_columns() -> None:
    table = pa.table({"more": [{"a": 1}, None, {"a": 3}], "prompt": ["ok", None, "x"], "id": [7, None, None]})
    rows = next(to_rows(table, CONFIG))
    assert rows["id"].to_pylist() == ["7", made_id(None), made_id("x")]
    assert rows["error_code"].to_pylist() == ["", "prompt_missing", ""]
    assert rows["error_message"].to_pylist() == ["", "column 'prompt' is null", ""]
    assert rows["more"].to_pylist() == [{"a": 1}, None, {"a": 3}]
    assert rows.column_names[-1] == "more"


def test_bytes_that_are_no_text_and_numbers_fail_their_rows() -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"ab\xff\xfe")]
    )
    assert next(to_rows(pa.table({"prompt": raw}), CONFIG))["error_code"].to_pylist() == ["", "bad_line"]
    rows = next(to_rows(pa.table({"prompt": [1, None]}), CONFIG))
    assert rows["error_code"].to_pylist() == ["prompt_not_text", "prompt_missing"]
    assert rows["prompt"].to_pylist() == [None, None]


def test_made_ids_are_those_of_every_run() -> None:
    assert made_id("The Mill") == "row-27b65104ee5b0a63"
    assert made_id("a") != made_id("b") != made_id(None) != made_id("None")


def test_columns_that_are_refused_are_named() -> None:
    with pytest.raises(ConfigError, match="a column 'generated_text'"):
        check_columns(["prompt", "generated_text"], CONFIG)
    with pytest.raises(ConfigError, match="a column 'logprobs'"):
        check_columns(["prompt", "logprobs"], build_config(JobConfig, {"sampling": {"logprobs": 0}}))
    check_columns(["prompt", "logprobs"], CONFIG)
    with pytest.raises(ConfigError, match=r"input.prompt_column: the dataset has no column 'prompt'; there are: q"):
        check_columns(["q"], CONFIG)
    with pytest.raises(ConfigError, match=r"input.id_column: column 'id' is bool"):
        next(to_rows(pa.table({"prompt": ["x"], "id": [True]}), CONFIG))
    chosen = build_config(JobConfig, {"input": {"id_column": "doc"}})
    with pytest.raises(ConfigError, match=r"input.id_column: the dataset has no column 'doc'; there are: key, prompt"):
        check_columns(["prompt", "key"], chosen)
    with pytest.raises(ConfigError, match=r"input.id_column: .*; name another, or make it with preprocess"):
        next(to_rows(pa.table({"prompt": ["x"]}), chosen))
    check_columns(["prompt", "doc"], chosen)
    check_columns(["prompt"], CONFIG)
    check_columns(["generated_text", "id"], build_config(JobConfig, {"input": {"prompt_column": "generated_text"}}))


def test_ids_that_are_floats() -> None:
    rows = next(to_rows(pa.table({"prompt": ["a", "b"], "id": [7.0, 0.5]}), CONFIG)).to_pylist()
    assert [row["id"] for row in rows] == ["7", made_id("b")]
    assert [row["error_code"] for row in rows] == ["", "bad_line"]
    assert rows[1]["error_message"] == "column 'id' is not a whole number"


def test_keys_that_say_nothing_to_a_stage() -> None:
    config = build_config(
        JobConfig,
        {"input": {"path": ["x"], "id_column": "k"}, "output": {"path": "y"}, "limits": {"max_failed_rows": 1}},
    )
    assert ignored_keys(config) == ["input.path", "output.path", "limits.max_failed_rows"]
    assert ignored_keys(CONFIG) == []


def test_a_chat_template_that_no_row_goes_through_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"input.chat_template: has no effect without input.chat or"):
        build_processor({"input": {"chat_template": "x.jinja"}})


def test_preprocess_puts_columns_over_those_of_the_row() -> None:
    assert merged({"a": 1, "b": 2}, lambda row: {"b": 3, "c": row["a"]}) == {"a": 1, "b": 3, "c": 1}


def test_rows_are_told_apart_by_what_decides_their_answers() -> None:
    requests = [
        Request("a", [1, 2]), Request("a", [1, 2]), Request("a", [1, 3]), Request("b", [1, 2]),
        Request("a", [1, 2], Sampling(max_new_tokens=3)),
    ]  # fmt: skip
    keys = [with_key(request).id for request in requests]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert [without_key(with_key(request)) for request in requests] == requests
    assert without_key(Request("control", [2])).id == "control"


def test_templates_and_samples_make_rows_of_a_row() -> None:
    tree = {
        "input": {"templates": {"a": "{{ q }}?", "b": "Say {{ q }}"}, "id_column": "key"},
        "sampling": {"n": 2, "temperature": 1.0},
    }
    config = build_config(JobConfig, tree)
    prompter = Prompter.of(config.input, "", None, datetime.now(UTC))
    table = pa.table({"q": ["who", None], "key": ["k", None], "x": [1, 2]})
    rows = pa.concat_tables(to_rows(table, config, prompter)).to_pylist()
    other = made_id(repr({"q": None}))
    assert [row["id"] for row in rows] == [
        f"{id}-{name}-{j}" for id in ("k", other) for name in ("a", "b") for j in (0, 1)
    ]
    assert [row["prompt"] for row in rows[:4]] == ["who?", "who?", "Say who", "Say who"]
    assert [(row["source_id"], row["template"], row["sample"], row["x"]) for row in rows[:3]] == [
        ("k", "a", 0, 1), ("k", "a", 1, 1), ("k", "b", 0, 1)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"input.templates.a: "):
        check_columns(["p"], config)
    with pytest.raises(ConfigError, match="a column 'sample'"):
        check_columns(["q", "sample"], config)
    with pytest.raises(ConfigError, match=r"input.messages_column: the dataset has no column 'm'"):
        check_columns(["q"], build_config(JobConfig, {"input": {"messages_column": "m"}}))
