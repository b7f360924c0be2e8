"""Pairs from files: formats, what is a bad row, and what is an error of the whole."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError
from pipeline.input.training_pairs import encode_pairs, read_pairs, scan_pairs
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.families import config_of
from skipdecode.families.opt import OPTConfig
from tests.support.family_tokenizers import byte_level, write_folder

GOOD = [("say ab", "abab"), ("", "nothing"), ("two\nlines, and 東京", 'a "quote"')]
Rows = list[tuple[Any, Any]]


def write(path: Path, rows: Rows) -> Path:
    objects = [{"id": [1], "prompt": prompt, "response": response} for prompt, response in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(objects), path, row_group_size=2)
    elif ".csv" in path.suffixes:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "prompt", "response"])
            writer.writeheader()
            writer.writerows(objects)
    else:
        text = "".join(json.dumps(row) + "\n" for row in objects)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl", "pairs.parquet", "pairs.jsonl.gz"])
def test_every_format_gives_the_same_pairs(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, GOOD)
    assert read_pairs(str(path), "prompt", "response") == GOOD
    found = scan_pairs(str(path), "prompt", "response")
    assert found.problems == []
    assert found.where[-1].startswith(f"{path} ")
    assert found.where[-1].endswith(" 3")


def test_several_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name, [(name, "x")])
    texts = [("a.jsonl", "x"), ("b.jsonl", "x")]
    assert read_pairs(str(tmp_path), "prompt", "response") == texts
    assert read_pairs(f"{tmp_path}/*.jsonl", "prompt", "response") == texts
    assert read_pairs([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"], "prompt", "response") == texts[::-1]


def test_bad_rows_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [*GOOD, *[("p", "")] * 7])
    found = scan_pairs(str(path), "prompt", "response")
    assert found.texts == GOOD
    assert len(found.problems) == 7
    with pytest.raises(ConfigError) as caught:
        read_pairs(str(path), "prompt", "response")
    lines = str(caught.value).splitlines()
    assert lines[0] == "data.path: 7 bad rows; repair or remove them"
    assert lines[1] == f"{path} line 4: column 'response' is empty"
    assert lines[-1] == "... and 2 more"
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("name", "contents", "problem"),
    [
        ("p.jsonl", b'{"prompt": "a", "response": null}', "line 1: column 'response' is missing or null"),
        ("p.jsonl", b'{"prompt": ["a"], "response": "b"}', "line 1: column 'prompt' must be a string, got a list"),
        ("p.jsonl", b'\n{"prompt": "a", "respo', "line 2: not valid JSON"),
        ("p.jsonl", b'{"prompt": "\xff", "response": "b"}', "line 1: not valid UTF-8"),
        ("p.jsonl", b"[1]", "line 1: expected a JSON object, got a list"),
        ("p.csv", b"prompt,response\na,b,c\n", "line 2: 3 fields, but the header has 2"),
        ("p.csv", b"prompt,response\na,\xff\n", "line 2: column 'response' is not valid UTF-8"),
        ("p.csv", b'prompt,response\na,"b\n', "line 2: not valid CSV"),
        ("p.csv", b"prompt,response\na,\n", "row 1: column 'response' is empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, contents: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    found = scan_pairs(str(path), "prompt", "response")
    assert found.texts == []
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{path} {problem}")


def test_parquet_rows_may_be_bad_too(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    table = pa.table(
        {"prompt": pa.array(["a", None, "c"]), "response": pa.chunked_array([pa.array(["x", "y"]), broken])}
    )
    pq.write_table(table, tmp_path / "p.parquet")
    found = scan_pairs(str(tmp_path / "p.parquet"), "prompt", "response")
    assert found.texts == [("a", "x")]
    assert [problem.partition(".parquet ")[2] for problem in found.problems] == [
        "row 2: column 'prompt' is missing or null",
        "row 3: column 'response' is not valid UTF-8",
    ]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("p.jsonl", b"", "data.path: .*no rows"),
        ("p.csv", b"", "data.prompt_column: .*no column 'prompt'"),
        ("p.csv", b"prompt,response\n", "data.path: .*no rows"),
        ("p.csv", b"prompt,answer\na,b\n", "data.response_column: .*no column 'response'; there are: answer, prompt"),
        ("p.jsonl", b'{"question": "a", "response": "b"}', "data.prompt_column: .*there are: question, response"),
        ("p.parquet", b"PAR1 torn", "data.path: .*cannot be read"),
        ("p.txt", b"text", "data.path: .* is text; pairs are Parquet, JSONL or CSV"),
        ("p.xyz", b"text", "data.path: give files named .parquet, .jsonl, .csv or .tsv"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, contents: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ConfigError, match=message):
        scan_pairs(str(tmp_path / name), "prompt", "response")


def test_a_column_of_another_type_is_an_error_of_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "response": [3]}), tmp_path / "p.parquet")
    with pytest.raises(
        ConfigError, match=r"data.response_column: 'response' in .* has type int64; it must be a string"
    ):
        scan_pairs(str(tmp_path / "p.parquet"), "prompt", "response")


def test_an_absent_file_and_one_column_for_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: .*nowhere.csv"):
        scan_pairs(str(tmp_path / "nowhere.csv"), "prompt", "response")
    with pytest.raises(ConfigError, match="flag_r: is the prompt column too"):
        scan_pairs(str(tmp_path), "text", "text", ("flag", "flag_p", "flag_r"))


def test_tokens_begin_with_bos_and_end_with_eos(tokenizer_folder: Path) -> None:
    config = OPTConfig(vocab_size=320, bos_token_id=2, eos_token_id=3)
    tokenizer = Tokenizer(tokenizer_folder, config)
    (first, second) = encode_pairs(tokenizer, [("a pub", "cheap"), ("", "x")])
    assert first == (tokenizer.encode(["a pub"])[0], [*tokenizer.encode(["cheap"])[0][1:], 3])
    assert second[0] == [2]  # an empty prompt is BOS alone


def test_a_prompt_that_a_chat_template_made_begins_with_one_bos(tokenizer_folder: Path) -> None:
    config = OPTConfig(vocab_size=320, bos_token_id=2, eos_token_id=3)
    tokenizer = Tokenizer(tokenizer_folder, config)
    bos = next(text for text in ("<s>", "</s>", "<pad>", "<unk>") if tokenizer.encode_rendered([text]) == [[2]])
    (rendered, plain) = encode_pairs(tokenizer, [(f"{bos}a pub", "cheap"), ("a pub", "cheap")])
    assert rendered == plain
    assert rendered[0].count(2) == 1


def test_a_rendered_prompt_is_read_as_the_run_reads_it(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer(tokenizer_folder, OPTConfig(vocab_size=320, bos_token_id=2, eos_token_id=3))
    ((prompt, response),) = encode_pairs(tokenizer, [("a pub", "cheap")], is_rendered=True)
    assert prompt == tokenizer.encode_rendered(["a pub"])[0] == tokenizer.encode(["a pub"])[0][1:]
    assert response[-1] == 3


def test_of_several_ends_the_one_of_the_tokenizer_is_written(tmp_path: Path) -> None:
    """As Llama 3's chats end: its first EOS is that of a text, and its tokenizer's that of an answer."""
    shape = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = config_of(shape | {"model_type": "llama", "eos_token_id": [1, 0]})
    folder = write_folder(tmp_path, byte_level("qwen2"), "llama", tokenizer_class="PreTrainedTokenizerFast")
    names = {number: text for text, number in byte_level("qwen2").get_vocab().items()}
    for named, end in ((names[0], 0), (names[1], 1), (names[5], 1)):
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": named}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ((_, response),) = encode_pairs(Tokenizer(folder, config), [("a pub", "cheap")])
        assert response[-1] == end


def test_a_response_has_no_bos_and_loses_no_token_where_the_model_has_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level("qwen2"), "qwen2", tokenizer_class="Qwen2Tokenizer")
    shape = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokenizer = Tokenizer(folder, config_of(shape | {"model_type": "qwen2", "eos_token_id": 1}))
    ((prompt, response), (empty, _)) = encode_pairs(tokenizer, [("a pub", "cheap"), ("", "x")])
    assert tokenizer.decode(prompt) == "a pub"
    assert tokenizer.decode(response) == "cheap"
    assert response[-1] == 1
    assert empty == []


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl", "pairs.parquet"])
def test_a_response_that_a_run_cut_has_no_end(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    rows = [{"prompt": "a", "response": "bc", "finish_reason": reason} for reason in ("stop", "length", "")]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = ["prompt,response,finish_reason", *(",".join(row.values()) for row in rows)]
        texts = lines if name.endswith("csv") else list(map(json.dumps, rows))
        path.write_text("".join(f"{text}\n" for text in texts))
    found = scan_pairs(str(path), "prompt", "response")
    assert found.is_cut == [False, True, False]
    config = OPTConfig(vocab_size=320, bos_token_id=2, eos_token_id=3)
    pairs = encode_pairs(Tokenizer(tokenizer_folder, config), found.texts, found.is_cut)
    assert [response[-1] == 3 for _, response in pairs] == [True, False, True]
