"""A window as a table and as requests: what goes in, what comes out, and in which row."""

import pyarrow as pa

from actors.failures import RowFailure
from pipeline.stages.window import Window
from skipdecode.config.sampling import Sampling
from skipdecode.engine.results import Completion


def table() -> pa.Table:
    """Three rows, of which the second has failed before and the third has sampling of its own."""
    return pa.table(
        {
            "id": ["a", "b", "c"],
            "_prompt_tokens": pa.array([[2, 5], [], [2]], pa.list_(pa.int32())),
            "_sampling": pa.array([None, None, '{"max_new_tokens": 3}'], pa.string()),
            "error_code": ["", "bad_line", ""],
            "error_message": ["", "no JSON", ""],
            "extra": [1, 2, 3],
        }
    )


def test_rows_that_have_failed_before_are_no_requests() -> None:
    window = Window.of(table(), Sampling(max_new_tokens=8))
    assert window.ids == ["a", "c"]
    assert [request.prompt_tokens for request in window.requests] == [[2, 5], [2]]
    assert [request.sampling.max_new_tokens for request in window.requests] == [8, 3]
    assert window.num_failed == 1
    assert window.name == Window.of(table(), Sampling(max_new_tokens=8)).name, "Ray repeats it under the same name"


def test_answers_go_to_their_rows() -> None:
    window = Window.of(table(), Sampling(max_new_tokens=8))
    done, failed = window.with_answers([RowFailure("poison_row", "it killed"), Completion([7, 8], "length", 12, 11)])
    assert failed == 2
    assert done.drop_columns(["_prompt_tokens", "_sampling"]).to_pylist() == [
        {"id": "a", "error_code": "poison_row", "error_message": "it killed", "extra": 1, "generated_tokens": [],
         "num_generated_tokens": 0, "finish_reason": "error", "layers_run": 0, "ffns_run": 0},
        {"id": "b", "error_code": "bad_line", "error_message": "no JSON", "extra": 2, "generated_tokens": [],
         "num_generated_tokens": 0, "finish_reason": "error", "layers_run": 0, "ffns_run": 0},
        {"id": "c", "error_code": "", "error_message": "", "extra": 3, "generated_tokens": [7, 8],
         "num_generated_tokens": 2, "finish_reason": "length", "layers_run": 12, "ffns_run": 11},
    ]  # fmt: skip


def test_a_window_of_failed_rows_alone_wants_no_answers() -> None:
    window = Window.of(table().slice(1, 1), Sampling())
    assert window.requests == []
    assert window.with_answers([])[1] == 1
