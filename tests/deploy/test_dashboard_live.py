"""The dashboard over a real Prometheus that scrapes a real run: every panel gets figures, and they are the report's.

Grafana itself does not run here: how panels look is not tested.
"""

import json
import math
import re
import shutil
import statistics
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import ray

import pipeline.generate.stream
from jobs.generate import main as generate
from pipeline.cluster.pool import start_ray
from pipeline.demo.restaurant_prompts import make_prompts
from tests.deploy.test_dashboard import DASHBOARD
from tests.support.processes import free_ports, wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus on the PATH (apt-get install prometheus)"),
]
DOCUMENT = json.loads(DASHBOARD.read_text(encoding="utf-8"))
TARGETS = {f"{p['title']}: {t['legendFormat']}": (p, t) for p in DOCUMENT["panels"] for t in p["targets"]}
NUM_ROWS, NUM_EARLIER, BATCH, WINDOW_S = 480, 48, 16, 5
Values = dict[float, float]


@dataclass
class Recorded:
    url: str
    start: float
    end: float
    output: Path
    report: dict[str, Any]
    run: str
    """The session's id."""
    earlier: str
    """Of the run that the same Ray had before, over at `start`."""

    def ask(self, expression: str, run: str = ".+") -> list[tuple[dict[str, str], Values]]:
        """What a panel gets: labels, and figures by time, of each series."""
        expression = expression.replace("$run", run).replace("$window", f"{WINDOW_S}s")
        assert "$" not in expression
        data = get(self.url, "query_range", query=expression, start=self.start, end=self.end, step=1)
        return [(series["metric"], {t: float(v) for t, v in series["values"]}) for series in data["result"]]

    def values(self, name: str, **labels: str) -> list[float]:
        """Of the one series that the target `name` of TARGETS has with these labels, in time."""
        (values,) = [values for found, values in self.ask(TARGETS[name][1]["expr"]) if found == labels]
        return list(values.values())


def get(url: str, path: str, **parameters: Any) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
        document = json.load(answer)
    assert document["status"] == "success"
    return document["data"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes `target` every second; its address."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    jobs = [{"job_name": "ray", "static_configs": [{"targets": [target]}]}]
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url[7:]}"], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "ready to receive web requests" in (folder / "prometheus.log").read_text(), timeout_s=30)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def recorded(own_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A run of the demo model with failing rows after another one on the same Ray; what Prometheus heard of it."""
    folder, kept = tmp_path_factory.mktemp("dashboard"), []
    rows = list(make_prompts(NUM_ROWS))
    for i in range(0, NUM_ROWS, 20):
        rows[i]["prompt"] = None if i % 40 else rows[i]["prompt"] * 200
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "model.source=models/opt-e2e", "-i", str(folder / "in.jsonl"), "decode.speedup=3", "sampling.max_new_tokens=64",
        "actors.num_actors=2", f"actors.batch_size={BATCH}", "actors.window_batches=1", "baseline.fraction=0.5",
        f"limits.max_failed_rows={NUM_ROWS}",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        patch.setattr(
            "pipeline.cluster.progress.LINE_S", 0.5
        )  # gauges are told twice in an interval, as with Ray's 10 s
        real = pipeline.generate.stream.start_collector
        patch.setattr(pipeline.generate.stream, "start_collector", lambda *a: kept.append(real(*a)) or kept[-1])
        start_ray()
        node = ray.nodes()[0]
        with prometheus(folder, f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}") as url:

            def run(name: str, num_rows: int) -> tuple[str, Callable[[], bool]]:
                """The session's id, and whether Prometheus has its last figures."""
                assert generate([*arguments, "-o", str(folder / name), f"input.limit={num_rows}"]) == 0
                session = json.loads((folder / name / "run.json").read_text())["sessions"][0]["id"]

                def all_told() -> bool:
                    ray.get(kept[-1].counts.remote())  # as the progress line does
                    told = get(url, "query", query=f'sum(ray_skipdecode_rows_total{{run="{session}"}})')["result"]
                    return bool(told) and float(told[0]["value"][1]) == num_rows

                wait_for(all_told, timeout_s=180)
                return session, all_told

            earlier, _ = run("earlier", NUM_EARLIER)
            kept.clear()  # its collector ends, as it does with a run
            wait_for(lambda: not get(url, "query", query="ray_skipdecode_rows_planned")["result"], timeout_s=60)
            time.sleep(WINDOW_S + 2)  # until its figures have left every average
            start = time.time()
            session, all_told = run("run", NUM_ROWS)
            for _ in range(WINDOW_S + 2):
                time.sleep(1)
                all_told()
            report = json.loads((folder / "run/report.json").read_text())
            yield Recorded(url, start, time.time(), folder / "run", report, session, earlier)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_gets_figures(recorded: Recorded, name: str) -> None:
    """No NaN or infinity among them: no scale bears them, and a single figure would show them."""
    panel, target = TARGETS[name]
    answers, shown = recorded.ask(target["expr"]), re.findall(r"{{(\w+)}}", target["legendFormat"])
    assert answers
    assert shown or len(answers) == 1, "series that their legend does not tell apart"
    for labels, values in answers:
        assert labels.keys() == set(shown)
        assert len(values) > 5
        assert all(math.isfinite(value) and value >= 0 for value in values.values()), values
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            assert max(values.values()) <= 1


def test_the_run_can_be_chosen(recorded: Recorded) -> None:
    (query,) = [v["query"] for v in DOCUMENT["templating"]["list"] if v["name"] == "run"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
    assert set(get(recorded.url, f"label/{label}/values", **{"match[]": name})) == {recorded.run, recorded.earlier}
    for _panel, target in TARGETS.values():
        assert not recorded.ask(target["expr"], "other")


@pytest.mark.parametrize("name", TARGETS)
def test_a_run_that_is_over_changes_nothing(recorded: Recorded, name: str) -> None:
    """Ray still tells its counters."""
    (rows,) = recorded.ask("sum(ray_skipdecode_rows_total{run=~'$run'})", recorded.earlier)
    assert set(rows[1].values()) == {NUM_EARLIER}

    def figures(run: str) -> dict[str, Values]:
        """Without zeros: a rate is 0 before the counters of the chosen run are there, if there are others."""
        answers = recorded.ask(TARGETS[name][1]["expr"], run)
        return {str(labels): {t: v for t, v in values.items() if v} for labels, values in answers}

    assert figures(".+") == figures(recorded.run)


def test_the_single_figures_are_the_reports(recorded: Recorded) -> None:
    report = recorded.report
    assert report["failed"] == NUM_ROWS // 20
    done, failed = recorded.values("Done: Done"), recorded.values("Failed rows: Failed rows")
    assert (done[0], done[-1]) == (0, 1)
    assert done == sorted(done)
    assert (failed[0], failed[-1]) == (0, report["failed"])
    assert recorded.values("Time to go: Time to go")[-1] == 0
    speedup, match = (recorded.values(f"{t}: {t}")[-1] for t in ("Speedup, measured", "Tokens as at full depth"))
    assert speedup == pytest.approx(report["speedup"]["measured"])
    assert match == pytest.approx(report["agreement"]["token_match"])


def test_averages_over_time_add_up_to_the_reports_totals(recorded: Recorded) -> None:
    report = recorded.report
    busy_s = sum(actor["busy_s"] for actor in report["actors"])
    for values, expected in (
        (recorded.values("Output tokens per second: Output tokens per second"), report["total_output_tokens"]),
        (recorded.values("Tokens per second: output"), report["total_output_tokens"]),
        (recorded.values("Tokens per second: input"), report["total_input_tokens"]),
        (recorded.values("Rows per second: {{status}}", status="ok"), report["completed"]),
        (recorded.values("Rows per second: {{status}}", status="failed"), report["failed"]),
        (recorded.values("Workers: busy"), busy_s),
    ):
        assert sum(values) == pytest.approx(expected, rel=0.15)


def test_workers_and_batches_are_the_reports(recorded: Recorded) -> None:
    report = recorded.report
    tables = [ds.dataset(path).to_table() for path in (recorded.output / "metrics").glob("batches-*.parquet")]
    batches = [batch for table in tables for batch in table.to_pylist()]
    assert recorded.values("Workers: seen")[-1] == 2
    assert set(recorded.values("Restarts and split batches: restarts")) == {0}, "a first start is no restart"
    assert set(recorded.values("Restarts and split batches: split batches")) == {0}
    load_s = statistics.mean(actor["load_s"] for actor in report["actors"])
    assert recorded.values("Time to load the model: mean")[-1] == pytest.approx(load_s)
    layers, rows = recorded.values("Layers per token: layers"), recorded.values("Rows of a batch: rows")
    assert statistics.mean(layers) == pytest.approx(report["layers_per_token"], rel=0.03)
    assert statistics.mean(rows) == pytest.approx(statistics.mean(b["rows"] for b in batches), rel=0.2)
    assert max(rows) <= BATCH
    seconds = statistics.median(b["prefill_s"] + b["decode_s"] for b in batches)
    told = statistics.median(recorded.values("Time of a batch: median"))
    assert seconds / 2.5 <= told <= seconds * 2.5, "from buckets of 1, 2, 5"
