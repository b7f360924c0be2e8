"""Runs of several rows per document, on a real Ray: rows, books, resume, verify, retry, OpenAI answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import generate, retry, verify
from pipeline.input.ids import sum_outputs
from pipeline.store.run_folder import id_metadata
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate as decode
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth
from tests.support.verbs import Call

pytestmark = pytest.mark.ray

NEW = 6


def run(call: Call, model: Path, place: Path, source: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    return call(
        generate, "-i", source, "-o", place, f"model.source={model}", "model.dtype=float32", "decode.method=full",
        f"sampling.max_new_tokens={NEW}", "actors.num_actors=1", "actors.batch_size=4", *more,
    )  # fmt: skip


def files(place: Path) -> list[Path]:
    return sorted(place.glob("data/status=*/*.parquet"))


def read(place: Path) -> dict[str, dict[str, Any]]:
    rows = [row for path in files(place) for row in pq.ParquetFile(path).read().to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


TEMPLATES = {"ask": "Ask: {{ text }}", "tell": "{{ text }} {{ prompt }}"}


@pytest.mark.slow
def test_templates_and_samples_are_rows_and_a_resume_makes_only_those_that_are_missing(
    call: Call, tiny_checkpoint: Path, loaded: Decoder, tmp_path: Path
) -> None:
    place, source, settings = tmp_path / "run", tmp_path / "in.jsonl", tmp_path / "run.yaml"
    documents: list[dict[str, Any]] = [{"id": f"r{n}", "text": f"Otter {n}", "prompt": "pub", "n": n} for n in range(4)]
    documents[3].pop("prompt")  # so its second template has an undefined variable
    source.write_text("".join(json.dumps(row) + "\n" for row in documents) + "not json\n")
    tree = {"input": {"templates": TEMPLATES}, "sampling": {"n": 2, "temperature": 1.0, "seed": 4}}
    settings.write_text(json.dumps(tree | {"limits": {"max_failed_rows": 6}}))  # which is YAML too
    code, report, err = run(call, tiny_checkpoint, place, source, "--config", str(settings))
    assert code == 0, err
    assert "input: 5 documents, 20 rows in 1 jsonl file" in err
    assert report["books"] == {"input": 20, "ok": 14, "failed": 6, "closed": True}
    rows = read(place)
    ids = [*(row["id"] for row in documents), "in.jsonl:4"]
    assert {(row["id"], row["source_id"], row["template"], row["sample"]) for row in rows.values()} == {
        (f"{id}-{name}-{j}", id, name, j) for id in ids for name in TEMPLATES for j in range(2)
    }
    codes = {id: row["error_code"] for id, row in rows.items() if row["error_code"]}
    assert codes == {f"r3-tell-{j}": "bad_template" for j in range(2)} | {
        f"in.jsonl:4-{name}-{j}": "bad_line" for name in TEMPLATES for j in range(2)
    }
    tokenizer = Tokenizer(tiny_checkpoint, read_config(tiny_checkpoint))
    sampling = Sampling(max_new_tokens=NEW, temperature=1.0, seed=4)
    for row in rows.values():
        if row["error_code"]:
            continue
        n = int(row["source_id"][1:])
        wanted = {"ask": f"Ask: Otter {n}", "tell": f"Otter {n} pub"}[row["template"]]
        assert (row["prompt"], row["n"], row["text"]) == (wanted, n, f"Otter {n}")
        request = Request(row["id"], tokenizer.encode([wanted])[0], sampling)
        (completion,) = decode(loaded, [request], FullDepth(6)).completions
        assert row["generated_tokens"] == completion.tokens, "the random numbers are keyed by the row's own id"
    assert len({tuple(rows[f"r0-ask-{j}"]["generated_tokens"]) for j in range(2)}) > 1
    assert call(verify, place)[1]["rows"] == {"ok": 14, "failed": 6, "input": 20}

    lost = ("r1-tell-1", "r2-ask-0", "r2-ask-1", "r2-tell-0", "r2-tell-1")  # a sample of one, and all of another
    for path in files(place):
        table = pq.read_table(path, partitioning=None)
        keep = [id not in lost for id in table["id"].to_pylist()]
        rest = table.filter(keep)
        pq.write_table(rest.replace_schema_metadata(id_metadata(sum_outputs(rest))), path)
    before = {path: path.read_bytes() for path in files(place)}
    assert "missing: 5" in call(verify, place)[2]
    code, report, err = run(call, tiny_checkpoint, place, source, "--config", str(settings), "--resume")
    assert code == 0, err
    assert "5 rows to do, 15 done" in err
    assert {path: path.read_bytes() for path in before} == before
    assert read(place) == rows
    assert call(verify, place)[0] == 0
    for change, key in (
        ("sampling.n=3", "sampling.n: the run was started with 2, now it is 3"),
        ("input.templates.ask=Ask - {{ text }}", "input.templates: the run was started with"),
    ):
        code, _, err = run(call, tiny_checkpoint, place, source, "--config", str(settings), "--resume", change)
        assert (code, key in err) == (2, True), err


@pytest.mark.slow
def test_samples_of_openai_lines_come_back_as_choices(call: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    place, source = tmp_path / "run", tmp_path / "in.jsonl"
    bodies: dict[str, dict[str, Any]] = {
        "a": {"prompt": "The Golden", "n": 3, "temperature": 1}, "b": {"prompt": "Otter"},
        "c": {"prompt": "x " * 200, "n": 2, "temperature": 1}, "d": {"prompt": "x", "n": 2},
        "e": {"prompt": "x", "n": 0},
    }  # fmt: skip
    lines = [{"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} for id, body in bodies.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = run(call, tiny_checkpoint, place, source, "limits.max_failed_rows=9")
    assert code == 0, err
    assert "input: 5 documents, 9 rows in 1 openai_batch file" in err
    rows = read(place)
    assert rows.keys() == {"a-0", "a-1", "a-2", "b", "c-0", "c-1", "d-0", "d-1", "e"}

    def answers(name: str) -> dict[str, Any]:
        found = [json.loads(line) for line in (place / name).read_text().splitlines()]
        assert len({line["custom_id"] for line in found}) == len(found)
        return {line["custom_id"]: line for line in found}

    good, bad = answers("batch_output.jsonl"), answers("batch_errors.jsonl")
    assert (good.keys(), bad.keys()) == ({"a", "b"}, {"c", "d", "e"})
    codes = {id: line["error"]["code"] for id, line in bad.items()}
    assert codes == {"c": "prompt_too_long", "d": "bad_parameters", "e": "bad_parameters"}
    body = good["a"]["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (j, rows[f"a-{j}"]["generated_text"]) for j in range(3)
    ]
    assert body["usage"]["completion_tokens"] == sum(rows[f"a-{j}"]["num_generated_tokens"] for j in range(3))
    assert call(verify, place)[0] == 0
    shutil.copy(place / "batch_output.jsonl", tmp_path / "kept")
    (place / "batch_output.jsonl").write_text("")
    assert "batch_output.jsonl and batch_errors.jsonl: 3 lines for 5 documents" in call(verify, place)[2]
    (place / "batch_output.jsonl").write_text("{}\n" * 2)
    assert "batch_output.jsonl: is not as it was written (" in call(verify, place)[2]
    run(call, tiny_checkpoint, place, source, "limits.max_failed_rows=9", "--resume")
    assert answers("batch_output.jsonl") == good

    code, document, err = call(retry, place, "input.too_long=truncate_left")
    assert (code, document["tried"], document["recovered"]) == (0, 5, 2), err
    good, bad = answers("batch_output.jsonl"), answers("batch_errors.jsonl")
    assert (good.keys(), bad.keys()) == ({"a", "b", "c"}, {"d", "e"})
    assert len(good["c"]["response"]["body"]["choices"]) == 2
    assert call(verify, place)[0] == 0
