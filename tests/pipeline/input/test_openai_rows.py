"""OpenAI batch lines: prompts, sampling parameters, and what is refused row by row."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.job import SamplingConfig
from pipeline.input.files import list_input
from tests.support.input_helpers import make_config, read_rows, refuse, write, write_jsonl


def batch_line(body: Any, **keys: Any) -> dict[str, Any]:
    return {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body} | keys


def read_batch(tmp_path: Path, line: dict[str, Any]) -> dict[str, Any]:
    return read_rows(write_jsonl(tmp_path / "one.jsonl", [line]), format="openai_batch")[0]


def test_batch_is_found_and_normalised(tmp_path: Path) -> None:
    body = {
        "model": "opt",
        "prompt": "Hi ü",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "seed": -3,
        "stop": "END",
        "ignore_eos": True,
        "n": 1,
        "best_of": None,
        "echo": False,
        "stream": False,
        "stream_options": None,
        "logprobs": None,
        "suffix": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "u",
        "min_p": 0,
    }
    path = write(tmp_path / "a.jsonl", "\nnot json\n" + json.dumps(batch_line(body)) + "\n")
    assert list_input(make_config(path)).format == "openai_batch"
    bad, good = read_rows(path)
    assert (bad["error_code"], bad["id"], bad["body"]) == ("bad_line", "a.jsonl:1", None)
    assert (good["id"], good["prompt"], good["_prompt_tokens"], good["error_message"]) == (
        "r",
        "Hi ü",
        None,
        "",
    )
    own = json.loads(good["_sampling"])
    assert own == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 0,
        "seed": -3,
        "stop": ["END"],
        "ignore_eos": True,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "min_p": 0,
    }
    SamplingConfig(**own)  # our names and ranges
    assert list(good)[6:] == ["method", "url", "body"]
    assert (good["method"], good["url"], json.loads(good["body"])) == ("POST", "/v1/completions", body)


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        ("", "", None),
        (["one"], "one", None),
        ([1, 2, 0], None, [1, 2, 0]),
        ([[5]], None, [5]),
        ([2**31 - 1], None, [2**31 - 1]),
    ],
)
def test_batch_prompts(tmp_path: Path, prompt: Any, text: Any, tokens: Any) -> None:
    row = read_batch(tmp_path, batch_line({"prompt": prompt}))
    assert (row["prompt"], row["_prompt_tokens"], row["error_code"], row["_sampling"]) == (
        text,
        tokens,
        "",
        None,
    )


@pytest.mark.parametrize(
    ("prompt", "code", "match"),
    [
        (None, "prompt_missing", "missing or null"),
        (["a", "b"], "bad_parameters", "2 prompts; give one prompt per line"),
        ([[1], [2]], "bad_parameters", "one prompt per line"),
        ([], "prompt_not_text", "body.prompt must be"),
        ([[]], "prompt_not_text", "body.prompt must be"),
        ([1, -1], "prompt_not_text", "body.prompt must be"),
        ([1, True], "prompt_not_text", "body.prompt must be"),
        ([1.0], "prompt_not_text", "body.prompt must be"),
        ([2**31], "prompt_not_text", "body.prompt must be"),
        (5, "prompt_not_text", "body.prompt must be"),
        ({"a": 1}, "prompt_not_text", "body.prompt must be"),
    ],
)
def test_batch_bad_prompts(tmp_path: Path, prompt: Any, code: str, match: str) -> None:
    row = read_batch(tmp_path, batch_line({"prompt": prompt}))
    assert (row["id"], row["prompt"], row["_prompt_tokens"], row["error_code"]) == ("r", None, None, code)
    assert row["error_message"].startswith("one.jsonl line 1: ")
    assert match in row["error_message"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True, "5", 2**63]),
        ("temperature", [-0.1, True, "0", [0], 10**400]),
        ("top_p", [0, 1.1, -1, True, 10**400]),
        ("top_k", [-2, 1.5, True, 2**63]),
        ("seed", [1.5, True, 2**63, "1"]),
        ("stop", ["", [""], ["a"] * 17, 5, [1], {"a": 1}, "a" * 1001]),
        ("ignore_eos", [1, 0, "true"]),
        ("n", [0, True, 1.5]),
        ("best_of", [2, True]),
        ("echo", [0, 1]),
        ("stream", [True, 0]),
        ("logprobs", [-1, 21, True, 1.5, "1"]),
        ("suffix", ["x"]),
        ("presence_penalty", [2.1, True, 10**400]),
        ("frequency_penalty", [-3]),
        ("logit_bias", [{"a": 1}, {"5": 101}, 0]),
        ("stream_options", [{"include_usage": True}]),
        ("min_p", [1.1, False]),
        ("model", [7, ["x"], False]),
        ("stop_token_ids", [[-1], 5]),
        ("min_tokens", [-1, 0.5]),
        ("messages", [[]]),
    ],
)
def test_batch_bad_parameters(tmp_path: Path, key: str, values: list[Any]) -> None:
    lines = [batch_line({"prompt": "x", key: value}, custom_id=str(n)) for n, value in enumerate(values)]
    for row in read_rows(write_jsonl(tmp_path / "a.jsonl", lines)):
        assert (row["error_code"], row["prompt"], row["_sampling"]) == ("bad_parameters", "x", None), row
        assert f"body.{key} " in row["error_message"]


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"echo": True}, {"echo": True}),
        ({"logprobs": 0, "echo": True}, {"logprobs": 0, "echo": True, "prompt_logprobs": True}),
        ({"max_tokens": 0, "echo": True, "seed": 3}, {"echo": True, "max_new_tokens": 0, "seed": 3}),
    ],
)
def test_what_lines_ask_for_beside_text(tmp_path: Path, more: dict[str, Any], own: dict[str, Any]) -> None:
    row = read_batch(tmp_path, batch_line({"prompt": "x", **more}))
    assert (row["error_code"], json.loads(row["_sampling"])) == ("", own)


@pytest.mark.parametrize(
    ("line", "code", "match"),
    [
        (batch_line({"prompt": "x"}, method="GET"), "bad_parameters", "method must be 'POST', got \"GET\""),
        (
            batch_line({"prompt": "x"}, url="/v1/chat/completions"),
            "bad_parameters",
            "body.prompt is not known",
        ),
        (batch_line({"prompt": "x"}, custom_id=5), "bad_line", "custom_id must be a non-empty string, got 5"),
        (batch_line({"prompt": "x"}, custom_id=""), "bad_line", "custom_id"),
        ({"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}, "bad_line", "custom_id"),
        (batch_line("x"), "bad_line", "body must be an object, got a string"),
        (batch_line(None), "bad_line", "body must be an object, got null"),
        (batch_line({"prompt": "x", "temperature": float("nan")}), "bad_line", "NaN or infinite"),
        (batch_line({"prompt": "x"}, method=[1]), "bad_parameters", "method"),
    ],
)
def test_batch_bad_lines(tmp_path: Path, line: dict[str, Any], code: str, match: str) -> None:
    row = read_batch(tmp_path, line)
    assert row["error_code"] == code
    assert match in row["error_message"]
    assert row["id"] == ("r" if line.get("custom_id") == "r" else "one.jsonl:0")


def test_lines_of_azure_have_urls_without_a_version(tmp_path: Path) -> None:
    row = read_batch(tmp_path, batch_line({"model": "my-deployment", "prompt": "x"}, url="/completions"))
    assert (row["prompt"], row["error_code"], row["url"]) == ("x", "", "/completions")
    line = batch_line({"messages": [{"role": "user", "content": "x"}]}, url="/chat/completions")
    row = read_batch(tmp_path, line)
    assert (row["prompt"], row["error_code"], row["url"]) == (None, "", "/chat/completions")


def test_an_unknown_url_in_all_lines_is_refused_before_the_start(tmp_path: Path) -> None:
    bad = [batch_line({"input": "x"}, url="/v1/embeddings", custom_id=str(n)) for n in range(3)]
    write(tmp_path / "a.jsonl", "not json\n" + "".join(json.dumps(line) + "\n" for line in bad))
    reason = (
        r"url must be '/v1/completions' or .*; no line has one of these, the first is '/v1/embeddings' in .*a\.jsonl"
    )
    refuse(tmp_path, reason, format="openai_batch")
    write_jsonl(tmp_path / "b.jsonl", [batch_line({"prompt": "x"})])
    rows = read_rows(tmp_path, format="openai_batch")
    assert [row["error_code"] for row in rows] == ["bad_line", *["bad_parameters"] * 3, ""]


def test_batch_and_other_lines_do_not_mix(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [batch_line({"prompt": "x"})])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x"}])
    refuse(tmp_path, r"a\.jsonl holds OpenAI batch lines and .*b\.jsonl does not")
    os.rename(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    refuse(tmp_path, r"c\.jsonl holds OpenAI batch lines and .*b\.jsonl does not")
