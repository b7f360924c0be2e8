"""The page of a report made by hand: whatever a run holds is text on it, and every worker's back end is named."""

import copy
import html.parser
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from pipeline.cluster.worker_records import BackendRecord, BatchRecord, WindowRecord, WorkerRecord
from pipeline.report.compare import ComparedRun, _page, differences, figures
from pipeline.report.figures import make_report
from pipeline.report.metrics_schemas import BATCH_SCHEMA, WINDOW_SCHEMA, WORKER_SCHEMA, StoredStart
from pipeline.report.page import LABELS, Single, render_report
from pipeline.store.run_folder import RunFolder

NASTY = "</code></pre></style><script>alert(1)</script>\"'&amp; {{ 7 * 7 }} {% raw %} <img src=x>"
STATE: dict[str, Any] = {
    "former": [], "files": {"data/status=ok/part-0-0-0.parquet": [5, ""]},
    "version": "1.0.0", "state": "finished", "sessions": [{"id": "0" * 12, "started_at": 0.0, "ended_at": 100.0}],
    "books": {"input": 5, "ok": 4, "failed": 1, "closed": True}, "decode": {"method": "skipdecode", "speedup": 2},
    "model": {"source": "m", "layers": 24}, "fingerprint": {"prefill.method": "full", "model.files": "abc"},
    "input": {"documents": 5},
    "config": {"actors": {"price_per_hour": None}, "sampling": {"max_new_tokens": 8},
               "baseline": {"fraction": 0.02}},
}  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: names of tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def actor(worker: str, backend: BackendRecord | None) -> dict[str, Any]:
    return {"worker": worker, "host": "h", "device": "cpu", "dtype": "float32", "backend": backend, "why_slow": None,
            "load_s": 1.0, "busy_s": 2.0, "idle_s": 3.0, "restarts": 0, "rows": 5, "left": False}  # fmt: skip


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """Of a run that has written nothing."""
    return make_report(RunFolder.open(str(tmp_path)), STATE).figures | {}


def test_whatever_a_run_holds_is_text_on_its_page(report: dict[str, Any]) -> None:
    plain = Page(render_report(report | {"actors": [actor("w", None)]}, STATE, []))
    state = copy.deepcopy(STATE)
    state["model"]["source"] = state["fingerprint"][NASTY] = state["config"][NASTY] = NASTY
    state["sessions"][0]["id"] = NASTY
    own = {"host": NASTY, "device": NASTY, "why_slow": NASTY}
    report["actors"] = [actor(NASTY, {"name": "torch", "reason": NASTY}) | own]
    report |= {
        "finish_reasons": {NASTY: 1}, "errors": {NASTY: 1},
        "error_examples": {NASTY: [{"id": NASTY, "message": NASTY}]}, "prefill": NASTY,
        "decode": {"method": NASTY}, "split_batches": {"count": 1, "first": NASTY},
        "baseline_errors": {"count": 1, "first": NASTY},
    }  # fmt: skip
    report["layers_by_step"]["reason"] = NASTY
    lanes = [{"worker": NASTY, "load": [], "busy": [], "restarts": []}]
    text = render_report(report, state, lanes)
    page = Page(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    dumped = yaml.safe_dump(state["config"], sort_keys=False, default_flow_style=None)
    assert dumped in page.text
    assert page.text.replace(dumped, "").count(NASTY) == 19
    assert "img" not in page.tags
    assert text.count("<script") == 1, "the page's own"
    assert page.tags.count("section") == plain.tags.count("section")


def test_runs_side_by_side_are_text(report: dict[str, Any]) -> None:
    other = copy.deepcopy(STATE)
    other["config"]["decode"] = {NASTY: NASTY}
    runs = [ComparedRun(NASTY, report, STATE), ComparedRun("b", report, other)]
    text = _page(runs, figures(runs), differences(runs))
    page = Page(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    assert differences(runs) == {f"decode.{NASTY}": [None, NASTY]}
    assert page.text.count(NASTY) == 4
    assert text.count("<script") == 1
    assert "img" not in page.tags


def test_a_name_with_dollars_is_no_mathematics(report: dict[str, Any]) -> None:
    runs = [ComparedRun("runs/a$b$", report, STATE), ComparedRun("b", report, STATE)]
    plots = re.findall(r"<svg.*?</svg>", _page(runs, figures(runs), {}), re.DOTALL)
    assert [plot.count(">runs/a$b$<") for plot in plots] == [1, 1]


def test_credentials_are_not_shown(report: dict[str, Any]) -> None:
    state = copy.deepcopy(STATE)
    state["model"]["source"] = "s3://key:secret@bucket/m"
    text = render_report(report, state, [])
    assert "s3://***@bucket/m" in text
    assert "secret" not in text


def test_what_differs_is_said_without_credentials(report: dict[str, Any]) -> None:
    states = [copy.deepcopy(STATE) for _ in range(2)]
    for name, state in zip("ab", states, strict=True):
        state["config"]["input"] = {"path": [f"s3://{name}:secret@bucket/prompts"]}
        state["config"]["output"] = {"path": f"s3://key:secret@bucket/{name}"}
    assert differences([ComparedRun("run", report, state) for state in states]) == {
        "input.path": [["s3://***@bucket/prompts"]] * 2,
        "output.path": ["s3://***@bucket/a", "s3://***@bucket/b"],
    }


def test_the_page_names_each_back_end_once(report: dict[str, Any]) -> None:
    wide: BackendRecord = {"name": "avx512", "reason": "AVX-512 with BF16; no AMX"}
    slow: BackendRecord = {"name": "torch", "reason": "no compiler"}
    reason = {"why_slow": "the CPU kernels are not used: no compiler"}
    report["actors"] = [actor("a", slow) | reason, actor("b", wide), actor("c", wide), actor("d", None)]
    text = Page(render_report(report, STATE, [])).text
    assert "Kernels: avx512 (AVX-512 with BF16; no AMX), 2 workers; torch (no compiler), 1 worker." in text
    assert "Slower than it could be: the CPU kernels are not used: no compiler, 1 worker." in text


def test_records_and_schemas_have_the_same_keys() -> None:
    assert set(get_type_hints(WindowRecord)) | {"worker"} == set(WINDOW_SCHEMA.names)
    assert set(get_type_hints(WorkerRecord)) | {"worker"} == set(WORKER_SCHEMA.names)
    assert set(get_type_hints(StoredStart)) == set(WORKER_SCHEMA.names)
    assert {field.name for field in WORKER_SCHEMA.field("backend").type} == set(get_type_hints(BackendRecord))
    assert set(get_type_hints(BatchRecord)) < set(BATCH_SCHEMA.names)
    assert set(LABELS) == set(get_args(Single))
