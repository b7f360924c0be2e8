"""Samples of OpenAI lines put together again: one line per line of the input, whatever files their rows lie in."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.generate.openai_batch import AnswerCollector, AnswerRow, lines_of


def row(source: str, sample: int, samples: int, code: str = "", **keys: Any) -> AnswerRow:
    made: Any = {
        "id": f"{source}-{sample}", "generated_text": f"{source}{sample}", "num_input_tokens": 5,
        "num_generated_tokens": sample + 1, "finish_reason": "error" if code else "stop", "error_code": code,
        "error_message": code and f"{code} of {source}-{sample}", "source_id": source, "sample": sample,
        "samples": samples, "is_chat": False,
    }  # fmt: skip
    return made | keys


def gather(rows: list[AnswerRow], held_bytes: int) -> list[tuple[str, dict[str, Any]]]:
    with AnswerCollector(held_bytes) as gathered:
        found = [line for one in rows if (whole := gathered.add(one)) for line in lines_of(whole, "m", 1)]
        return found + [line for rest in gathered.rest() for line in lines_of(rest, "m", 1)]


def test_choices_count_to_what_is_held() -> None:
    choice = json.dumps({"text": "t", "logprobs": {"tokens": ["t" * 20_000]}})
    with AnswerCollector(held_bytes=20_000) as gathered:
        assert gathered.add(row("a", 0, 2, openai_choice=choice)) == []
        assert gathered._held == {}, "it went to a temporary file"
        assert gathered.add(row("a", 1, 2)) == []
        assert [[one.get("openai_choice") for one in rows] for rows in gathered.rest()] == [[choice, None]]


@given(
    documents=st.lists(st.tuples(st.integers(2, 4), st.sets(st.integers(0, 3)), st.booleans()), max_size=12),
    held_bytes=st.sampled_from([0, 2000, 1 << 20]),
    seed=st.integers(0, 100),
)
def test_every_line_of_the_input_has_one_line(
    documents: list[tuple[int, set[int], bool]], held_bytes: int, seed: int
) -> None:
    rows, wanted = [], []
    for number, (samples, bad, is_double) in enumerate(documents):
        source = f"d{number}"
        codes = {sample: "poison_row" if sample in bad else "" for sample in range(samples)}
        rows += [row(source, sample, samples, code) for sample, code in codes.items()]
        wanted.append((source, "failed" if any(codes.values()) else "ok"))
        if is_double:
            rows += [row(source, sample, samples, "duplicate_id") for sample in range(samples)]
            wanted.append((source, "failed"))
    random.Random(seed).shuffle(rows)
    lines = gather(rows, held_bytes)
    assert sorted((line["custom_id"], status) for status, line in lines) == sorted(wanted)
    for status, line in lines:
        if status == "ok":
            body = line["response"]["body"]
            samples = documents[int(line["custom_id"][1:])][0]
            assert [choice["index"] for choice in body["choices"]] == list(range(samples))
            assert [choice["text"] for choice in body["choices"]] == [f"{line['custom_id']}{j}" for j in range(samples)]
            made = samples * (samples + 1) // 2
            assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": made, "total_tokens": 5 + made}
        else:
            assert line["response"] is None
            assert line["error"]["message"]


def test_a_line_one_of_whose_ids_belongs_to_another_line_fails() -> None:
    """`x-1` of line x is the id of a line that came first."""
    rows = [row("x", 0, 2), row("x", 1, 2, "duplicate_id")]
    assert [(status, line["error"]["code"]) for status, line in gather(rows, 1 << 20)] == [("failed", "duplicate_id")]


def test_a_line_and_its_duplicate_fail_for_their_own_reasons() -> None:
    rows = [row("x", 0, 2), row("x", 1, 2, "poison_row"), *(row("x", j, 2, "duplicate_id") for j in range(2))]
    rows_of_both = [row("x", j, 2, code) for j in range(2) for code in ("poison_row", "duplicate_id")]
    for lines in (gather(rows, 1 << 20), list(lines_of(rows_of_both, "m", 1))):
        codes = [(status, line["error"]["code"]) for status, line in lines]
        assert codes == [("failed", "poison_row"), ("failed", "duplicate_id")]


def test_lines_of_one_id_and_other_numbers_of_samples_stay_apart() -> None:
    rows = [row("x", 0, 2), row("x", 1, 2), *(row("x", j, 4, "duplicate_id" if j < 2 else "") for j in range(4))]
    assert [status for status, _ in gather(rows, 0)] == ["ok", "failed"] or [s for s, _ in gather(rows, 0)] == [
        "failed", "ok"
    ]  # fmt: skip


def test_a_chat_is_answered_with_a_message() -> None:
    ((status, line),) = gather([row("x", j, 2, is_chat=True) for j in (1, 0)], 1 << 20)
    body = line["response"]["body"]
    assert (status, body["object"], body["id"]) == ("ok", "chat.completion", "chatcmpl-x")
    assert [(c["index"], c["message"], c["finish_reason"]) for c in body["choices"]] == [
        (j, {"role": "assistant", "content": f"x{j}"}, "stop") for j in (0, 1)
    ]
    assert all("text" not in choice for choice in body["choices"])


def test_rows_that_are_missing_are_no_answer() -> None:
    with pytest.raises(AssertionError, match="not all of its line"):
        gather([row("x", 0, 2)], 1 << 20)
