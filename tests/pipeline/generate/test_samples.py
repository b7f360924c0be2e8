"""Runs of several rows per document, on a real Ray: rows, books, resume, verify, retry, OpenAI answers."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from actors.tokenizer import Tokenizer
from jobs import generate, retry, verify
from skipdecode.decoder import Decoder
from skipdecode.families import read_config
from skipdecode.generate import Request
from skipdecode.generate import generate as decode
from skipdecode.plan import FullDepth
from skipdecode.sampling import Sampling
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


def test_samples_are_rows_and_a_resume_makes_only_those_that_are_missing(
    call: Call, tiny_checkpoint: Path, loaded: Decoder, tmp_path: Path
) -> None:
    place, source = tmp_path / "run", tmp_path / "in.jsonl"
    documents = [{"id": f"r{n}", "prompt": f"The Golden Otter {n}", "n": n} for n in range(5)] + [{"id": "bad"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in documents))
    keys = ("sampling.n=3", "sampling.temperature=1.0", "sampling.seed=4", "limits.max_failed_rows=3")
    code, report, err = run(call, tiny_checkpoint, place, source, *keys)
    assert code == 0, err
    assert "input: 6 documents, 18 rows in 1 jsonl file" in err
    assert report["books"] == {"input": 18, "ok": 15, "failed": 3, "closed": True}
    rows = read(place)
    assert rows.keys() == {f"{row['id']}-{j}" for row in documents for j in range(3)}
    assert {(row["source_id"], row["template"], row["sample"]) for row in rows.values()} == {
        (row["id"], None, j) for row in documents for j in range(3)
    }
    assert Counter(row["error_code"] for row in rows.values()) == {"": 15, "prompt_missing": 3}
    tokenizer = Tokenizer(tiny_checkpoint, read_config(tiny_checkpoint))
    sampling = Sampling(max_new_tokens=NEW, temperature=1.0, seed=4)
    for row in rows.values():
        if row["error_code"]:
            continue
        assert row["n"] == int(row["source_id"][1:])
        request = Request(row["id"], tokenizer.encode([row["prompt"]])[0], sampling)
        (completion,) = decode(loaded, [request], FullDepth(6)).completions
        assert row["generated_tokens"] == completion.tokens, "the random numbers are keyed by the row's own id"
    assert len({tuple(rows[f"r0-{j}"]["generated_tokens"]) for j in range(3)}) > 1
    assert call(verify, place)[1]["rows"] == {"ok": 15, "failed": 3, "input": 18}

    for path in files(place):  # rows are lost: the third sample of one document, and the whole of another
        table = pq.read_table(path, partitioning=None)
        keep = [id not in ("r1-2", "r3-0", "r3-1", "r3-2") for id in table["id"].to_pylist()]
        pq.write_table(table.filter(keep).replace_schema_metadata({}), path)
    before = {path: path.read_bytes() for path in files(place)}
    assert "missing: 4" in call(verify, place)[2]
    code, report, err = run(call, tiny_checkpoint, place, source, *keys, "--resume")
    assert code == 0, err
    assert "4 rows to do, 14 done" in err
    assert {path: path.read_bytes() for path in before} == before
    assert read(place) == rows
    assert call(verify, place)[0] == 0
    code, _, err = run(
        call, tiny_checkpoint, place, source, *(k for k in keys if "n=" not in k), "sampling.n=2", "--resume"
    )
    assert code == 2
    assert "sampling.n: the run was started with 3, now it is 2" in err


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
    assert [line["error"]["code"] for line in bad.values()] == ["prompt_too_long", "bad_parameters", "bad_parameters"]
    body = good["a"]["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (j, rows[f"a-{j}"]["generated_text"]) for j in range(3)
    ]
    assert body["usage"]["completion_tokens"] == sum(rows[f"a-{j}"]["num_generated_tokens"] for j in range(3))
    assert call(verify, place)[0] == 0
    shutil.copy(place / "batch_output.jsonl", tmp_path / "kept")
    (place / "batch_output.jsonl").write_text("")
    assert "batch_output.jsonl and batch_errors.jsonl: 3 lines for 5 documents" in call(verify, place)[2]
    run(call, tiny_checkpoint, place, source, "limits.max_failed_rows=9", "--resume")
    assert answers("batch_output.jsonl") == good

    code, document, err = call(retry, place, "input.too_long=truncate_left")
    assert (code, document["tried"], document["recovered"]) == (0, 5, 2), err
    good, bad = answers("batch_output.jsonl"), answers("batch_errors.jsonl")
    assert (good.keys(), bad.keys()) == ({"a", "b", "c"}, {"d", "e"})
    assert len(good["c"]["response"]["body"]["choices"]) == 2
    assert call(verify, place)[0] == 0
