"""Tokenise and detokenise tables in this process: what a row makes a library raise is the failure of that row alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.stages import tokenize as stages
from pipeline.stages.detokenize import detokenize
from pipeline.stages.tokenize import TokenizeConfig, tokenize
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.families import config_of
from tests.support.family_tokenizers import byte_level, template, write_folder


@pytest.fixture
def config(tiny_checkpoint: Path) -> TokenizeConfig:
    return TokenizeConfig(str(tiny_checkpoint), read_config(tiny_checkpoint), Sampling(8), "fail_row")


def table(rows: int, **columns: Any) -> pa.Table:
    """Rows as `pipeline.input` gives them, with `columns` (lists) replaced."""
    own: dict[str, Any] = {
        "id": [f"r{i}" for i in range(rows)],
        "prompt": [f"prompt {i}" for i in range(rows)],
        "_prompt_tokens": pa.array([None] * rows, pa.list_(pa.int32())),
        "_sampling": pa.array([None] * rows, pa.string()),
        "error_code": [""] * rows,
        "error_message": [""] * rows,
    }
    return pa.table(own | columns)


def test_a_prompt_that_the_tokenizer_cannot_take_fails_alone(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As the Rust library's bindings raise it."""

    class Panics:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            if "prompt 2" in texts:
                raise PanicException("index out of bounds")
            return self.inner.encode_batch_fast(texts, **more)

    tokenizer = Tokenizer(config.source, config.model)
    plain = tokenize(table(5), config=config)
    tokenizer._tokenizer = Panics(tokenizer._tokenizer)  # type: ignore[assignment]
    monkeypatch.setattr(stages, "load_tokenizer", lambda *_: tokenizer)
    got = tokenize(table(5), config=config).to_pylist()
    assert [row["error_code"] for row in got] == ["", "", "engine_error", "", ""]
    assert got[2]["error_message"] == "RuntimeError: the tokenizer panicked: index out of bounds"
    assert got[2]["_prompt_tokens"] == []
    assert [got[row] for row in (0, 1, 3, 4)] == [plain.to_pylist()[row] for row in (0, 1, 3, 4)]


def test_given_tokens_out_of_range_fail_alone(config: TokenizeConfig) -> None:
    given = pa.array([[2, 5], [2, -1], [2, 10**6], []], pa.list_(pa.int32()))
    got = tokenize(table(4, _prompt_tokens=given, prompt=pa.array([None] * 4, pa.string())), config=config).to_pylist()
    assert [row["error_code"] for row in got] == ["", "engine_error", "prompt_not_text", ""]
    assert "OverflowError" in got[1]["error_message"]


def test_an_empty_prompt_of_a_model_without_bos_is_no_prompt(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level("qwen2"), "qwen2", tokenizer_class="Qwen2Tokenizer")
    shape = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = config_of(shape | {"model_type": "qwen2", "max_position_embeddings": 24, "eos_token_id": 1})
    config = TokenizeConfig(str(folder), model, Sampling(8), "fail_row")
    given = pa.array([None, None, [], [5]], pa.list_(pa.int32()))
    rows = table(4, _prompt_tokens=given, prompt=pa.array(["", "a pub", None, None], pa.string()))
    got = tokenize(rows, config=config).to_pylist()
    assert [row["error_code"] for row in got] == ["prompt_missing", "", "prompt_missing", ""]
    assert got[0]["error_message"] == got[2]["error_message"]
    assert "no token" in got[0]["error_message"]
    assert [row["num_input_tokens"] for row in got] == [0, len(got[1]["_prompt_tokens"]), 0, 1]
    assert got[1]["_prompt_tokens"] == Tokenizer(folder, model).encode(["a pub"])[0]


@pytest.mark.parametrize("has_bos", [True, False])
def test_bos_alone_stays_in_front_of_what_is_cut(tmp_path: Path, has_bos: bool) -> None:
    tokenizer = byte_level("llama3")
    tokenizer.post_processor = template("<|begin|>" if has_bos else "", of=tokenizer)
    folder = write_folder(tmp_path, tokenizer, "llama", tokenizer_class="PreTrainedTokenizerFast")
    shape = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = config_of(shape | {"model_type": "llama", "max_position_embeddings": 24, "eos_token_id": 1})
    text = "one two three four five six seven eight nine ten"
    (whole,) = Tokenizer(folder, model).encode([text])
    assert len(whole) > 16
    config = TokenizeConfig(str(folder), model, Sampling(8), "truncate_left")
    (cut,) = tokenize(table(1, prompt=[text]), config=config)["_prompt_tokens"].to_pylist()
    assert cut == ([whole[0], *whole[-15:]] if has_bos else whole[-16:])


def test_tokens_that_cannot_be_made_text_fail_alone(config: TokenizeConfig) -> None:
    decoded = table(
        3,
        num_input_tokens=pa.array([3, 3, 3], pa.int32()),
        generated_tokens=pa.array([[5, 6], [7, -9], [8]], pa.list_(pa.int32())),
        num_generated_tokens=pa.array([2, 2, 1], pa.int32()),
        finish_reason=["length", "stop", "stop"],
        layers_run=pa.array([6, 6, 0], pa.int32()),
        ffns_run=pa.array([6, 5, 0], pa.int32()),
        extra=["x", "y", "z"],
    )
    done = detokenize(decoded, config=config, extra_names=("extra",))
    assert done.schema.names == [*OUTPUT_SCHEMA.names, "extra", STATUS]
    rows = done.to_pylist()
    assert [row[STATUS] for row in rows] == ["ok", "failed", "ok"]
    bad = rows[1]
    assert bad["error_code"] == "engine_error"
    assert "OverflowError" in bad["error_message"]
    assert (bad["generated_text"], bad["generated_tokens"], bad["num_generated_tokens"]) == ("", [], 0)
    assert (bad["finish_reason"], bad["layers_run"], bad["ffns_run"], bad["extra"]) == ("error", 0, 0, "y")
    assert rows[0]["generated_text"] == Tokenizer(config.source, config.model).decode([5, 6])


def test_a_file_in_place_of_a_prompt_is_not_tokenised_whole(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"word{i} " for i in range(20_000)]
    given, seen = table(2, prompt=["short", "".join(words)]), []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: (seen.extend(map(len, texts)), encode(self, texts))[1])
    (short, huge) = tokenize(given, config=config).to_pylist()
    limit = 2 * Tokenizer(config.source, config.model).max_token_chars * config.model.max_position_embeddings
    assert seen == [5, limit]
    assert len("".join(words)) > limit
    assert (short["error_code"], huge["error_code"], huge["prompt"]) == ("", "prompt_too_long", "".join(words))
    assert huge["error_message"].startswith("more than ")
    monkeypatch.undo()
    for too_long in ("truncate_left", "truncate_right"):
        some = replace(config, too_long=too_long)
        whole = Tokenizer(config.source, config.model).encode(["".join(words)])[0]
        room = config.model.max_position_embeddings - 8
        kept = [whole[0], *whole[len(whole) - room + 1 :]] if too_long == "truncate_left" else whole[:room]
        assert tokenize(given, config=some)["_prompt_tokens"][1].as_py() == kept


def test_what_asks_for_the_answer_is_never_cut_off_a_chat(config: TokenizeConfig) -> None:
    long = table(1, prompt=["word " * 1000 + "answer:"])
    chat = replace(config, chat=True)
    (failed,) = tokenize(long, config=replace(chat, too_long="truncate_right")).to_pylist()
    assert failed["error_code"] == "prompt_too_long"
    assert "set input.too_long to truncate_left, or" in failed["error_message"]
    (cut,) = tokenize(long, config=replace(chat, too_long="truncate_left")).to_pylist()
    assert cut["error_code"] == ""
    assert Tokenizer(config.source, config.model).decode(cut["_prompt_tokens"]).endswith("answer:")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"temperature": -1}, "temperature: must be a number of at least 0, got -1"),
        ({"temperature": "hot"}, "temperature: must be a number of at least 0, got 'hot'"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        ({"min_new_tokens": 9}, "min_new_tokens: must be at most max_new_tokens (8), got 9"),
        ({"stop": [5]}, "stop: must be texts that are not empty, got (5,)"),
        ({"stop": ["a" * 5000, 5]}, "stop: must be texts that are not empty, got ('aaa"),
        ({"logit_bias": {"100000": 1}}, "logit_bias: token 100000 is not in the vocabulary of 320 tokens"),
        ({"logit_bias": [1]}, "logit_bias: must be an object of token ids and biases, got [1]"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids: must be token ids, got ('</s>',)"),
        ({"repetition_detection": {"min_count": 3}}, "repetition_detection: needs max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 0}}, "repetition_detection.max_pattern_size: must be 1 to"),
        ({"repetition_detection": 5}, "repetition_detection: must be max_pattern_size, min_pattern_size"),
    ],
)
def test_parameters_of_a_row_that_cannot_be_used_fail_it_alone(
    config: TokenizeConfig, own: dict[str, Any], message: str
) -> None:
    got = tokenize(table(2, _sampling=[json.dumps(own), None]), config=config).to_pylist()
    assert [row["error_code"] for row in got] == ["bad_parameters", ""]
    assert got[0]["error_message"].startswith(message)
    assert len(got[0]["error_message"]) < 300


@pytest.mark.parametrize("scores", [{"echo": True}, {"prompt_logprobs": True}, {"echo": True, "prompt_logprobs": True}])
def test_a_row_may_ask_for_its_prompt_alone(config: TokenizeConfig, scores: dict[str, Any]) -> None:
    own = json.dumps({"max_new_tokens": 0} | scores)
    assert [row["error_code"] for row in tokenize(table(1, _sampling=[own]), config=config).to_pylist()] == [""]
