"""What a corpus will take: priced at the measured level, said by a run and by `jobs.doctor`, held against what came."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.batching.buckets import PlannedBatch
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs.doctor import main as doctor
from pipeline.cluster.worker_records import Pace
from pipeline.config.job import JobConfig, build_config
from pipeline.estimate import early_estimate
from pipeline.estimate.early_estimate import EarlyEstimate
from pipeline.estimate.forecast import (
    Shape,
    batch_s,
    count_tokens,
    forecast,
    seconds_per_row,
    similar_answers,
    window_rows,
)
from pipeline.estimate.measure import Level, at_level, measure, rows_by_step
from pipeline.estimate.sample import Sample
from pipeline.report.figures import estimated
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.engine.request import Request
from tests.support.estimate_helpers import FIXED, requests
from tests.support.input_helpers import write_jsonl


def shape(**keys: Any) -> Shape:
    made: dict[str, Any] = {
        "rows": 1000, "window_rows": 128, "actors": 1, "baseline_fraction": 0.0, "max_new_tokens": 20
    }  # fmt: skip
    return Shape(**made | keys)


def test_fixed_lengths_are_exact_and_others_are_those_of_real_answers(generator: Generator) -> None:
    sample = Sample(requests(200), 250)  # a fifth cannot be decoded
    measured = measure(generator, sample.requests)
    found = forecast(generator, sample, measured, shape(), 36.0)
    assert found.output_tokens == found.max_output_tokens == 800 * 20
    assert found.input_tokens == round(800 * sample.mean_prompt_tokens)
    assert found.duration_s is not None
    assert found.cost == pytest.approx(found.duration_s / 100)
    lengths = [(pair[0], 5) for pair in measured.lengths]
    short = forecast(generator, sample, replace(measured, lengths=lengths), shape(), None)
    assert (short.output_tokens, short.cost) == (800 * 5, None)
    assert short.duration_s is not None
    assert short.duration_s < found.duration_s


def test_time_follows_the_cost_model_at_the_measured_level(generator: Generator) -> None:
    measured = measure(generator, requests(64))
    twice = replace(measured, levels=tuple(Level(at.rows, 2 * at.prefill, 2 * at.decode) for at in measured.levels))
    prompts = [Request(f"r{i}", [5] * 10, FIXED) for i in range(300)]
    one, two = (seconds_per_row(generator, prompts, m, shape()) for m in (measured, twice))
    assert two == pytest.approx(2 * one)
    full = seconds_per_row(generator, prompts, measured, shape(baseline_fraction=1.0))
    chosen, batch, new = prompts[:128], PlannedBatch(tuple(range(128)), 32), [20] * 128
    own_s, full_s = (batch_s(generator, measured, chosen, batch, new, s) for s in (None, generator.full))
    assert full_s > own_s
    assert full == pytest.approx((own_s + full_s) / 128, rel=1e-6)
    assert one == pytest.approx(own_s / 128, rel=1e-6)
    few, small = chosen[:8], PlannedBatch(tuple(range(8)), 32)
    times = [batch_s(generator, measured, few, small, [length] * 8) for length in (1, 2)]
    assert times[0] < times[1]


def test_scores_of_prompts_alone_have_a_price(generator: Generator) -> None:
    sampling = replace(FIXED, max_new_tokens=0, prompt_logprobs=True)
    scored = [Request(f"r{i}", [5] * 30, sampling, None, True) for i in range(64)]
    own = shape(max_new_tokens=0, baseline_fraction=0.0)
    assert seconds_per_row(generator, scored, measure(generator, scored), own) > 0


@pytest.mark.slow
def test_scores_of_prompts_add_to_the_price_of_their_answers(generator: Generator) -> None:
    """The price comes from the clock, so the least of several turns is compared: others may disturb one."""
    sampling = replace(FIXED, max_new_tokens=2, prompt_logprobs=True)
    scored = [Request(f"r{i}", [5] * 30, sampling, None, True) for i in range(64)]
    plain = [Request(f"r{i}", [5] * 30, replace(FIXED, max_new_tokens=2)) for i in range(64)]
    own = shape(max_new_tokens=2, baseline_fraction=0.0)
    turns = [
        [seconds_per_row(generator, rows, measure(generator, rows), own) for rows in (scored, plain)] for _ in range(3)
    ]
    scored_s, plain_s = (min(prices) for prices in zip(*turns, strict=True))
    assert scored_s > 1.2 * plain_s


@pytest.mark.slow
def test_prompts_that_are_scored_alone_take_no_turn_at_full_depth(generator: Generator) -> None:
    sampling = replace(FIXED, max_new_tokens=0, prompt_logprobs=True)
    scored = [Request(f"r{i}", [5] * 30, sampling, None, True) for i in range(64)]
    measured = measure(generator, scored)
    alone, paired = (seconds_per_row(generator, scored, measured, shape(baseline_fraction=f)) for f in (0.0, 1.0))
    assert alone == paired


def test_rows_may_have_limits_of_their_own(generator: Generator) -> None:
    rows = [Request(f"r{i}", [5] * 9, replace(FIXED, max_new_tokens=limit)) for i, limit in enumerate((10, 900))]
    assert count_tokens(Sample(rows, 4), shape(), None).max_output_tokens == 500 * 455


@pytest.mark.slow
def test_what_rows_share_is_priced_once(tiny_checkpoint: Path) -> None:
    decode = {"method": "full"}
    config = GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", device="cpu", shares_prefixes=True)
    sharing = Generator(config)
    rows = [Request(f"r{i}", [5 + t % 90 for t in range(80)] + [6 + i], FIXED) for i in range(128)]
    measured = measure(sharing, rows)
    alone = Generator(replace(config, shares_prefixes=False))
    assert any(batch.prefix_lengths for batch in sharing.cut(rows))
    assert seconds_per_row(sharing, rows, measured, shape()) < seconds_per_row(alone, rows, measured, shape())


@pytest.mark.slow
def test_rows_that_have_ended_are_priced_while_they_are_carried(tiny_checkpoint: Path) -> None:
    config = GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu")
    new = [2, 3, 3, 5, 9, 12, 12, 17, 20, 20]
    chosen = [Request(f"r{i}", [5] * 10, replace(FIXED, max_new_tokens=count)) for i, count in enumerate(new)]
    lossless = {"method": "full", "lossless": True}
    others = ({"deterministic": True}, {"decode": lossless})
    for own in (Generator(config), *(Generator(replace(config, **keys)) for keys in others)):
        ((batch, result),) = own.decode_batches(chosen)
        assert [len(answer.tokens) for answer in result.completions] == new
        by_step = rows_by_step(own, chosen, batch, new)
        assert by_step == result.stats.batch_rows
        carries = own.config.deterministic  # a batch of fixed shape keeps them
        assert (sum(by_step) > sum(count - 1 for count in new)) == carries


@pytest.mark.slow
def test_answers_are_drawn_from_those_to_prompts_of_about_that_length(generator: Generator) -> None:
    measured = replace(measure(generator, requests(8)), lengths=[(length, length * 2) for length in range(10, 74)])
    assert sorted(similar_answers(measured, 40)) == [2 * length for length in range(36, 45)], "36 and 44 are as near"
    assert max(similar_answers(measured, 1)) == 34
    assert similar_answers(replace(measured, lengths=[(10, 7)]), 500) == [7]
    ties = [(10, 1)] * 8 + [(10, 200)] * 56
    assert similar_answers(replace(measured, lengths=ties), 10) == [1] * 8 + [200] * 56


def test_levels_are_interpolated_by_the_logarithm_of_rows() -> None:
    levels = (Level(32, 2.0, 2.0), Level(128, 2.0, 1.0))
    assert [at_level(levels, rows).decode for rows in (1, 32, 64, 128, 500)] == [2.0, 2.0, 1.5, 1.0, 1.0]
    assert at_level(levels[:1], 64) == levels[0]


def test_what_is_known_without_a_model_that_can_be_loaded() -> None:
    found = count_tokens(Sample(requests(10), 20), shape(), 1.0)
    assert (found.output_tokens, found.duration_s, found.cost) == (None, None, None)
    assert (found.max_output_tokens, found.decoded_rows) == (500 * 20, 0)


def pace(**keys: Any) -> Pace:
    made: Any = {
        "rows": 256, "failed": 0, "output_tokens": 5120, "workers": 2, "batches": 4, "pairs": 2, "own_s": 8.0,
        "full_s": 6.0,
    }  # fmt: skip
    return made | keys


def test_a_run_says_what_it_expects_once_and_from_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [100.0]
    monkeypatch.setattr(early_estimate, "time", SimpleNamespace(monotonic=lambda: now[0]))
    estimate = EarlyEstimate(Sample(requests(64), 64), shape(rows=25_600, baseline_fraction=0.1), 3.6, said.append)
    mean = sum(4 + i % 30 for i in range(64)) / 64
    assert said == [
        f"corpus: 25,600 rows, about {round(25_600 * mean):,} prompt tokens and at most 512,000 new ones (from 64 rows)"
    ]
    now[0] = 110.0
    estimate.log_once(pace(rows=255))  # less than a hundredth of the rows
    assert estimate.found is None
    assert not estimate.is_ready(255)
    assert not estimate.is_ready(25_600), "at the end there is nothing to expect"
    estimate.log_once(pace())
    rest_s = (25_600 - 256) * (8.0 + 0.1 * 4 * 6.0 / 2) / 256 / 2
    assert estimate.found == {
        "rows": 25_600, "seen_rows": 256, "input_tokens": round(25_600 * mean), "output_tokens": 512_000,
        "duration_s": pytest.approx(10 + rest_s), "cost": pytest.approx((10 + rest_s) / 1000),
    }  # fmt: skip
    assert said[1].startswith("expected: 7 min 45 s (0.13 h, costs 0.47) and about 512,000 new tokens")
    estimate.log_once(pace(rows=2000))
    assert len(said) == 2


def test_the_report_compares_what_was_expected_with_what_came() -> None:
    said = {"rows": 9, "seen_rows": 3, "input_tokens": 90, "output_tokens": 100, "duration_s": 12.0, "cost": 1.5}
    state: Any = {"sessions": [{}], "estimate": said}
    found = estimated(state, 10.0, 80)
    assert found is not None
    assert (found["duration_ratio"], found["output_tokens_ratio"], found["cost"]) == (1.2, 1.25, 1.5)
    assert estimated({**state, "sessions": [{}, {}]}, 10.0, 80) is None
    assert estimated({"sessions": [{}]}, 10.0, 80) is None  # type: ignore[typeddict-item]


def test_a_window_is_what_a_run_takes() -> None:
    config = JobConfig()
    assert window_rows(config, 1, 100_000, has_gpu=False) == 512
    assert window_rows(config, 2, 100, has_gpu=False) == 25
    assert window_rows(config, 1, 100_000, has_gpu=True) == 16 * 256
    assert window_rows(config, 1, 5_000, has_gpu=True) == 2_500
    few = build_config(JobConfig, {"actors": {"window_batches": 2, "batch_size": 8}})
    assert window_rows(few, 1, 100_000, has_gpu=True) == 16


def test_doctor_says_tokens_hours_and_cost(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(300)])
    keys = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=8",
            "sampling.ignore_eos=true", "decode.speedup=2"]  # fmt: skip
    assert doctor([*keys, "-i", str(source), "-o", str(tmp_path / "run"), "--price-per-hour", "7.2"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])["estimate"]
    assert (found["rows"], found["output_tokens"], found["decoded_rows"]) == (300, 2400, 64)
    assert found["cost"] == pytest.approx(found["duration_s"] * 7.2 / 3600)
    assert math.isfinite(found["duration_s"])
    assert "corpus: 300 rows, about " in captured.err
    assert "2,400 new ones (64 rows decoded here)" in captured.err
    assert "costs" in captured.err
    assert not (tmp_path / "run").exists()
    write_jsonl(source, [{"prompt": None}])
    assert doctor([*keys, "-i", str(source), "-o", str(tmp_path / "run")]) == 1
    assert "none of the first 1 rows can be decoded" in capsys.readouterr().err


def test_doctor_counts_templates_and_samples(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"d{i}", "text": f"row {i} " + "word " * (i % 3)} for i in range(50)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    templates = '{a: "{{ text }}", b: "Say it again and again: {{ text }}"}'
    keys = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=8",
            "sampling.ignore_eos=true", "sampling.n=3", "sampling.temperature=1.0",
            f"input.templates={templates}"]  # fmt: skip
    assert doctor([*keys, "-i", str(source), "-o", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["estimate"]
    assert (found["rows"], found["output_tokens"], found["sampled_rows"]) == (300, 2400, 300)
    tokenizer = Tokenizer(str(tiny_checkpoint), read_config(tiny_checkpoint))
    prompts = [text for row in rows for text in (row["text"], f"Say it again and again: {row['text']}")]
    assert found["input_tokens"] == 3 * sum(len(ids) for ids in tokenizer.encode(prompts))


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_with_a_price(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs import generate

    monkeypatch.setattr("pipeline.cluster.progress.LINE_S", 0.1)  # a run of seconds asks seldom
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"{i}", "prompt": f"row {i}"} for i in range(160)])
    keys = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=100",
            "actors.batch_size=8", "actors.window_batches=1"]  # fmt: skip
    run = tmp_path / "run"
    assert generate.main([*keys, "-i", str(source), "-o", str(run), "--price-per-hour", "7.2"]) == 0
    err = capsys.readouterr().err
    assert "corpus: 160 rows, about " in err
    assert "and at most 16,000 new ones (from 160 rows)" in err
    assert err.index("corpus: 160 rows") < err.index("expected: ") < err.index("done: 160 rows ok")
    report = json.loads((run / "report.json").read_text())
    assert report["cost"]["price_per_hour"] == 7.2
    found = report["estimate"]
    assert 8 <= found["seen_rows"] < 160
    assert found["cost"] == pytest.approx(found["duration_s"] * 7.2 / 3600)
    assert found["duration_ratio"] == pytest.approx(found["duration_s"] / report["duration_s"])
    assert "expected after" in (run / "report.html").read_text()
