"""One real run with failing rows: every figure of its report recomputed from the Parquet by other code, the page, the
verb that makes it again, and what Prometheus was told meanwhile."""

import html.parser
import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

import pipeline.generate.stream
from jobs.generate import main as generate
from jobs.report import main as report_main
from pipeline.report.prometheus import METRICS, LiveMetrics
from skipdecode.backends import choice
from tests.support.processes import wait_for
from tests.support.report_recount import (
    NEW,
    NUM_ROWS,
    Finished,
    Recount,
    check_actors,
    check_agreement,
    check_counts,
    check_errors,
    check_layers,
    check_lengths,
    check_speedup,
    check_tail,
    check_the_rest,
    check_throughput,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("own_ray")]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def finished(ending_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder, kept = tmp_path_factory.mktemp("report"), []
    choice.choose()  # compiles, where nobody has: else a worker that does so is given no rows
    rows = [{"id": f"r{i % 88}", "prompt": None if i % 20 == 7 else f"row {i} " * (1 + i % 5)} for i in range(NUM_ROWS)]
    rows[3]["prompt"] = "long " * 300
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "500")
        real = pipeline.generate.stream.start_collector
        patch.setattr(pipeline.generate.stream, "start_collector", lambda *a: kept.append(real(*a)) or kept[-1])
        arguments = [
            f"model.source={ending_checkpoint('125m')}", "-i", str(folder / "in.jsonl"),
             f"sampling.max_new_tokens={NEW}", "actors.num_actors=2", "actors.batch_size=8", "model.dtype=float32",
             "actors.window_batches=2", "decode.method=skipdecode", "decode.max_layers=5", "decode.min_layers=2",
             "baseline.fraction=0.5", "limits.max_failed_rows=20",
        ]  # fmt: skip
        assert generate([*arguments, "-o", str(folder / "run")]) == 0
        read = [json.loads((folder / f"run/{name}.json").read_text()) for name in ("report", "run")]
        yield Finished(folder / "run", arguments, *read, kept[0])


def test_every_figure_agrees_with_the_parquet_files(finished: Finished) -> None:
    """By hand, row by row, with no code of the report."""
    of = Recount(finished)
    for check in (
        check_counts, check_speedup, check_agreement, check_actors, check_tail, check_throughput, check_lengths,
        check_layers, check_errors, check_the_rest,
    ):  # fmt: skip
        check(of)
    assert not of.unseen, f"figures that nothing here recomputes: {of.unseen}"


def test_what_takes_longest_is_decoded_first(finished: Finished) -> None:
    """Within each window, since others may be idle before it ends: of the batches that are decoded one by one."""
    orders: dict[tuple[str, int], list[int]] = {}
    batches = [batch for batch in finished.read("batches") if batch["full_decode_s"] is not None]
    batches.sort(key=lambda batch: batch["started_at"])
    for part in finished.read("windows"):
        inside = [
            b["prompt_columns"]
            for b in batches
            if b["worker"] == part["worker"] and part["started_at"] <= b["started_at"] <= part["ended_at"]
        ]
        if part["window"]:
            orders.setdefault((part["worker"], part["window"]), []).extend(inside)
    assert any(len(set(order)) > 1 for order in orders.values())
    for order in orders.values():
        assert order == sorted(order, reverse=True)


class Page(html.parser.HTMLParser):
    """Tags that are open, addresses that a browser would fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_the_figures(finished: Finished) -> None:
    text, report = (finished.output / "report.html").read_text(encoding="utf-8"), finished.report
    page = Page(text)
    assert not page.open
    assert not page.fetched
    assert not re.search(r"@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for shown in (
        f"{report['completed']:,}", f"{report['output_throughput']:,.0f}", f"{report['speedup']['measured']:.2f}x",
        f"{100 * report['agreement']['token_match']:.1f} %", "books closed", "prompt_too_long", "duplicate_id",
        report["actors"][0]["worker"], f"Kernels: {choice.choose()}, 2 workers.",
        finished.state["fingerprint"]["model.files"], "max_layers: 5",
    ):  # fmt: skip
        assert shown in page.text, shown
    assert text.count("<svg") == 2 * 6, "six plots, each wide and narrow"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "plots share clip paths or markers"


def test_the_verb_makes_the_same_report_again_and_prices_it(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: (finished.output / name).read_bytes() for name in ("report.json", "report.html", "run.json")}
    for name in ("report.json", "report.html"):
        (finished.output / name).unlink()
    assert report_main([str(finished.output)]) == 0
    assert {name: (finished.output / name).read_bytes() for name in before} == before
    assert report_main([str(finished.output), "--price-per-hour", "36"]) == 0
    cost = json.loads(capsys.readouterr().out.splitlines()[-1])["cost"]
    seconds, tokens = finished.report["duration_s"], finished.report["total_output_tokens"]
    assert cost["total"] == pytest.approx(0.01 * seconds)
    assert cost["per_million_output_tokens"] == pytest.approx(0.01 * seconds / tokens * 1e6)
    assert f"{cost['per_million_output_tokens']:,.3f}" in (finished.output / "report.html").read_text()
    assert report_main([str(finished.output)]) == 0


def test_runs_side_by_side(finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    state = json.loads((finished.output / "run.json").read_text())
    state["config"]["decode"]["max_layers"] = 6
    (other / "run.json").write_text(json.dumps(state))
    for name in ("data", "metrics"):
        (other / name).symlink_to(finished.output / name)
    target = tmp_path / "both.html"
    assert report_main(["--compare", str(finished.output), str(other), "-o", str(target)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["differing"] == {"decode.max_layers": [5, 6]}
    assert [run["completed"] for run in document["runs"]] == [finished.report["completed"]] * 2
    assert "speedup, measured" in captured.err
    page = Page(target.read_text(encoding="utf-8"))
    assert not page.fetched
    assert "decode.max_layers" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "/nowhere: no run.json of a run"),
        (["--compare", "/nowhere", "/nowhere2"], "/nowhere: no run.json of a run"),
        (["--compare", "a", "b", "-o", "/nowhere/x.html"], "--output-html /nowhere/x.html: not a file"),
    ],
)
def test_what_cannot_be_reported_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_main(arguments) == 2
    assert message in capsys.readouterr().err


def scraped(run: str) -> dict[str, Any]:
    """What Ray's endpoint says of the session `run`: metrics by name."""
    node = ray.nodes()[0]
    with urllib.request.urlopen(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10
    ) as answer:
        families = [f for f in text_string_to_metric_families(answer.read().decode()) if "skipdecode" in f.name]
    for family in families:
        family.samples = [sample for sample in family.samples if sample.labels["run"] == run]
    return {family.name: family for family in families if family.samples}


def test_prometheus_was_told_what_the_files_say(finished: Finished) -> None:
    missing: set[str] = set()
    run = finished.state["sessions"][0]["id"]

    def scrape() -> dict[str, Any] | None:
        ray.get(finished.collector.counts.remote())  # as the progress line does: gauges are told anew each time
        found = scraped(run)
        missing.clear()
        missing.update({metric.exported.removesuffix("_total") for metric in METRICS} - found.keys())
        return None if missing else found

    with suppress(AssertionError):
        wait_for(scrape, timeout_s=30)
    found = scrape()
    assert found, missing
    values: dict[str, float] = {}
    for metric in METRICS:
        family = found[metric.exported.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        for sample in family.samples:
            values[sample.name + sample.labels.get("status", "") + sample.labels.get("le", "")] = sample.value
    report, batches = finished.report, finished.read("batches")
    assert values["ray_skipdecode_rows_totalok"] == report["completed"]
    assert values["ray_skipdecode_rows_totalfailed"] == report["failed"]
    assert values["ray_skipdecode_rows_planned"] == NUM_ROWS
    assert values["ray_skipdecode_output_tokens_total"] == report["total_output_tokens"]
    assert values["ray_skipdecode_input_tokens_total"] == report["total_input_tokens"]
    ratio = values["ray_skipdecode_layers_run_total"] / values["ray_skipdecode_decode_steps_total"]
    assert ratio == pytest.approx(report["layers_per_token"])
    busy_s = sum(actor["busy_s"] for actor in report["actors"])
    assert values["ray_skipdecode_busy_seconds_total"] == pytest.approx(busy_s)
    assert (values["ray_skipdecode_workers"], values["ray_skipdecode_worker_starts_total"]) == (2, 2)
    assert values["ray_skipdecode_batch_seconds_count"] == len(batches)
    assert values["ray_skipdecode_batches_total"] == len(batches)
    assert values["ray_skipdecode_batch_rows_total"] == sum(batch["rows"] for batch in batches)
    load_s = sum(actor["load_s"] for actor in report["actors"])
    assert values["ray_skipdecode_load_seconds_total"] == pytest.approx(load_s)
    assert values["ray_skipdecode_token_match"] == pytest.approx(report["agreement"]["token_match"])
    assert values["ray_skipdecode_split_batches"] == 0
    assert values["ray_skipdecode_speedup"] == pytest.approx(report["speedup"]["measured"], rel=1e-6)


def test_counters_are_at_zero_before_the_first_row(finished: Finished) -> None:
    """Prometheus counts no growth before the first figure that it sees."""
    counters = {metric.exported for metric in METRICS if metric.kind == "counter"}
    live = LiveMetrics("idle", 5)

    def told() -> list[Any]:
        live.refresh()
        samples = [sample for family in scraped("idle").values() for sample in family.samples]
        return samples if counters <= {sample.name for sample in samples} else []

    found = {(s.name, s.labels.get("status")): s.value for s in wait_for(told, timeout_s=30) if s.name in counters}
    assert set(found.values()) == {0}
    assert {status for name, status in found if name == "ray_skipdecode_rows_total"} == {"ok", "failed"}


@pytest.mark.slow
def test_rows_that_were_decoded_again_are_told(finished: Finished, tmp_path: Path) -> None:
    """A resumed run: two data files are gone, and their rows are made once more."""
    output = tmp_path / "run"
    shutil.copytree(finished.output, output)
    lost = sorted((output / "data/status=ok").iterdir())[:2]
    tables = [ds.dataset(path).to_table().to_pylist() for path in lost]
    tokens = [row["num_generated_tokens"] for table in tables for row in table]
    for path in lost:
        path.unlink()
    assert generate([*finished.arguments, "-o", str(output), "--resume"]) == 0
    report, state = (json.loads((output / f"{name}.json").read_text()) for name in ("report", "run"))
    resumed = Finished(output, finished.arguments, report, state, None)
    assert len(state["sessions"]) == 2
    assert report["completed"] == len(resumed.rows("ok")) == finished.report["completed"]
    assert report["total_output_tokens"] == finished.report["total_output_tokens"]
    assert report["decoded_again"] == {"rows": len(tokens), "output_tokens": sum(tokens)}
    good = sum(actor["rows"] for actor in report["actors"]) - report["failed"]
    assert good == report["completed"] + len(tokens), "what workers did is more than what the files hold"
    assert f"{sum(tokens):,} tokens ({len(tokens)} rows) were decoded beyond" in (output / "report.html").read_text()


def test_a_finished_run_whose_report_fails_is_finished(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished.output, output)
    (output / "report.json").unlink()
    with monkeypatch.context() as broken:  # damaged files do not keep it from being made
        broken.setattr("pipeline.report.figures.render_report", lambda *_: 1 / 0)
        for _ in range(2):
            assert generate([*finished.arguments, "-o", str(output), "--resume"]) == 0
            captured = capsys.readouterr()
            assert "report: could not be made (ZeroDivisionError" in captured.err
            document = json.loads(captured.out.splitlines()[-1])
            assert (document["completed"], document["books"]["closed"]) == (finished.report["completed"], True)
    assert report_main([str(output)]) == 0
    assert json.loads((output / "report.json").read_text())["completed"] == finished.report["completed"]
