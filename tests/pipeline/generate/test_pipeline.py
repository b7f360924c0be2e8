"""The main job on a real Ray: real files in, real Parquet out, equal to Hugging Face and the plain decoder."""

import csv
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from transformers import OPTForCausalLM

from jobs import generate as verb
from pipeline.evaluation.score import EvaluateConfig, RunPolicy, _load_policy
from pipeline.schema import OUTPUT_SCHEMA
from skipdecode.decoder import Decoder
from skipdecode.families import read_config
from skipdecode.generate import Request, generate
from skipdecode.plan import FullDepth, SwiftPrefill
from skipdecode.sampling import Sampling
from skipdecode.schedule import make_schedule
from skipdecode.tokenizer import Tokenizer
from skipdecode.weights import save_model
from tests.support.verbs import Call

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]
WORDS = ("The Golden Otter is a cheap pub near Willow Station serves Italian food riverside 東京 Köln 🙂 £20").split()


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["", *(" ".join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(count - 1))]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(output: Path, status: str = "ok") -> dict[str, dict[str, Any]]:
    """Rows by id; fails when an id is there twice."""
    files = sorted((output / "data" / f"status={status}").glob("*.parquet"))
    rows = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


Job = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def job(call: Call, tiny_checkpoint: Path, tmp_path: Path) -> Job:
    """`job(*arguments)` runs `jobs.generate` into tmp_path/run: exit code, the JSON document, stderr."""

    def run(*arguments: str, model: Path = tiny_checkpoint) -> tuple[int, dict[str, Any], str]:
        fixed = [
            f"model.source={model}",
            "model.dtype=float32",
            "sampling.max_new_tokens=12",
            "-o",
            str(tmp_path / "run"),
        ]
        own = {argument.split("=")[0] for argument in arguments}
        return call(verb, *(a for a in fixed if a.split("=")[0] not in own), *arguments)

    return run


def hf_tokens(model: OPTForCausalLM, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        do_sample=False,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("style", "num_actors"),
    [
        pytest.param("125m", "1", marks=pytest.mark.slow),
        ("125m", "2"),
        pytest.param("350m", "[1,2]", marks=pytest.mark.slow),
        pytest.param("1.3b", "2", marks=pytest.mark.slow),
    ],
)
def test_full_depth_through_the_pipeline_equals_hugging_face(
    job: Job, tmp_path: Path, ending_checkpoint: Any, hf: Any, style: str, num_actors: str
) -> None:
    model = ending_checkpoint(style)
    config = read_config(model)
    rows = [{"id": f"r{i}", "prompt": p, "n": i, "tags": ["a"] * (i % 3)} for i, p in enumerate(prompts(40))]
    code, report, _ = job(
        "-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), "decode.method=full", f"actors.num_actors={num_actors}",
        "actors.batch_size=8", "actors.length_buckets=[8,16,32]", model=model,
    )  # fmt: skip
    assert code == 0
    got = read(tmp_path / "run")
    assert got.keys() == {row["id"] for row in rows}
    tokenizer = Tokenizer(model, config)
    lengths = set()
    for row in rows:
        mine = got[row["id"]]
        tokens = tokenizer.encode([row["prompt"]])[0]
        assert mine["generated_tokens"] == hf_tokens(hf(model), tokens, 12)
        assert mine["generated_text"] == tokenizer.decode(mine["generated_tokens"])
        assert (mine["prompt"], mine["n"], mine["tags"]) == (row["prompt"], row["n"], row["tags"])
        assert mine["num_input_tokens"] == len(tokens)
        assert mine["num_generated_tokens"] == len(mine["generated_tokens"])
        assert mine["finish_reason"] == ("stop" if mine["generated_tokens"][-1] == config.eos_token_id else "length")
        assert mine["layers_run"] == mine["ffns_run"] == 6 * (mine["num_generated_tokens"] - 1)
        lengths.add(mine["num_generated_tokens"])
    assert len(lengths) > 2, "rows must end at different steps for this test to mean anything"
    assert report["books"] == {"input": 40, "ok": 40, "failed": 0, "closed": True}
    # An actor reports with its first batch, and 40 rows can be over before the second one has loaded.
    assert 1 <= len(report["actors"]) <= (1 if num_actors == "1" else 2)


@pytest.mark.parametrize(
    "decode",
    [
        {"method": "skipdecode", "max_layers": 5, "min_layers": 2},
        pytest.param({"method": "early_exit", "speedup": 2}, marks=pytest.mark.slow),
        pytest.param({"method": "unified", "layers": 3}, marks=pytest.mark.slow),
        pytest.param(
            {
                "method": "unified",
                "layers": 5,
                "ffn_skip": {"threshold": 0.85, "cold_start": 1, "cold_end": 1, "warmup_tokens": 2},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda decode: f"{decode['method']}{'-ffn' * ('ffn_skip' in decode)}",
)
def test_skipping_through_the_pipeline_equals_the_decoder_row_by_row(
    job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder, decode: dict[str, Any]
) -> None:
    rows = [{"prompt": prompt} for prompt in prompts(30, seed=1)]
    settings = [f"decode.{key}={value}" for key, value in decode.items()]
    code, report, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings, "baseline.fraction=1.0")
    assert code == 0
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    schedule = make_schedule(decode, num_layers=6, max_new_tokens=12)
    got = read(tmp_path / "run")
    assert sorted(got) == sorted(f"in.jsonl:{i}" for i in range(30))
    for i, row in enumerate(rows):
        request = Request("", tokenizer.encode([row["prompt"]])[0], Sampling(max_new_tokens=12))
        alone = generate(loaded, [request], schedule).completions[0]
        mine = got[f"in.jsonl:{i}"]
        assert (mine["generated_tokens"], mine["layers_run"]) == (alone.tokens, alone.layers_run)
        assert mine["ffns_run"] == alone.ffns_run
    steps = sum(len(row["generated_tokens"]) - 1 for row in got.values())
    assert report["ffns_per_token"] == pytest.approx(sum(row["ffns_run"] for row in got.values()) / steps)
    assert (report["ffns_per_token"] < report["layers_per_token"]) is ("ffn_skip" in decode)
    s = report["speedup"]
    assert s["batches"] >= 2
    assert s["ci95"][0] < s["measured"] < s["ci95"][1]
    assert s["layers"] > 1
    if "ffn_skip" not in decode:  # deciding by row costs more than it saves at this width, and the prediction says so
        assert s["predicted"] > 1
    assert 0 <= report["agreement"]["exact_rows"] <= report["agreement"]["token_match"] <= 1


@pytest.mark.slow
def test_swiftkv_through_the_pipeline_equals_the_decoder_row_by_row(
    job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder
) -> None:
    """The prompt stops half-way for every row of a job, and what scores the run knows."""
    model = loaded.with_swiftkv(3, 1)
    assert model.swift is not None
    with torch.no_grad():
        model.swift.kv.weight += 0.4 * torch.randn(
            model.swift.kv.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    save_model(model, tmp_path / "model")
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path / "model")
    rows = [{"prompt": prompt} for prompt in prompts(30, seed=2)]
    settings = ["decode.method=full", "prefill.method=swiftkv", "baseline.fraction=1.0"]
    code, report, _ = job(
        "-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings, model=tmp_path / "model"
    )  # fmt: skip
    assert code == 0
    assert report["prefill"] == "swiftkv"
    assert report["speedup"]["batches"] >= 2, "full depth without SwiftKV is what it is measured against"
    assert report["agreement"]["token_match"] < 1
    tokenizer, schedule = Tokenizer(tiny_checkpoint, model.config), SwiftPrefill(FullDepth(6), 3)
    got = read(tmp_path / "run")
    for i, row in enumerate(rows):
        request = Request("", tokenizer.encode([row["prompt"]])[0], Sampling(max_new_tokens=12))
        assert got[f"in.jsonl:{i}"]["generated_tokens"] == generate(model, [request], schedule).completions[0].tokens
    state = json.loads((tmp_path / "run/run.json").read_text())
    policy = _load_policy(EvaluateConfig(generated=str(tmp_path / "run")), RunPolicy.of(state), torch.device("cpu"))
    assert policy.schedule == SwiftPrefill(FullDepth(6), 3)


@pytest.mark.slow
def test_the_same_schedule_as_full_depth_agrees_with_it(job: Job, tmp_path: Path) -> None:
    rows = [{"prompt": prompt} for prompt in prompts(20)]
    settings = ["decode.max_layers=6", "decode.min_layers=6", "decode.method=skipdecode", "baseline.fraction=1.0"]
    _, report, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings)
    assert report["agreement"] == {"exact_rows": 1.0, "token_match": 1.0, "rows": 20}
    assert report["speedup"]["layers"] == 1.0


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
        csv.writer(file).writerows([["id", "prompt", "note"], ["1", "two\nlines, really", "x"], ["2", "", 'q"q']])
    code, report, _ = job("-i", str(tmp_path / "in.csv"), "--overwrite")
    got = read(tmp_path / "run")
    assert code == 0
    assert {key: (row["prompt"], row["note"]) for key, row in got.items()} == {
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


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_workers_or_batches(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(30))]
    sampled = ["sampling.temperature=1.0", "sampling.seed=5", "sampling.top_p=0.95"]
    job("-i", str(write_jsonl(tmp_path / "a.jsonl", rows)), *sampled, "actors.batch_size=4")
    first = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    random.Random(0).shuffle(rows)
    job("-i", str(write_jsonl(tmp_path / "b.jsonl", rows)), *sampled, "actors.num_actors=2", "--overwrite")
    assert {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()} == first
    assert len({tuple(tokens) for tokens in first.values()}) > 20


@pytest.mark.slow
def test_deterministic_bfloat16_tokens_do_not_depend_on_neighbours(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(24))]
    fixed = ["model.dtype=bfloat16", "sampling.deterministic=true", "actors.batch_size=8"]
    job("-i", str(write_jsonl(tmp_path / "a.jsonl", rows)), *fixed)
    first = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    random.Random(0).shuffle(rows)
    job("-i", str(write_jsonl(tmp_path / "b.jsonl", rows[:13])), *fixed, "--overwrite")
    second = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    assert second == {row["id"]: first[row["id"]] for row in rows[:13]}


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
    assert "exit code 3: 8 rows failed" in err
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


def test_resume_writes_what_is_missing_and_nothing_twice(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(40))]
    rows += [{"id": "7", "prompt": "a duplicate"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    arguments = ["-i", str(source), "actors.batch_size=4", "actors.window_batches=1", "limits.max_failed_rows=1"]
    assert job(*arguments)[0] == 0
    before = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    files = sorted((tmp_path / "run/data/status=ok").glob("*.parquet"))
    assert len(files) > 4
    lost = {row for path in files[::2] for row in pq.ParquetFile(path).read(["id"])["id"].to_pylist()}
    for path in files[::2]:
        path.unlink()
    state = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(state | {"state": "interrupted"}))  # as a killed driver leaves it
    code, report, err = job(*arguments, "--resume")
    assert code == 0
    assert f"{len(lost)} rows to do, {41 - len(lost)} done" in err
    assert {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()} == before
    assert report["books"] == {"input": 41, "ok": 40, "failed": 1, "closed": True}
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run/data").rglob("*.parquet")}
    code, report, err = job(*arguments, "--resume")
    assert (code, report["was_finished"]) == (0, True)
    assert "finished before, nothing to do" in err
    assert written == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run/data").rglob("*.parquet")}


def test_resume_refuses_another_run(job: Job, tmp_path: Path, tiny_checkpoint: Path, checkpoint_factory: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts(8)])
    assert job("-i", str(source))[0] == 0
    for change, key in (
        (["sampling.max_new_tokens=13"], "sampling.max_new_tokens: the run was started with 12, now it is 13"),
        (["decode.speedup=3"], "decode.speedup: the run was started with 2, now it is 3"),
        (["input.limit=5"], "input.limit: the run was started with None, now it is 5"),
    ):
        code, _, err = job("-i", str(source), "--resume", *change)
        assert code == 2
        assert key in err
    other = tmp_path / "other-model"
    shutil.copytree(checkpoint_factory("125m", layers=6, seed=9), other)
    code, _, err = job("-i", str(source), "--resume", model=other)
    assert (code, "model.files: " in err) == (2, True)
    write_jsonl(source, [{"prompt": prompt} for prompt in prompts(9)])
    code, _, err = job("-i", str(source), "--resume")
    assert (code, "input.files: " in err) == (2, True)


@pytest.mark.slow
def test_a_lost_collector_costs_figures_and_no_run(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector dies right after its start; every row is written all the same."""
    import pipeline.generate.stream

    real = pipeline.generate.stream.start_collector

    def short_lived(*arguments: Any) -> Any:
        collector = real(*arguments)
        ray.kill(collector)
        return collector

    monkeypatch.setattr(pipeline.generate.stream, "start_collector", short_lived)
    rows = [{"prompt": prompt} for prompt in prompts(20)]
    code, report, err = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)))
    assert code == 0, err
    assert "the collector is gone" in err
    assert report["books"] == {"input": 20, "ok": 20, "failed": 0, "closed": True}
    assert report["speedup"]["measured"] is None


@pytest.mark.slow
def test_a_file_left_behind_by_another_cluster_does_not_matter(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Path(tempfile.mkdtemp(prefix="r"))  # short: Ray puts sockets there
    (stale / "ray").mkdir()
    (stale / "ray/ray_current_cluster").write_text("192.0.2.2:26379")
    monkeypatch.setenv("RAY_TMPDIR", str(stale))
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = [sys.executable, "-m", "jobs.generate", f"model.source={tiny_checkpoint}", "-i", str(source), "-o"]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "core_worker.cc" not in done.stderr, "a line that looks like an error: pipeline.ray_noise"
