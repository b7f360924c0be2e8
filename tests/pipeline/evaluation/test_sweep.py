"""`jobs.evaluate --sweep`: every setting measured on the tiny checkpoint, and a bad one named before any is decoded."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU

from pipeline.evaluation.sweep import schedule_names
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import METHODS, Method, make_schedule
from tests.support.evaluated_model import MODEL, PROMPTS
from tests.support.verbs import Job


@pytest.fixture
def sweep(tmp_path: Path, tiny_checkpoint: Path) -> list[str]:
    """Arguments of a sweep over two labels on 12 prompts with two references each."""
    data = tmp_path / "pairs.csv"
    lines = [
        f'"name[The Otter], near[Willow {i}]","The Otter, near Willow {i}{end}"\n' for i in range(12) for end in ".!"
    ]
    data.write_text("mr,ref\n" + "".join(lines), encoding="utf-8")
    decode = "[{method: full}, {max_layers: 4, min_layers: 2, horizon: 11}, {name: fast, speedup: 5}]"
    runs = [f"{{label: SkipDecode, model: {tiny_checkpoint}, decode: {decode}}}"]
    runs.append(f"{{label: unified, model: {tiny_checkpoint}, decode: [{{method: unified, layers: 3}}]}}")
    fixed = ["max_new_tokens=12", "batch_size=4", "perplexity_pairs=8", f"output={tmp_path / 'quality'}"]
    return ["--sweep", f"data.path={data}", f"runs=[{', '.join(runs)}]", *fixed]


@pytest.mark.slow
def test_a_sweep_measures_every_setting(
    job: Job, sweep: list[str], tmp_path: Path, tiny_checkpoint: Path, ours: Callable[[Path], Decoder]
) -> None:
    code, document, err = job(*sweep)
    assert code == 0, err
    assert "SkipDecode: full depth took " in err
    names = ["SkipDecode full depth", "SkipDecode 4/2", "SkipDecode fast", "unified 3"]
    assert [line["name"] for line in document["rows"]] == names
    full, skip = document["rows"][:2]
    assert (full["speedup"]["measured"], full["speedup"]["ci95"], full["agreement"]["token_match"]) == (1.0, None, 1.0)
    assert full["layers_per_token"] == 6
    assert skip["speedup"]["batches"] == 3, "every batch was decoded both ways"
    assert skip["speedup"]["layers"] == pytest.approx(6 / skip["layers_per_token"])
    assert skip["loss"] != full["loss"]

    model = ours(tiny_checkpoint)
    tokenizer = Tokenizer(tiny_checkpoint, model.config)
    prompts = [f"name[The Otter], near[Willow {i}]" for i in range(12)]
    requests = [Request("", ids, Sampling(max_new_tokens=12)) for ids in tokenizer.encode(prompts)]
    made = {}
    for name, decode in (("full", {"method": "full"}), ("skip", {"max_layers": 4, "min_layers": 2, "horizon": 11})):
        made[name] = generate(model, requests, make_schedule(decode, num_layers=6, max_new_tokens=12)).completions
    texts, full_texts = ([tokenizer.decode(c.tokens) for c in made[name]] for name in ("skip", "full"))
    scorer = RougeScorer(["rougeL"])
    kept = [100 * scorer.score(*pair)["rougeL"].fmeasure for pair in zip(full_texts, texts, strict=True)]
    assert skip["rougeL_to_full"] == pytest.approx(fmean(kept))
    assert skip["rougeL_to_full"] < full["rougeL_to_full"] == 100
    streams = [[f"The Otter, near Willow {i}{end}" for i in range(12)] for end in ".!"]
    assert skip["bleu"] == pytest.approx(BLEU(lowercase=True).corpus_score(texts, streams).score)
    same = sum(a == b for f, s in zip(*made.values(), strict=True) for a, b in zip(f.tokens, s.tokens, strict=False))
    positions = sum(max(len(f.tokens), len(s.tokens)) for f, s in zip(*made.values(), strict=True))
    assert skip["agreement"]["token_match"] == pytest.approx(same / positions)

    folder = tmp_path / "quality"
    assert {path.name for path in folder.iterdir()} == {"quality.json", "quality.md", "quality.svg", "quality.png"}
    kept = json.loads((folder / "quality.json").read_text())
    rows = [line.pop("rougeL_rows") for line in kept["rows"]]
    assert kept == document, "what is printed is what is kept, less the figures of every prompt"
    assert [fmean(own) for own in rows] == pytest.approx([line["rougeL"] for line in document["rows"]], abs=1e-3)
    table = (folder / "quality.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:6]] == [f"| {name}" for name in names]
    assert len({line.count(" | ") for line in table[:6]}) == 1
    compared = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| unified")][1]
    apart = [a - b for a, b in zip(rows[3], rows[1], strict=True)]
    half = 1.96 * stdev(apart) / 12**0.5
    shown = f"{fmean(apart):+.1f} ({fmean(apart) - half:+.1f} to {fmean(apart) + half:+.1f})"
    assert compared[3:] == ["SkipDecode 4/2", shown], "of the schedules of the first label the most similar in depth"
    assert "<svg" in (folder / "quality.svg").read_text()


@pytest.mark.slow
def test_a_sweep_without_references(job: Job, sweep: list[str], tmp_path: Path) -> None:
    code, document, err = job(*sweep, "data.path=null", "data.limit=8", "baseline_fraction=0.1")
    assert code == 0, err
    paired = [line["agreement"]["rows"] for line in document["rows"]]
    assert paired[0] == 0, "full depth is not held against itself"
    assert all(0 < rows < 8 for rows in paired[1:]), "some batches are decoded at full depth too, others are not"
    assert "github.com/tuetschek/e2e-dataset" in err
    assert (document["prompts"], document["references"]) == (8, 0)
    assert all(line["slot_share"] is not None and line["loss"] is None for line in document["rows"])
    table = (tmp_path / "quality/quality.md").read_text()
    assert "slots" in table
    assert "BLEU" not in table
    assert "first, third and fifth batch of a setting and 10% of all" in table


@pytest.mark.slow
def test_a_sweep_with_prompts_under_swiftkv(job: Job, tmp_path: Path) -> None:
    """Prompts alone, every row to its limit: time split in prompt and decoding, and a SwiftKV column set."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"text": prompt * 3}) + "\n" for prompt in PROMPTS))
    decode = "[{method: full}, {method: full, prefill: swiftkv}, {speedup: 2, horizon: 7, prefill: swiftkv}]"
    runs = f"runs=[{{label: both, model: {MODEL}, decode: {decode}}}]"
    data = f"data={{path: {source}, prompt_column: text, has_references: false}}"
    fixed = ["max_new_tokens=8", "batch_size=4", "ignore_eos=true", f"output={tmp_path / 'quality'}"]
    code, document, err = job("--sweep", data, runs, *fixed)
    assert code == 0, err
    assert (document["prompts"], document["references"]) == (6, 0)
    assert "now the loss of" not in err
    full, swiftkv, both = document["rows"]
    assert [row["name"] for row in document["rows"]] == [
        "both full depth",
        "both full depth, SwiftKV",
        "both 2x, SwiftKV",
    ]
    assert full["speedup_prefill"] == {"measured": 1.0, "predicted": 1.0}
    assert swiftkv["speedup_prefill"]["predicted"] > 1
    assert swiftkv["agreement"]["token_match"] < 1, "full depth without SwiftKV is what it is compared with"
    # a batch that is kept full writes keys for all layers under SwiftKV, also those that a row does not run
    assert swiftkv["cache_bytes_per_row"] == full["cache_bytes_per_row"] == both["cache_bytes_per_row"]
    for row in document["rows"]:
        ms = row["prefill_ms_per_row"] + row["decode_ms_per_row"]
        assert row["rows_per_s"] == pytest.approx(1e3 / ms)
        assert row["output_tokens_per_s"] == pytest.approx(8 * row["rows_per_s"]), "end-of-text ends no row"
    head = (tmp_path / "quality/quality.md").read_text().splitlines()[0]
    assert "| prefill, ms/row | decode, ms/row | KV, kB/row |" in head
    code, _, err = job("--sweep", data.replace("text", "prompt"), runs, *fixed)
    assert code == 2
    assert "data.prompt_column: " in err


def test_a_new_method_is_named_with_the_values_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "alternate", Method({"stride": int, "offset": int}, METHODS["full"].make))
    assert schedule_names([{"method": "alternate", "stride": 3, "offset": None}]) == ["alternate 3"]


def test_schedules_of_several_methods_are_named_with_their_method() -> None:
    full, skip = {"method": "full"}, {"method": "skipdecode", "speedup": 2}
    early, dynamic = skip | {"method": "early_exit"}, skip | {"ffn_skip": {"mode": "row", "threshold": 0.9}}
    assert schedule_names([full, skip, dynamic]) == ["full depth", "2x", "2x, FFN row 0.9"]
    named = ["full depth", "skipdecode 2x", "early_exit 2x", "skipdecode 2x, FFN row 0.9", "unified 7"]
    assert schedule_names([full, skip, early, dynamic, {"method": "unified", "layers": 7}]) == named


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runs=[{label: a, model: {model}, decode: [{prefill: swiftkv}]}]", "runs.0.decode.0 (a): decode.prefill: "),
        ("data.path=/nowhere.csv", "data.path: no file /nowhere.csv; the E2E NLG challenge data (github.com/"),
        ("data.reference_column=no", "data.reference_column: "),
        ("runs=[{label: a, model: /nowhere, decode: [{method: full}]}]", "runs.0.model (a): "),
        ("runs=[{label: a, model: {model}, decode: [{method: full}, {method: unified}]}]", "runs.0.decode.1 (a): "),
        ("runs=[{label: a, model: {model}, decode: [{spedup: 2}]}]", "runs.0.decode.0.spedup: unknown key; did you"),
        ("runs=[{label: a, model: {model}, decode: [{speedup: fast}]}]", "runs.0.decode.0.speedup: "),
        ("runs=[{label: a, model: {model}, decode: [{prefix: auto}]}]", "runs.0.decode.0.prefix (a): "),
        ("runs=[]", "runs: "),
        ("baseline_fraction=0", "baseline_fraction: "),
        ("max_new_tokens=128", "sampling.max_new_tokens: 128 leaves no room"),
        ("output={model}/config.json/x", "output: "),
    ],
)  # fmt: skip
def test_a_bad_sweep_decodes_nothing(
    job: Job, sweep: list[str], tiny_checkpoint: Path, tmp_path: Path, override: str, message: str
) -> None:
    code, document, err = job(*sweep, override.replace("{model}", str(tiny_checkpoint)))
    assert (code, document["exit_code"]) == (2, 2), err
    assert message in err
    assert not (tmp_path / "quality").exists()
    assert "[1/" not in err
