"""`jobs.evaluate`: a real run scored, its figures worked out again by other means."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from transformers import OPTForCausalLM

from jobs.generate import main as generate_main
from pipeline.evaluation.hypotheses import choose_texts
from pipeline.evaluation.score import draw_pairs
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.from_config import make_schedule
from skipdecode.training.loss import response_loss
from tests.support.evaluated_model import MODEL, NAMED, PROMPTS
from tests.support.verbs import Job

TOO_LONG = "near[Willow Station] " * 400
SENTENCES = (
    "{name} is a {kind} by the riverside.",
    "There is a {kind} called {name} in the riverside area.",
    "By the river, {name} is a nice {kind}.",
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `jobs.generate` at full depth: PROMPTS, one of them twice, and a prompt that does not fit."""
    folder = tmp_path_factory.mktemp("evaluate")
    source = folder / "in.jsonl"
    rows = [{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate([*PROMPTS, PROMPTS[0], TOO_LONG])]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["model.dtype=float32", "sampling.max_new_tokens=24", "decode.method=full", "limits.max_failed_rows=1"]
    paths = [f"model.source={MODEL}", "-i", str(source), "-o", str(folder / "run")]
    assert generate_main([*options, *paths]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def texts(finished_run: Path) -> dict[str, str]:
    rows = [row for path in finished_run.glob("data/*/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()]
    return {row["prompt"]: row["generated_text"] for row in rows}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One to three references per prompt but the last; one prompt that no row has, and one whose row failed."""
    rows = [{"mr": "name[Nobody]", "ref": "Nobody."}, {"mr": TOO_LONG, "ref": "Too long."}]
    for i, (prompt, (name, kind)) in enumerate(zip(PROMPTS[:-1], NAMED, strict=False)):
        rows += [{"mr": prompt, "ref": text.format(name=name, kind=kind)} for text in SENTENCES[: 1 + i % 3]]
    path = tmp_path_factory.mktemp("references") / "references.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.ray
def test_a_run_is_scored_as_the_libraries_score_its_rows(
    job: Job, finished_run: Path, references: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "scores.json"
    code, document, err = job(finished_run, "--references", references, "--output-json", target)
    assert code == 0, err
    assert json.loads(target.read_text()) == document
    counts = ("rows", "prompts", "failed", "repeated_rows", "prompts_without_reference", "references_without_row")
    assert [document[name] for name in counts] == [8, 6, 1, 1, 1, 1]
    assert "1 failed rows, scored as empty texts: 'near[Willow Station] near" in err
    assert f"1 prompts of the run have no reference and are not scored: {PROMPTS[-1]!r}" in err
    assert "1 prompts of the references have no row and are not scored: 'name[Nobody]'" in err

    pairs = [(row["mr"], row["ref"]) for row in pq.read_table(references).to_pylist() if row["mr"] != "name[Nobody]"]
    prompts = sorted({prompt for prompt, _ in pairs})
    own = [[ref for prompt, ref in pairs if prompt == wanted] for wanted in prompts]
    streams = [[refs[min(i, len(refs) - 1)] for refs in own] for i in range(3)]
    hypotheses = ["" if prompt == TOO_LONG else texts[prompt] for prompt in prompts]
    expected = BLEU(lowercase=True).corpus_score(hypotheses, streams).score
    assert 5 < expected < 95, "a figure that says something"
    assert document["bleu"] == pytest.approx(expected)
    assert document["num_slots"] == 5 * 3 + 400
    assert document["layers_per_token"] == 24
    assert (document["model"], document["decode"]) == (str(MODEL), {"method": "full"})


@pytest.mark.ray
def test_the_perplexity_is_that_of_hugging_face(
    job: Job, finished_run: Path, references: Path, hf: Callable[[Path], OPTForCausalLM],
    ours: Callable[[Path], Decoder],
) -> None:  # fmt: skip
    _, document, err = job(finished_run, "--references", references)
    reference, model = hf(MODEL), ours(MODEL)
    tokenizer = Tokenizer(MODEL, model.config)
    total, count = 0.0, 0
    for row in pq.read_table(references).to_pylist():
        if row["mr"] in ("name[Nobody]", TOO_LONG):  # no row; longer than the model's context
            continue
        prompt, response = tokenizer.encode([row["mr"]])[0], [*tokenizer.encode([row["ref"]])[0][1:], 2]
        logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="sum"))
        count += len(response)
    assert document["perplexity_pairs"] == 9
    assert "pairs of more than 2048 tokens do not fit the model" in err
    assert document["loss"] == pytest.approx(total / count, rel=1e-5)
    assert document["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


@pytest.mark.ray
def test_the_perplexity_is_under_the_schedule_of_the_run(
    job: Job, finished_run: Path, references: Path, ours: Callable[[Path], Decoder], tmp_path: Path
) -> None:
    copy = shutil.copytree(finished_run, tmp_path / "run")
    state = json.loads((copy / "run.json").read_text())
    state["decode"] = {"method": "skipdecode", "max_layers": 8, "min_layers": 2}
    (copy / "run.json").write_text(json.dumps(state))
    _, document, _ = job(copy, "--references", references, "perplexity_pairs=10")
    model = ours(MODEL)
    tokenizer = Tokenizer(MODEL, model.config)
    schedule = make_schedule(state["decode"], num_layers=24, max_new_tokens=24)
    rows = [row for row in pq.read_table(references).to_pylist() if row["mr"] in PROMPTS]
    total = count = 0.0
    for row in rows:
        prompt, response = tokenizer.encode([row["mr"]])[0], [*tokenizer.encode([row["ref"]])[0][1:], 2]
        with torch.no_grad():
            total += float(response_loss(model, teacher_batch([(prompt, response)], 1), schedule)) * len(response)
        count += len(response)
    assert document["loss"] == pytest.approx(total / count, rel=1e-5)
    assert document["decode"] == state["decode"]


@pytest.mark.ray
def test_plain_parquet_has_scores_and_no_perplexity(job: Job, finished_run: Path, references: Path) -> None:
    _, whole, _ = job(finished_run, "--references", references, "--no-perplexity")
    code, document, err = job(finished_run / "data", "--references", references)
    assert code == 0
    assert "perplexity: left out; " in err
    assert document["perplexity"] is None
    assert {key: document[key] for key in ("bleu", "chrf", "rougeL", "failed", "slots")} == {
        key: whole[key] for key in ("bleu", "chrf", "rougeL", "failed", "slots")
    }


@pytest.mark.ray
def test_a_checkpoint_that_changed_since_the_run_is_refused(
    job: Job, finished_run: Path, references: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(finished_run, tmp_path / "run")
    state = json.loads((copy / "run.json").read_text())
    state["fingerprint"]["model.files"] = "another"
    (copy / "run.json").write_text(json.dumps(state))
    code, _, err = job(copy, "--references", references)
    assert code == 2
    assert "no longer the one that the run used; --no-perplexity leaves it out" in err
    assert job(copy, "--references", references, "--no-perplexity")[0] == 0


@pytest.mark.ray
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{run}",), "--references: name the file"),
        (("{run}", "--references", "/nowhere.csv"), "--references: /nowhere.csv: "),
        (("{run}", "--references", "{run}/run.json", "--prompt-column", "no"), "--references: "),
        (("{run}", "--references", "{references}", "--prompt-column", "no"), "--prompt-column: "),
        (("{run}", "--references", "{references}", "--reference-column", "no"), "--reference-column: "),
        (
            ("{run}", "--references", "{references}", "--prompt-column", "ref", "--reference-column", "mr"),
            "no prompt of ",
        ),
        (
            ("{run}", "--references", "{references}", "--prompt-column", "ref"),
            "--reference-column: is the prompt column",
        ),
        (("{run}", "--references", "{references}", "perplexity_pairs=-1"), "perplexity_pairs: "),
        (("{run}", "--references", "{references}", "--id-column", "no"), "--id-column: "),
        (("{run}", "--references", "{references}", "--id-column", "mr"), "no id of "),
        (("{run}", "--references", "{references}", "--output-json", "/nowhere/x.json"), "--output-json /nowhere/"),
        (("/nowhere", "--references", "{references}"), "/nowhere: no such file or folder"),
        (("{run}/report.html", "--references", "{references}"), "report.html: neither a run folder nor Parquet"),
        (("{references}", "--references", "{references}"), "no column 'prompt'; it has: mr, ref"),
    ],
)
def test_bad_input_is_named(
    job: Job, finished_run: Path, references: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, document, err = job(*(text.format(run=finished_run, references=references) for text in arguments))
    assert (code, document["exit_code"]) == (2, 2), err
    assert message in err


def test_references_by_id_are_those_of_the_rendered_prompts(job: Job, tmp_path: Path) -> None:
    """Two templates of document a, of which the second failed; b has two references, and c no row."""
    names = ("id", "source_id", "prompt", "generated_text", "error_code")
    rows = [
        ("a-x", "a", "<A x>", "a pub", ""),
        ("a-y", "a", "<A y>", "", "engine_error"),
        ("b-x", "b", "<B>", "an inn", ""),
    ]
    pq.write_table(pa.Table.from_pylist([dict(zip(names, one, strict=True)) for one in rows]), tmp_path / "out.parquet")
    pairs = [("a", "a pub"), ("b", "a bar"), ("b", "an inn"), ("c", "none")]
    lines = [json.dumps({"doc": own, "ref": reference}) for own, reference in pairs]
    (tmp_path / "refs.jsonl").write_text("\n".join(lines))
    code, document, err = job(tmp_path / "out.parquet", "--references", tmp_path / "refs.jsonl", "--id-column", "doc")
    assert code == 0, err
    counts = ("prompts", "failed", "references_without_row", "prompts_without_reference")
    assert [document[name] for name in counts] == [3, 1, 1, 0]
    assert document["rougeL"] == pytest.approx(100 * 2 / 3)
    assert "have no row and are not scored: 'id c'" in err


def row(id: str | None, prompt: str | None, text: str | None, code: str = "") -> dict[str, Any]:
    return {"id": id, "prompt": prompt, "generated_text": text, "error_code": code}


def test_of_rows_with_one_prompt_the_lowest_id_counts_even_if_it_failed() -> None:
    rows = [row("b", "p", "late"), row("a", "p", "", "engine_error"), row("c", "q", "first"), row("d", None, "", "x")]
    chosen = choose_texts([*rows, row("c", "q", "again", "duplicate_id")])
    assert chosen.by_prompt == {"p": "", "q": "first"}
    assert chosen.failed == {"p"}
    assert (chosen.num_rows, chosen.num_repeated, chosen.num_without_prompt) == (5, 2, 1)
    assert chosen.layers_per_token is None
    assert choose_texts([{"prompt": "p", "generated_text": None}]).by_prompt == {"p": ""}
    numbered = [{"id": i, "prompt": "p", "generated_text": str(i)} for i in (None, 2, 0, None)]
    assert choose_texts(numbered).by_prompt == {"p": "0"}


def test_pairs_are_drawn_once_and_must_fit() -> None:
    pairs = [([1] * n, [2] * 3) for n in range(1, 30)]
    assert draw_pairs(pairs, None, 10) == pairs[:8]
    assert draw_pairs(pairs, 5, 100) == draw_pairs(pairs, 5, 100) != pairs[:5]
