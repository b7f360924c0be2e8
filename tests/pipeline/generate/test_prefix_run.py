"""A corpus of three templates with few-shot examples, through `jobs.generate`, with shared prefixes and without."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.generate import main as generate
from jobs.verify import main as verify
from tests.support.processes import row_list

pytestmark = pytest.mark.ray

SHOTS = " ".join(f"name[The Pub {i}] is a pub;" for i in range(3))
TEMPLATES = {"say": f"{SHOTS} say: ", "ask": f"Ask of it. {SHOTS} ask: ", "sell": f"{SHOTS} sell it: "}


def write_corpus(path: Path) -> None:
    rows = [
        {"id": f"{document}-{name}", "prompt": f"{template}row {document}"}
        for document in range(12)
        for name, template in TEMPLATES.items()
    ]
    rows.append({"id": "alone", "prompt": "Nothing like the others"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.slow
def test_a_corpus_of_templates(ending_checkpoint: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "in.jsonl")
    arguments = [
        f"model.source={ending_checkpoint('1.3b')}", "-i", str(tmp_path / "in.jsonl"), "sampling.max_new_tokens=10",
        "actors.num_actors=1", "actors.batch_size=16", "model.dtype=float32", "decode.method=skipdecode",
        "decode.max_layers=5", "decode.min_layers=2", "baseline.fraction=0.5",
    ]  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for prefix in ("auto", "off"):
        output = tmp_path / prefix
        assert generate([*arguments, f"decode.prefix={prefix}", "-o", str(output)]) == 0
        found[prefix] = sorted(row_list(output, "ok"), key=lambda row: str(row["id"]))
        report = json.loads((output / "report.json").read_text(encoding="utf-8"))
        assert (report["prefix_tokens_saved"] > 0.3 * report["total_input_tokens"]) == (prefix == "auto")
        assert (report["prefix_saved_s"] > 0) == (prefix == "auto")
        assert report["books"]["closed"]
        assert verify([str(output)]) == 0
    assert len(found["auto"]) == 37
    assert found["auto"] == found["off"]
    assert generate([*arguments, "decode.prefix=off", "-o", str(tmp_path / "auto"), "--resume"]) == 2
    assert generate([*arguments, "-o", str(tmp_path / "auto"), "--resume"]) == 0
