"""OpenAI batch lines that ask for log-probabilities or their prompt again: answered as the endpoint answers them."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import generate, verify
from tests.support.service_helpers import local, make_endpoint
from tests.support.verbs import Call

pytestmark = pytest.mark.ray
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "The Golden Otter", "max_tokens": 4},
    "scored": {"prompt": "The Golden Otter", "max_tokens": 6, "logprobs": 2},
    "own alone": {"prompt": "東京 🙂", "max_tokens": 5, "logprobs": 0, "ignore_eos": True},
    "echo": {"prompt": "is a cheap pub", "max_tokens": 5, "echo": True, "stop": ["e"]},
    "both": {"prompt": "Köln 🙂 serves", "max_tokens": 7, "echo": True, "logprobs": 3},
    "tokens": {"prompt": [2, 80, 90, 100], "max_tokens": 3, "echo": True, "logprobs": 1},
    "prompt alone": {"prompt": "Willow Station", "max_tokens": 0, "echo": True, "logprobs": 1},
    "nothing": {"prompt": "Willow Station", "max_tokens": 0, "echo": True},
}
BAD = {"no echo": {"prompt": "x", "max_tokens": 0}, "many": {"prompt": "x", "logprobs": 21}}


@pytest.mark.slow
def test_lines_are_answered_as_the_endpoint_answers(call: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    source, place = tmp_path / "in.jsonl", tmp_path / "run"
    lines = [
        {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body | {"temperature": 0}}
        for id, body in (BODIES | BAD).items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = call(
        generate, "-i", source, "-o", place, f"model.source={tiny_checkpoint}", "model.dtype=float32",
        "decode.method=full", "limits.max_failed_rows=2",
    )  # fmt: skip
    assert code == 0, err
    assert call(verify, place)[0] == 0
    found = [json.loads(line) for line in (place / "batch_output.jsonl").read_text().splitlines()]
    answers = {line["custom_id"]: line["response"]["body"] for line in found}
    assert answers.keys() == BODIES.keys()
    failed = [json.loads(line) for line in (place / "batch_errors.jsonl").read_text().splitlines()]
    assert {line["custom_id"]: line["error"]["code"] for line in failed} == dict.fromkeys(BAD, "bad_parameters")
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu"))
    with local(make_endpoint(generator)) as url:
        for id, body in BODIES.items():
            theirs = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60).json()
            assert answers[id]["usage"] == theirs["usage"], id
            (ours,), (wanted,) = answers[id]["choices"], theirs["choices"]
            scores, scored = ours.pop("logprobs"), wanted.pop("logprobs")
            assert ours == wanted, id
            assert (scores is None) == (scored is None), id
            if scored is not None:
                assert (scores["tokens"], scores["text_offset"]) == (scored["tokens"], scored["text_offset"]), id
                assert scores["token_logprobs"] == pytest.approx(scored["token_logprobs"], abs=1e-4), id
                for top, other in zip(scores["top_logprobs"], scored["top_logprobs"], strict=True):
                    assert top == (other and pytest.approx(other, abs=1e-4)), id
    rows = [row for path in place.glob("data/*/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()]
    has_choice = {row["id"] for row in rows if row["openai_choice"] is not None}
    assert has_choice == BODIES.keys() - {"plain"}
    assert all("logprobs" not in row for row in rows)
