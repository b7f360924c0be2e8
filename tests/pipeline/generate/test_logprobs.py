"""Runs that ask for log-probabilities, on a real Ray: columns, their values, verify, resume, scoring alone."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs import generate, verify
from pipeline.schema import OUTPUT_SCHEMA
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from tests.support.verbs import Call

pytestmark = pytest.mark.ray
CLOSE = {"atol": 1e-4, "rtol": 0.0}
PROMPTS = ["The Golden Otter", "", "is a cheap pub near Willow Station", None, "x " * 300]
FAILED = {"r3": "prompt_missing", "r4": "prompt_too_long"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"id": f"r{n}", "prompt": prompt, "n": n} for n, prompt in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(call: Call, model: Path, source: Path, place: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    return call(
        generate, "-i", source, "-o", place, f"model.source={model}", "model.dtype=float32", "decode.method=full",
        "sampling.ignore_eos=true", "limits.max_failed_rows=2", *more,
    )  # fmt: skip


def read(place: Path) -> dict[str, dict[str, Any]]:
    return {
        row["id"]: row for path in place.glob("data/*/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()
    }


def reference(model: Path, row: dict[str, Any]) -> tuple[torch.Tensor, list[int], int]:
    """Log-probabilities [T, V] of all tokens but the first, those tokens, and how many are the prompt's."""
    prompt = Tokenizer(model, read_config(model)).encode([row["prompt"]])[0]
    tokens = prompt + row["generated_tokens"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).eval()(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1], tokens[1:], len(prompt)


@pytest.mark.slow
def test_columns_are_those_of_hugging_face(call: Call, tiny_checkpoint: Path, source: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    keys = ("sampling.max_new_tokens=6", "sampling.logprobs=2", "sampling.prompt_logprobs=true")
    code, _, err = run(call, tiny_checkpoint, source, place, *keys)
    assert code == 0, err
    rows = read(place)
    assert {id: row["error_code"] for id, row in rows.items() if row["error_code"]} == FAILED
    added = ["logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"]
    for id, row in rows.items():
        assert list(row) == [*OUTPUT_SCHEMA.names, *added, "n"]
        if id in FAILED:
            assert [row[name] for name in added] == [None] * 4
            continue
        theirs, tokens, length = reference(tiny_checkpoint, row)
        assert row["prompt_logprobs"][0] is None
        assert row["prompt_top_logprobs"][0] is None
        ours = torch.tensor(row["prompt_logprobs"][1:] + row["logprobs"])
        torch.testing.assert_close(ours, theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0], **CLOSE)
        top = row["prompt_top_logprobs"][1:] + row["top_logprobs"]
        assert (len(row["prompt_logprobs"]), len(row["top_logprobs"])) == (length, 6)
        values = torch.tensor([[one["logprob"] for one in ones] for ones in top])
        torch.testing.assert_close(values, theirs.topk(2).values, **CLOSE)
        ids = torch.tensor([[one["token"] for one in ones] for ones in top])
        torch.testing.assert_close(theirs.gather(1, ids), values, **CLOSE)
    assert call(verify, place)[0] == 0
    code, _, err = run(call, tiny_checkpoint, source, place, *keys[:2], "--resume")
    assert (code, "sampling.prompt_logprobs: the run was started with True, now it is False" in err) == (2, True), err
    for path in place.glob("data/status=ok/*.parquet"):
        table = pq.ParquetFile(path).read()
        at = table.schema.get_field_index("logprobs")
        pq.write_table(table.set_column(at, "logprobs", table["prompt_logprobs"]), path)
    assert "logprobs are not one for each token" in call(verify, place)[2]


@pytest.mark.slow
def test_prompts_are_scored_alone(call: Call, tiny_checkpoint: Path, source: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    keys = ("sampling.max_new_tokens=0", "decode.method=skipdecode", "sampling.prompt_logprobs=true")
    code, report, err = run(call, tiny_checkpoint, source, place, *keys)
    assert code == 0, err
    assert "could not be made" not in err
    assert (report["completed"], report["total_output_tokens"]) == (3, 0)
    for id, row in read(place).items():
        assert "logprobs" not in row
        if id not in FAILED:
            theirs, tokens, length = reference(tiny_checkpoint, row)
            assert (row["finish_reason"], row["generated_tokens"], row["layers_run"]) == ("length", [], 0)
            assert len(row["prompt_logprobs"]) == length
            own = theirs.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row["prompt_logprobs"][1:]), own, **CLOSE)
    assert call(verify, place)[0] == 0


def test_what_asks_for_nothing_and_names_that_are_taken_are_refused(
    call: Call, tiny_checkpoint: Path, source: Path, tmp_path: Path
) -> None:
    code, _, err = run(call, tiny_checkpoint, source, tmp_path / "run", "sampling.max_new_tokens=0")
    assert (code, "sampling.max_new_tokens: should be at least 1; 0 scores prompts alone" in err) == (2, True), err
    source.write_text('{"prompt": "x", "logprobs": [1]}\n')
    code, _, err = run(call, tiny_checkpoint, source, tmp_path / "run", "sampling.logprobs=0")
    assert (code, "the input has a column 'logprobs', which this run writes itself" in err) == (2, True), err
