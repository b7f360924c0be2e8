"""The Grafana dashboard asks for the names that a run exports: all of them, and no others."""

import json
import re
from pathlib import Path

from pipeline.report.prometheus import METRICS

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana-dashboard.json"


def test_the_dashboard_uses_exactly_the_names_of_a_run() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"ray_skipdecode_\w+", text)}
    assert used == {metric.exported for metric in METRICS}


def test_a_histogram_is_asked_for_its_parts_and_a_counter_for_a_total() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    names = set(re.findall(r"ray_skipdecode_\w+", text))
    for metric in METRICS:
        own = {name for name in names if name.startswith(metric.exported)}
        suffixes = {name.removeprefix(metric.exported) for name in own}
        assert suffixes <= ({"_bucket", "_sum", "_count"} if metric.kind == "histogram" else {""}), metric.name


def test_the_labels_of_the_dashboard_are_tags_of_its_metrics() -> None:
    by_name = {metric.exported: metric for metric in METRICS}
    for expression in [t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p["targets"]]:
        assert expression.count("(") == expression.count(")")
        for name, labels in re.findall(r"(ray_skipdecode_\w+)\{([^}]*)\}", expression):
            metric = by_name[re.sub(r"_(bucket|sum|count)$", "", name)]
            assert set(re.findall(r"(\w+)=", labels)) <= {"run", *metric.tags}


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_rows_that_are_decoded_again_do_not_break_the_progress() -> None:
    """They count again, so the sum may pass what was planned."""
    panels = {p["title"]: p["targets"][0]["expr"] for p in json.loads(DASHBOARD.read_text())["panels"]}
    assert re.fullmatch(r"clamp_max\(.*, 1\)", panels["Done"])
    assert re.fullmatch(r"clamp_min\(.*, 0\) / .*", panels["Time to go"])


def test_totals_are_of_runs_that_are_on() -> None:
    """Ray keeps the counters of a run that has ended, and forgets its gauges: `All` would add up what is over."""
    is_on = " and on(run) ray_skipdecode_rows_planned{"
    for expression in [t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p["targets"]]:
        rest = re.sub(r"rate\(\w+\{[^}]*\}\[\$window\]\)", "", expression)  # of what is over: 0
        for after in re.split(r"\w+_total\{[^}]*\}", rest)[1:]:
            assert after.removeprefix("[5m])").startswith(is_on), expression


def test_sums_of_histograms_are_not_used() -> None:
    """Ray makes them from the middles of the buckets."""
    assert not re.search(r"ray_skipdecode_\w+_sum\b", DASHBOARD.read_text())


def test_the_document_is_what_grafana_imports() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert re.fullmatch(r"[\w-]{1,40}", document["uid"])
    assert "id" not in document, "Grafana's own number of a dashboard; another one's would be written over"
    assert re.fullmatch(r"\d+[smh]", document["refresh"])
    variables = {variable["name"]: variable["type"] for variable in document["templating"]["list"]}
    assert variables == {"datasource": "datasource", "run": "query", "window": "interval"}
    own = {"type": "prometheus", "uid": "${datasource}"}
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["description"]
        assert panel["datasource"] == own
        assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])
        for target in panel["targets"]:
            assert target["datasource"] == own
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables.keys()
            assert "run=~" in target["expr"]
            assert target["legendFormat"], "else the legend is the whole query"


def test_figures_have_units_and_colours_that_grafana_knows() -> None:
    """Units: ids of `getValueFormats` in @grafana/data 11.6, or `suffix:`."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in ("none", "short", "locale", "percentunit", "s", "dthms", "suffix:x")
        names = {target["legendFormat"] for target in panel["targets"]}
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in names | ({"ok", "failed"} if "{{status}}" in names else set())
        if panel["type"] == "stat":  # without steps Grafana paints everything above 80 red
            values = [step["value"] for step in defaults["thresholds"]["steps"]]
            assert values[0] is None
            assert values[1:] == sorted(values[1:])
