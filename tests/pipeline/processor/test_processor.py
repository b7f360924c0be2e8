"""Processors on a real Ray that somebody else has started: rows, laziness, rows that kill their worker, the page."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.data.expressions import col

from actors.generator import WindowResult
from pipeline.config.job import ConfigError
from pipeline.processor import build, build_processor
from pipeline.processor.stage import KeyedModelThread, ProcessorStage, without_key
from skipdecode import TextModel, generate, load
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request
from tests.docs.pages import ROOT, run_blocks

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
NEW = 6
SAMPLED = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}


@pytest.fixture(scope="module", autouse=True)
def a_ray_of_the_user(own_ray: None) -> None:
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> TextModel:
    return load(tiny_checkpoint, dtype="float32", device="cpu")


def config(source: Path, **sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {"source": str(source), "dtype": "float32"},
        "decode": {"method": "full"},
        "sampling": SAMPLED,
        "actors": {"num_actors": 1, "num_cpus": 1, "batch_size": 4, "window_batches": 2},
    }
    return tree | sections


@pytest.mark.slow
def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_blocks("processor.md") == 1


def test_rows_of_a_dataset_come_out_once_each(model: TextModel, tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"r{n % 20}", "prompt": f"The Otter {n}", "n": n, "tags": ["a"] * (n % 3), "x": np.full((2, 2), n)}
        for n in range(30)
    ]
    rows[4]["prompt"], rows[5]["prompt"], rows[6]["id"] = None, "x " * 400, None
    seen = tmp_path / "seen"

    def log(row: dict[str, Any]) -> dict[str, Any]:
        seen.touch()
        return row

    source = ray.data.from_items(rows, override_num_blocks=3).map(log)
    made = build_processor(config(tiny_checkpoint))(source).map(lambda row: row | {"after": True})
    assert not seen.exists(), "a stage is lazy"
    found = {row["n"]: row for row in made.take_all()}
    assert sorted(found) == list(range(30))
    good = [n for n in found if n not in (4, 5)]
    ids = [found[n]["id"] for n in good]
    assert [id for n, id in zip(good, ids, strict=True) if n != 6] == [f"r{n % 20}" for n in good if n != 6]
    wanted = generate(model, [rows[n]["prompt"] for n in good], ids=ids, method="full", **SAMPLED)
    for n, answer in zip(good, wanted, strict=True):
        row = found[n]
        assert (list(row["generated_tokens"]), row["generated_text"]) == (answer.tokens, answer.text), n
        assert (row["finish_reason"], row["layers_run"]) == (answer.finish_reason, answer.layers_run)
        assert (row["num_generated_tokens"], row["num_input_tokens"]) == (len(answer.tokens), answer.num_input_tokens)
    for n, row in found.items():
        assert list(row["tags"]) == rows[n]["tags"]
        assert (row["x"] == rows[n]["x"]).all()
        assert row["after"]
        assert set(row) == {
            "id", "prompt", "generated_text", "generated_tokens", "num_input_tokens", "num_generated_tokens",
            "finish_reason", "layers_run", "ffns_run", "error_code", "error_message", "n", "tags", "x", "after",
        }  # fmt: skip
    assert [found[n]["error_code"] for n in (4, 5)] == ["prompt_missing", "prompt_too_long"]


@pytest.mark.slow
def test_scores_come_out_too(model: TextModel, tiny_checkpoint: Path) -> None:
    asked = {"max_new_tokens": 3, "logprobs": 1, "prompt_logprobs": True}
    source = ray.data.from_items([{"id": "a", "prompt": "The Otter", "x": 1}, {"id": "b", "prompt": None, "x": 2}])
    good, bad = sorted(
        build_processor(config(tiny_checkpoint, sampling=asked))(source).take_all(), key=lambda row: row["id"]
    )
    (wanted,) = generate(model, ["The Otter"], max_new_tokens=3, logprobs=1, method="full")
    np.testing.assert_allclose(good["logprobs"], [one.logprob for one in wanted.logprobs], atol=1e-4)
    assert [ones[0]["token"] for ones in good["top_logprobs"]] == [one.top[0][0] for one in wanted.logprobs]
    assert len(good["prompt_logprobs"]) == len(good["prompt_top_logprobs"]) == good["num_input_tokens"]
    assert (good["x"], bad["x"], bad["logprobs"], bad["prompt_logprobs"]) == (1, 2, None, None)


class DiesOfOne(KeyedModelThread):
    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        if any(without_key(request).id == "r5" for request in requests):
            os._exit(1)
        return super().decode(requests, may_measure, should_continue)


class Mortal(ProcessorStage):
    model_class = DiesOfOne


@pytest.mark.slow
def test_a_row_that_kills_its_worker_fails_and_its_neighbours_do_not(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ProcessorStage", Mortal)
    source = ray.data.from_items([{"id": f"r{n}", "prompt": f"The Otter {n}"} for n in range(8)])
    one = config(tiny_checkpoint, limits={"max_row_attempts": 1})
    found = {row["id"]: row for row in build_processor(one)(source).take_all()}
    assert len(found) == 8
    assert {id: row["error_code"] for id, row in found.items() if row["error_code"]} == {"r5": "poison_row"}
    assert all(row["generated_tokens"] for id, row in found.items() if id != "r5")


def test_errors_come_before_anything_starts(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"decode.spedup: unknown key"):
        build_processor({"decode": {"spedup": 2}})
    with pytest.raises(ConfigError, match=r"model.source: 'no/such/model'"):
        build_processor({"model": {"source": "no/such/model"}})
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {{source: {tiny_checkpoint}}}\noutput: {{path: x}}\ndecode: {{method: full}}\n")
    assert build_processor(str(file)).config.model.source == str(tiny_checkpoint)
    assert "ignores them: output" in caplog.text
    rows = ray.data.from_items([{"prompt": "x"}])
    with pytest.raises(ConfigError, match=r"actors.num_actors: 64 actors"):
        build_processor(config(tiny_checkpoint, actors={"num_actors": 64}))(rows)
    with pytest.raises(ConfigError, match="a column 'finish_reason'"):
        build_processor(config(tiny_checkpoint))(ray.data.from_items([{"prompt": "x", "finish_reason": "stop"}]))


@pytest.mark.slow
def test_no_rows_are_no_rows(tiny_checkpoint: Path) -> None:
    rows = ray.data.from_items([{"prompt": "x"}])
    assert build_processor(config(tiny_checkpoint))(rows.filter(expr=col("prompt") == "y")).take_all() == []
