"""The main job on a real Ray: real files in, real Parquet out, bad rows among the good, and figures of the files."""

import csv
import json
import random
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.schema import OUTPUT_SCHEMA
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from tests.support.pipeline_runs import WORDS, prompts, read, write_jsonl
from tests.support.verbs import Job

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_report_figures_are_those_of_the_files(job: Job, tmp_path: Path) -> None:
    rows = [{"prompt": prompt} for prompt in prompts(50)] + [{"prompt": None}]
    code, report, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), "limits.max_failed_rows=1")
    assert code == 0
    ok, failed = read(tmp_path / "run"), read(tmp_path / "run", "failed")
    assert (report["completed"], report["failed"], report["errors"]) == (50, 1, {"prompt_missing": 1})
    assert report["total_input_tokens"] == sum(row["num_input_tokens"] for row in ok.values())
    assert report["total_output_tokens"] == sum(row["num_generated_tokens"] for row in ok.values())
    steps = sum(row["num_generated_tokens"] - 1 for row in ok.values())
    assert report["layers_per_token"] == pytest.approx(sum(row["layers_run"] for row in ok.values()) / steps)
    assert report["output_throughput"] == pytest.approx(report["total_output_tokens"] / report["duration_s"])
    run = tmp_path / "run"
    assert json.loads((run / "report.json").read_text()) == {k: v for k, v in report.items() if k in report.keys() - {
        "output", "report", "was_finished"}}  # fmt: skip
    page = (run / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ), "the page must open offline"
    state = json.loads((run / "run.json").read_text())
    assert state["state"] == "finished"
    assert state["books"] == {"input": 51, "ok": 50, "failed": 1, "closed": True}
    assert next(iter(failed.values()))["finish_reason"] == "error"
    assert not list((run / "checkpoint").rglob("*.parquet")), "nothing half-written may remain"


@pytest.mark.slow
def test_output_schema_is_the_contract_in_every_file(job: Job, tmp_path: Path) -> None:
    table = pa.table(
        {
            "question": ["a b", None, "c " * 300],
            "when": pa.array([1, 2, None], pa.timestamp("us", tz="Europe/Berlin")),
            "price": pa.array([None, Decimal("1.50"), Decimal("-2")], pa.decimal128(12, 2)),
            "nested": pa.array([{"a": [1]}, None, {"a": []}], pa.struct([("a", pa.list_(pa.int8()))])),
            "logprobs": pa.array([[1], None, []], pa.list_(pa.int8())),  # the user's, for the run makes none
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    code, _, _ = job("-i", str(tmp_path / "in.parquet"), "input.prompt_column=question")
    assert code == 3
    extras = [table.schema.field(name) for name in table.column_names[1:]]
    rows = {}
    for path in (tmp_path / "run" / "data").rglob("*.parquet"):
        file = pq.ParquetFile(path)
        assert file.schema_arrow.remove_metadata() == pa.schema([*OUTPUT_SCHEMA, *extras])
        rows |= {row["id"]: row for row in file.read().to_pylist()}
    codes = [rows[f"in.parquet:{i}"]["error_code"] for i in range(3)]
    assert codes == ["", "prompt_missing", "prompt_too_long"]
    for i, row in enumerate(table.to_pylist()):
        assert {key: rows[f"in.parquet:{i}"][key] for key in row if key != "question"} == {
            key: value for key, value in row.items() if key != "question"
        }


@pytest.mark.slow
def test_csv_and_text_and_several_inputs(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text("".join(f"{word}\n" for word in WORDS[: i + 1]), encoding="utf-8")
    code, report, _ = job("-i", str(folder))
    assert (code, report["completed"]) == (0, 15)
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "prompt", "log"], ["1", "two\nlines, really", "x"], ["2", "", 'q"q']])
    code, report, _ = job("-i", str(tmp_path / "in.csv"), "--overwrite")
    got = read(tmp_path / "run")
    assert code == 0
    assert {key: (row["prompt"], row["log"]) for key, row in got.items()} == {
        "1": ("two\nlines, really", "x"),
        "2": ("", 'q"q'),
    }
    assert got["2"]["num_input_tokens"] == 1  # BOS alone


def batch_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"model": "opt", **body}}


def test_openai_batch_in_and_out(job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder) -> None:
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    text = "The Golden Otter"
    plain = generate(loaded, [Request("", tokenizer.encode([text])[0], Sampling(12))], make_schedule(
        {"method": "full"}, num_layers=6, max_new_tokens=12)).completions[0]  # fmt: skip
    stop = tokenizer.decode(plain.tokens)[3:5]
    lines = [
        batch_line("plain", prompt=text),
        batch_line("short", prompt=text, max_tokens=3),
        batch_line("tokens", prompt=tokenizer.encode([text])[0]),
        batch_line("stop", prompt=text, stop=stop),
        batch_line("sampled", prompt=text, temperature=1.5, seed=3, top_k=50),
        batch_line("again", prompt=text, temperature=1.5, seed=4, top_k=50),
        batch_line("n2", prompt=text, n=2),
        batch_line("huge", prompt=text, max_tokens=5000),
        batch_line("bad-token", prompt=[2, 99999]),
    ]
    code, _, _ = job("-i", str(write_jsonl(tmp_path / "batch.jsonl", lines)), "decode.method=full")
    assert code == 3
    out = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "run/batch_output.jsonl").open())}
    errors = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "run/batch_errors.jsonl").open())}
    assert {key: line["error"]["code"] for key, line in errors.items()} == {
        "n2": "bad_parameters",
        "huge": "bad_parameters",
        "bad-token": "prompt_not_text",
    }
    assert out.keys() | errors.keys() == {line["custom_id"] for line in lines}
    ok = read(tmp_path / "run")
    assert ok["plain"]["generated_tokens"] == ok["tokens"]["generated_tokens"] == plain.tokens
    assert ok["tokens"]["prompt"] == text
    assert ok["short"]["generated_tokens"] == plain.tokens[:3]
    assert ok["stop"]["generated_text"] == tokenizer.decode(plain.tokens)[: tokenizer.decode(plain.tokens).find(stop)]
    assert ok["stop"]["finish_reason"] == "stop"
    assert ok["sampled"]["generated_tokens"] != ok["again"]["generated_tokens"]
    body = out["short"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert 0 <= time.time() - body["created"] < 3600
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    for name, is_lost in (("batch_output.jsonl", False), ("batch_errors.jsonl", True)):
        torn = tmp_path / "run" / name
        whole = torn.read_bytes()
        torn.unlink() if is_lost else torn.write_bytes(whole[: len(whole) // 2])
        code, report, err = job("-i", str(tmp_path / "batch.jsonl"), "decode.method=full", "--resume")
        assert (code, report["was_finished"]) == (3, False)
        assert "its OpenAI batch files are not whole" in err
        assert torn.read_bytes() == whole
    assert job("-i", str(tmp_path / "batch.jsonl"), "decode.method=full", "--resume")[1]["was_finished"]


def test_bad_rows_fail_alone(job: Job, tmp_path: Path) -> None:
    good = [json.dumps({"id": f"g{i}", "prompt": prompt}) for i, prompt in enumerate(prompts(20))]
    bad = [
        '{"id": "null", "prompt": null}',
        '{"id": "absent"}',
        '{"id": "number", "prompt": 5}',
        '{"id": "list", "prompt": ["a"]}',
        '{"id": "long", "prompt": "%s"}' % ("word " * 500),
        '{"id": "torn", "prompt": "x',
        '{"id": "g3", "prompt": "a duplicate"}',
        "[1, 2]",
    ]
    lines = good + bad
    random.Random(1).shuffle(lines)
    lines.sort(key=lambda line: "a duplicate" in line)  # the duplicate comes second
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    code, report, err = job("-i", str(tmp_path / "in.jsonl"))
    assert code == 3
    assert "exit code 3: 8 of 28 rows failed" in err
    ok, failed = read(tmp_path / "run"), read(tmp_path / "run", "failed")
    assert ok.keys() == {f"g{i}" for i in range(20)}
    codes = {key: row["error_code"] for key, row in failed.items() if ":" not in key}
    assert codes == {
        "null": "prompt_missing", "absent": "prompt_missing", "number": "prompt_not_text", "list": "prompt_not_text",
        "long": "prompt_too_long", "g3": "duplicate_id",
    }  # fmt: skip
    assert [row["error_code"] for key, row in failed.items() if ":" in key] == ["bad_line", "bad_line"]
    assert all(row["error_message"] for row in failed.values())
    assert report["books"]["closed"]


@pytest.mark.slow  # stages/test_tokens.py cuts them too
@pytest.mark.parametrize(("mode", "kept"), [("truncate_left", "right"), ("truncate_right", "left")])
def test_long_prompts_can_be_cut(
    job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder, mode: str, kept: str
) -> None:
    text = " ".join(f"w{i}" for i in range(200))
    code, _, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", [{"prompt": text}])), f"input.too_long={mode}",
                     "decode.method=full")  # fmt: skip
    assert code == 0
    (row,) = read(tmp_path / "run").values()
    tokens = Tokenizer(tiny_checkpoint, loaded.config).encode([text])[0]
    room = 128 - 12
    cut = tokens[:room] if kept == "left" else [tokens[0], *tokens[-(room - 1) :]]
    assert row["num_input_tokens"] == room
    assert row["prompt"] == text
    full = make_schedule({"method": "full"}, num_layers=6, max_new_tokens=12)
    assert row["generated_tokens"] == generate(loaded, [Request("", cut, Sampling(12))], full).completions[0].tokens
