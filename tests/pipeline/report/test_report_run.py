"""One real run with failing rows: every figure of its report recomputed from the Parquet by other code, the page, the
verb that makes it again, and what Prometheus was told meanwhile."""

import html.parser
import json
import math
import re
import shutil
import statistics
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

import pipeline.generate.stream
from jobs.generate import main as generate
from jobs.report import main as report_main
from pipeline.report.prometheus import METRICS, LiveMetrics
from skipdecode.backends import choice
from tests.support.processes import row_list, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("own_ray")]

ROOT = Path(__file__).parents[3]
NUM_ROWS, NEW, LAYERS = 90, 12, 6


@dataclass
class Finished:
    output: Path
    arguments: list[str]
    """Of the run, without -o."""
    report: dict[str, Any]
    state: dict[str, Any]
    collector: Any
    """The collector's handle: while it is held, Prometheus sees its figures."""

    def read(self, kind: str) -> list[dict[str, Any]]:
        paths = sorted((self.output / "metrics").glob(f"{kind}-*.parquet"))
        return [row for path in paths for row in ds.dataset(path).to_table().to_pylist()]

    def rows(self, status: str) -> list[dict[str, Any]]:
        return row_list(self.output, status)


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


class Recount:
    """A run's files, and which figures of its report were recomputed from them."""

    def __init__(self, finished: Finished) -> None:
        self.finished, self.unseen = finished, set(finished.report)
        self.good, self.bad = finished.rows("ok"), finished.rows("failed")
        self.batches, self.windows, self.workers = (finished.read(kind) for kind in ("batches", "windows", "workers"))
        self.pairs = [b for b in self.batches if b["full_output_tokens"]]
        self.begin, self.end = (finished.state["sessions"][0][f"{edge}_at"] for edge in ("started", "ended"))
        self.seconds = self.end - self.begin
        self.prompts, self.answers = (
            [row[f"num_{kind}_tokens"] for row in self.good] for kind in ("input", "generated")
        )
        self.steps = sum(n - 1 for n in self.answers)

    def figure(self, name: str) -> Any:
        self.unseen.discard(name)
        return self.finished.report[name]


def test_every_figure_agrees_with_the_parquet_files(finished: Finished) -> None:
    """By hand, row by row, with no code of the report."""
    of = Recount(finished)
    for check in (
        check_counts, check_speedup, check_agreement, check_actors, check_tail, check_throughput, check_lengths,
        check_layers, check_errors, check_the_rest,
    ):  # fmt: skip
        check(of)
    assert not of.unseen, f"figures that nothing here recomputes: {of.unseen}"


def check_counts(of: Recount) -> None:
    assert len(of.good) > 70
    assert of.figure("duration_s") == pytest.approx(of.seconds)
    assert (of.figure("completed"), of.figure("failed")) == (len(of.good), len(of.bad))
    assert (of.figure("total_input_tokens"), of.figure("total_output_tokens")) == (sum(of.prompts), sum(of.answers))
    assert of.figure("request_throughput") == pytest.approx(len(of.good) / of.seconds)
    assert of.figure("output_throughput") == pytest.approx(sum(of.answers) / of.seconds)
    assert of.figure("total_token_throughput") == pytest.approx((sum(of.answers) + sum(of.prompts)) / of.seconds)
    decoding = sum(b["prefill_s"] + b["decode_s"] for b in of.batches)
    assert of.figure("decode_output_throughput") == pytest.approx(sum(of.answers) / decoding)
    assert of.figure("prefill_s") + of.figure("decode_s") == pytest.approx(decoding)
    saved = sum(b["prefix_tokens_saved"] for b in of.batches)
    assert of.figure("prefix_tokens_saved") == saved
    prefill_s = sum(b["prefill_s"] for b in of.batches)
    assert of.figure("prefix_saved_s") == pytest.approx(prefill_s * saved / (sum(of.prompts) - saved))
    assert of.figure("layers_per_token") == pytest.approx(sum(row["layers_run"] for row in of.good) / of.steps)
    assert of.figure("ffns_per_token") == pytest.approx(sum(row["ffns_run"] for row in of.good) / of.steps)
    columns = sum(b["rows"] * b["prompt_columns"] for b in of.batches)
    assert of.figure("padding_fraction") == pytest.approx(1 - sum(of.prompts) / columns)


def check_speedup(of: Recount) -> None:
    assert len(of.pairs) > 3
    logs = [
        math.log((b["full_prefill_s"] + b["full_decode_s"]) / b["full_output_tokens"])
        - math.log((b["prefill_s"] + b["decode_s"]) / b["output_tokens"])
        for b in of.pairs
    ]
    speedup = of.figure("speedup")
    assert speedup["measured"] == pytest.approx(math.exp(statistics.mean(logs)))
    low, high = (math.log(end) for end in speedup["ci95"])
    assert (low + high) / 2 == pytest.approx(statistics.mean(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    assert 1.96 < (high - low) / 2 / error < 4.31, "Student's t for 3 to 100 pairs"
    assert speedup["layers"] == pytest.approx(LAYERS * of.steps / sum(row["layers_run"] for row in of.good))
    ratio = [
        sum(b[f"{kind}predicted_prefill_s"] + b[f"{kind}predicted_decode_s"] for b in of.pairs)
        for kind in ("full_", "")
    ]
    assert speedup["predicted"] == pytest.approx(ratio[0] / ratio[1])
    assert speedup["batches"] == len(of.pairs)
    decode_logs = [
        math.log(b["full_decode_s"] / b["full_output_tokens"]) - math.log(b["decode_s"] / b["output_tokens"])
        for b in of.pairs
    ]
    assert speedup["measured_decode"] == pytest.approx(math.exp(statistics.mean(decode_logs)))


def check_agreement(of: Recount) -> None:
    agreement = of.figure("agreement")
    assert agreement["rows"] == sum(b["rows"] for b in of.pairs)
    assert agreement["exact_rows"] == pytest.approx(sum(b["exact_rows"] for b in of.pairs) / agreement["rows"])
    matched, compared = (sum(b[name] for b in of.pairs) for name in ("matched_tokens", "compared_tokens"))
    assert agreement["token_match"] == pytest.approx(matched / compared)
    assert of.figure("baseline_s") == pytest.approx(sum(b["full_prefill_s"] + b["full_decode_s"] for b in of.pairs))


def check_actors(of: Recount) -> None:
    actors = {actor["worker"]: actor for actor in of.figure("actors")}
    assert actors.keys() == {start["worker"] for start in of.workers}
    for start in of.workers:
        own, actor = [w for w in of.windows if w["worker"] == start["worker"]], actors[start["worker"]]
        assert actor["rows"] == sum(w["rows"] for w in own)
        assert actor["busy_s"] == pytest.approx(sum(w["ended_at"] - w["started_at"] for w in own))
        assert actor["load_s"] == start["load_s"]
        if not actor["left"]:
            assert actor["idle_s"] + actor["busy_s"] == pytest.approx(of.end - start["ready_at"])
        assert actor["restarts"] == 0
        assert actor["backend"] == start["backend"]
        assert actor["backend"]["name"] in choice.NAMES


def check_tail(of: Recount) -> None:
    tail, last = of.figure("tail"), max(w["ended_at"] for w in of.windows)
    names, actors = {w["worker"] for w in of.windows}, of.figure("actors")
    ends = [max(w["ended_at"] for w in of.windows if w["worker"] == name) for name in names]
    left = [end for end in ends if any(windows_after(of.windows, a["worker"], end) >= 4 for a in actors)]
    ends = [end for end in ends if end not in left]
    assert tail["left"] == len(left) == sum(actor["left"] for actor in actors)
    assert tail["idle_s"] == pytest.approx(sum(last - end for end in ends))
    assert tail["duration_s"] == pytest.approx(last - min(ends))
    span = last - min(w["started_at"] for w in of.windows)
    assert tail["idle_share"] == pytest.approx(tail["idle_s"] / (span * len(ends)))


def check_throughput(of: Recount) -> None:
    rate = of.figure("throughput")
    assert rate["bin_s"] * len(rate["output_tokens_per_s"]) == pytest.approx(of.seconds)
    assert sum(rate["output_tokens_per_s"]) * rate["bin_s"] == pytest.approx(sum(of.answers))
    fine = np.zeros(60_000)  # the same by brute force: each batch spread over thousands of slices
    for b in of.batches:
        took = sum(b[part] or 0 for part in ("prefill_s", "decode_s", "full_prefill_s", "full_decode_s"))
        at = b["started_at"] - of.begin + took * (np.arange(5000) + 0.5) / 5000
        np.add.at(fine, (at / of.seconds * len(fine)).astype(int), b["output_tokens"] / 5000)
    brute = fine.reshape(60, -1).sum(axis=1) / rate["bin_s"]
    assert rate["output_tokens_per_s"] == pytest.approx(brute, abs=0.01 * brute.max())


def check_lengths(of: Recount) -> None:
    for kind, counted in (("input", of.prompts), ("output", of.answers)):
        found = of.figure("lengths")[kind]
        assert (found["min"], found["max"]) == (min(counted), max(counted))
        assert found["mean"] == pytest.approx(statistics.mean(counted))
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            assert found[name] == sorted(counted)[math.ceil(share * len(counted)) - 1]
        assert found["rows"] == np.histogram(counted, bins=np.array(found["edges"]) - 0.5)[0].tolist()


def check_layers(of: Recount) -> None:
    steps_of = of.figure("layers_by_step")
    # max 5, min 2 over NEW - 1 steps, by the formula of the schedule's definition
    planned = [math.floor(5 - 3 * min(k / (NEW - 2), 1) + 0.5) for k in range(NEW - 1)]
    assert steps_of["planned"] == planned
    assert len(steps_of["run"]) > 3
    for piece in steps_of["run"]:
        inside = planned[piece["first"] : piece["last"] + 1]
        assert piece["layers"] == pytest.approx(sum(inside) / len(inside))
    assert steps_of["run"][-1]["last"] == max(of.answers) - 2
    assert steps_of["reason"] is None


def check_errors(of: Recount) -> None:
    codes = [row["error_code"] for row in of.bad]
    assert of.figure("errors") == {code: codes.count(code) for code in set(codes)}
    assert set(codes) == {"prompt_missing", "prompt_too_long", "duplicate_id"}
    messages = {(row["error_code"], row["id"], row["error_message"]) for row in of.bad}
    for code, examples in of.figure("error_examples").items():
        assert len(examples) == min(3, codes.count(code))
        assert {(code, e["id"], e["message"]) for e in examples} <= messages


def check_the_rest(of: Recount) -> None:
    assert of.figure("books") == {"input": NUM_ROWS, "ok": len(of.good), "failed": len(of.bad), "closed": True}
    assert of.figure("split_batches") == of.figure("baseline_errors") == {"count": 0, "first": None}
    again = {"rows": sum(b["rows"] for b in of.batches) - len(of.good), "output_tokens": 0}
    assert of.figure("decoded_again") == again == {"rows": 0, "output_tokens": 0}
    assert of.figure("cost") is None
    assert (of.figure("decode"), of.figure("model")) == (of.finished.state["decode"], of.finished.state["model"])
    assert of.figure("prefill") == "full"
    assert {of.figure(name) for name in ("draft_acceptance", "tokens_per_pass", "drafts")} == {None}
    assert of.figure("documents") == NUM_ROWS
    said, expected = of.figure("estimate"), of.finished.state.get("estimate")
    assert (said is None) == (expected is None)  # there is none where the run was over before its first look
    if said is not None:
        assert said["duration_ratio"] == pytest.approx(expected["duration_s"] / of.seconds)
        assert said["output_tokens_ratio"] == pytest.approx(expected["output_tokens"] / sum(of.answers))


def windows_after(windows: list[dict[str, Any]], worker: str, moment: float) -> int:
    """How many windows of its own the worker began after that."""
    begun: dict[int, float] = {}
    for window in windows:
        if window["worker"] == worker and window["window"]:
            begun[window["window"]] = min(window["started_at"], begun.get(window["window"], math.inf))
    return sum(at > moment for at in begun.values())


def test_what_takes_longest_is_decoded_first(finished: Finished) -> None:
    """Within each window, since others may be idle before it ends."""
    orders: dict[tuple[str, int], list[int]] = {}
    batches = sorted(finished.read("batches"), key=lambda batch: batch["started_at"])
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
