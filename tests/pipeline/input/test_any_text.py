"""Any text and any bytes through every format: nothing is lost, nothing raises."""

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.input_helpers import column, read_rows, read_table, write, write_jsonl, write_parquet

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# The kinds of the Big List of Naughty Strings: what a reader, a quoter or a line splitter trips over.
NAUGHTY = [
    "",
    " ",
    "\n",
    "\r\n",
    "\t",
    '"',
    '""',
    "'",
    ",",
    "\\",
    "\\u0000",
    "\x00",
    "\x1a",
    "\x85",
    "a\r",
    "\ra",
]
NAUGHTY += [
    "\u2028",
    "\u2029",
    "\ufeff",
    "\ufffe",
    "\u00a0",
    "\u202e",
    "\U0001f468\u200d\U0001f469",
    "Ω≈ç√∫",
    "ﷺ",
]
NAUGHTY += [
    "NaN",
    "null",
    "None",
    "undefined",
    "1e999",
    "${HOME}",
    "{{7*7}}",
    "<|endoftext|>",
    "</s>",
    "';--",
]
SETTINGS = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@given(prompts=st.lists(ANY_TEXT, min_size=1, max_size=8), escape=st.booleans())
def test_jsonl_round_trip(tmp_path: Path, prompts: list[str], escape: bool) -> None:
    rows_in = [{"id": f"{n}:{prompt}", "prompt": prompt} for n, prompt in enumerate(prompts)]
    rows = read_rows(write_jsonl(tmp_path / "a.jsonl", rows_in, ensure_ascii=escape), rows_per_block=3)
    assert [(r["id"], r["prompt"], r["error_code"]) for r in rows] == [(r["id"], r["prompt"], "") for r in rows_in]


@SETTINGS
@given(
    prompts=st.lists(ANY_TEXT, min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_csv_round_trip(tmp_path: Path, prompts: list[str], quoting: Any, end: str) -> None:
    with open(tmp_path / "a.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=quoting, lineterminator=end)
        writer.writerow(["id", "prompt"])
        writer.writerows((f"{n}:{prompt}", prompt) for n, prompt in enumerate(prompts))
    rows = read_rows(tmp_path / "a.csv", rows_per_block=3)
    expected = [(f"{n}:{prompt}", prompt, "") for n, prompt in enumerate(prompts)]
    assert [(r["id"], r["prompt"], r["error_code"]) for r in rows] == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_naughty_strings(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [{"prompt": text} for text in NAUGHTY], ensure_ascii=False)
    elif kind == "parquet":
        write_parquet(path, {"prompt": NAUGHTY})
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["prompt"], *([text] for text in NAUGHTY)])
    rows = read_rows(path, rows_per_block=4)
    assert column(rows, "prompt") == NAUGHTY
    assert column(rows, "error_code") == [""] * len(NAUGHTY)


@SETTINGS
@given(data=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.csv", "a.txt", "a.tsv"]))
def test_no_bytes_kill_the_job(tmp_path: Path, data: bytes, name: str) -> None:
    """Behind one good line, any bytes are rows, good or failed, and scan and read agree on how many."""
    start = {"a.txt": b"ok", "a.jsonl": b'{"prompt": "ok"}'}.get(name, b"prompt\nok")
    table = read_table(write(tmp_path / name, start + b"\n" + data))
    assert table["prompt"][0].as_py() == "ok"
