"""The checks of `make gpu`, on the CUDA back end with torch's operators on a CPU: they pass there, and each finds what
it is for. Speed means nothing here, and is only computed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, SMALL, Bench, Wrong, main, run_checks
from skipdecode.backends.cuda import CudaBackend
from skipdecode.cost import Ceilings
from skipdecode.families import config_of
from skipdecode.step_graphs import StepGraphs
from tests.support.graphs import FakeCaptures, cpu_as_cuda


@pytest.fixture(autouse=True)
def _as_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_check, "measure_ceilings", lambda *_: Ceilings(1e12, 1e11, 1e-6))
    with cpu_as_cuda():
        yield


def bench() -> Bench:
    small = config_of(SMALL | {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 3})
    return Bench(torch.device("cpu"), small, rows=(2, 4), prompt_tokens=8, new_tokens=6, cache_bytes=1 << 20)


def first_wrong(only: str) -> str:
    needed = {"batches": ["captures"]}.get(only, [])
    document = run_checks(bench(), {name: CHECKS[name] for name in [*needed, only]}, lambda _: None)
    return str(document["wrong"])


def test_all_is_well() -> None:
    notes: list[str] = []
    document = run_checks(bench(), CHECKS, notes.append)
    assert document["wrong"] is None
    assert [note.partition(":")[0] for note in notes] == list(CHECKS)
    assert document["captures"]["graphs"] == 3 * 4  # type: ignore[index]
    assert [row["schedule"] for row in document["speed"]["rows"]] == ["full", "skipdecode 2x"] * 2  # type: ignore[index]
    json.dumps(document)


def test_the_first_thing_that_is_wrong_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def broken(_bench: Bench) -> dict[str, object]:
        raise Wrong("it smokes", {"smoke": True})

    document = run_checks(bench(), {"a": lambda _: {}, "b": broken, "c": broken}, notes.append)
    assert document == {"wrong": "b: it smokes", "a": {}, "b": {"smoke": True}}
    assert notes[-1] == "WRONG: b: it smokes"
    monkeypatch.setattr(gpu_check, "backend_on", lambda _: 1 / 0)
    assert first_wrong("kernels") == "kernels: ZeroDivisionError: division by zero"


def test_kernels_that_read_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "reads_tables", False)
    assert "cannot be CUDA graphs" in first_wrong("kernels")


def test_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = FakeCaptures(RuntimeError("not permitted when stream is capturing"))
    monkeypatch.setattr("skipdecode.step_graphs.captures_on", lambda _: captures)
    for check in ("tokens", "captures"):
        assert "cannot be captured: RuntimeError: not permitted" in first_wrong(check)


def test_tokens_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepGraphs._step

    def off_by_one(self: StepGraphs, plan: object, rows: int) -> None:
        step(self, plan, rows)  # type: ignore[arg-type]
        self._tokens[0].fill_(7)

    monkeypatch.setattr(StepGraphs, "_step", off_by_one)
    assert first_wrong("tokens") == "tokens: captured: tokens of rows 0 of a small float32 model are not those of a CPU"


def test_graphs_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "plans_of", lambda *_: [])
    assert "graphs were captured within ten batches" in first_wrong("batches")


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--output", str(tmp_path)]) == 2
    assert "no GPU: torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_document_with_device_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_check, "CHECKS", {"device": lambda _: {"name": "it"}})
    assert main(["--output", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-gpu-check-nvidia-h100-80gb-hbm3.json")
    document = json.loads(file.read_text())
    assert document["device"] == "NVIDIA H100 80GB HBM3"
    assert document["wrong"] is None
    assert document["checks"] == {"device": {"name": "it"}}


@pytest.mark.process
def test_needs_neither_ray_nor_pydantic() -> None:
    """A bare GPU machine has torch and little else."""
    blocked = "import sys; sys.modules['ray'] = sys.modules['pydantic'] = None; import benchmarks.gpu_check"
    subprocess.run([sys.executable, "-c", blocked], check=True, cwd=Path(gpu_check.__file__).parents[1])
