"""The checks of `make gpu`, on the CUDA back end with torch's operators on a CPU: they pass there, and each finds what
it is for. Speed means nothing here, and is only computed; what runs in processes of its own has its own tests."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import attention, machine_checks, overlap
from benchmarks.gpu import decoding_checks as decoding
from benchmarks.gpu.check_context import CheckContext, CheckFailed, not_run
from benchmarks.gpu.decoding_checks import check_batches, rows_that_fit
from benchmarks.gpu.fp8_checks import speed_problem
from benchmarks.gpu.method_checks import SMALL_GROUPED
from benchmarks.gpu_check import CHECKS, NEEDS, TINY, TINY_GROUPED, main, run_checks, table
from skipdecode.backends.backend import TORCH
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine import cuda_graphs as cuda_graphs
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate
from skipdecode.engine.prefill import rows_at_once
from skipdecode.engine.request import Request
from skipdecode.families import config_of, released
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer import Layer
from skipdecode.schedules.schedule import FullDepth
from tests.support.graphs import FakeCaptures, cpu_as_cuda

PROCESSES = {
    "lane", "sanitizer", "job", "resume", "exact", "peers", "generate_batch", "workers", "corpus", "soak", "fp8",
}  # fmt: skip
"""Run in processes of their own, or with a context that is dry."""
SHAPE = config_of(TINY)


@pytest.fixture(autouse=True)
def _as_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("benchmarks.gpu.check_context.measure_ceilings", lambda *_: Ceilings(1e12, 1e11, 1e-6))
    monkeypatch.setattr(machine_checks, "nvidia_smi", lambda: {"driver": None, "cuda": None, "devices": []})
    monkeypatch.setattr(attention, "MAX_NEW_SHAPE_S", 60.0)
    monkeypatch.setattr(attention, "MIN_OF_BEST", 0.0)
    with cpu_as_cuda():
        yield


def context(**keys: object) -> CheckContext:
    sizes = {"rows": (2, 4), "prompt_tokens": 8, "new_tokens": 6, "context_tokens": 32, "cache_bytes": 1 << 20} | keys
    return CheckContext(torch.device("cpu"), SHAPE, **sizes)  # type: ignore[arg-type]


def first_wrong(only: str) -> str:
    needed = {"batches": ["captures"]}.get(only, [])
    document = run_checks(context(), {name: CHECKS[name] for name in [*needed, only]}, lambda _: None)
    return str(document["wrong"])


@pytest.mark.slow
def test_nothing_is_wrong() -> None:
    notes: list[str] = []
    checks = {name: check for name, check in CHECKS.items() if name not in PROCESSES}
    document = run_checks(context(larger=SHAPE, grouped=config_of(TINY_GROUPED)), checks, notes.append)
    assert document["wrong"] is None
    assert [note.partition(":")[0] for note in notes] == list(checks)
    assert document["captures"]["graphs"] == 3 * 4  # type: ignore[index]
    assert [row["schedule"] for row in document["speed"]["rows"]] == ["full", "skipdecode 2x"] * 2  # type: ignore[index]
    assert "not_run" in document["overlap"]  # type: ignore[operator]
    assert document["larger"]["rows_that_fit"] == (2, 4)  # type: ignore[index]
    assert document["larger"]["captures"]["graphs"] == 3 * 4  # type: ignore[index]
    assert len(document["larger"]["rows"]) == 4  # type: ignore[index]
    json.dumps(document)


def test_what_must_hold_comes_before_what_should_be_fast() -> None:
    names = list(CHECKS)
    assert names[:4] == ["device", "kernels", "tokens", "lane"]
    assert names.index("captures") < min(map(names.index, NEEDS))
    # with the device free again: what builds a model of its own follows all that use the first one
    assert max(map(names.index, NEEDS)) < names.index("larger")


def test_the_first_thing_that_is_wrong_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def broken(_context: CheckContext) -> dict[str, object]:
        raise CheckFailed("it smokes", {"smoke": True})

    saved: list[list[str]] = []
    checks = {"a": lambda _: not_run("no means"), "b": broken, "c": broken}
    document = run_checks(context(), checks, notes.append, lambda found: saved.append([*found]))
    assert set(document.pop("seconds")) == {"a", "b"}  # type: ignore[call-overload]
    wrong = {"wrong": "b: it smokes", "more_wrong": []}
    assert document == wrong | {"a": {"not_run": "no means"}, "b": {"smoke": True}}
    assert notes[0].startswith("a: not run, no means (")
    assert notes[1:] == ["WRONG: b: it smokes"]
    assert saved == [["wrong", "more_wrong", "seconds", "a"], ["wrong", "more_wrong", "seconds", "a", "b"]]
    monkeypatch.setattr(machine_checks, "backend_on", lambda _: 1 / 0)
    assert first_wrong("kernels") == "kernels: ZeroDivisionError: division by zero"


def test_it_goes_on_behind_what_is_wrong_and_ends_with_a_table() -> None:
    """But for checks of a model that the wrong one was to build."""

    def broken(_context: CheckContext) -> dict[str, object]:
        raise CheckFailed("it smokes")

    checks = {"device": lambda _: {}, "captures": broken, "speed": lambda _: {}, "larger": broken, "job": lambda _: {}}
    notes: list[str] = []
    document = run_checks(context(), checks, notes.append, keep_going=True)
    assert document["wrong"] == "captures: it smokes"
    assert document["more_wrong"] == ["larger: it smokes"]
    assert document["speed"] == {"not_run": "captures is wrong"}
    lines = [line.split() for line in table(document, [*checks, "overlap"])]
    assert [line[:2] for line in lines] == [
        ["device", "well"], ["captures", "WRONG"], ["speed", "not"], ["larger", "WRONG"], ["job", "well"],
        ["overlap", "left"],
    ]  # fmt: skip
    assert lines[1][-2:] == ["it", "smokes"]
    assert lines[2][-3:] == ["captures", "is", "wrong"]
    assert lines[5] == ["overlap", "left"]


def test_a_dry_run_goes_on_and_ends_with_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_context: CheckContext) -> dict[str, object]:
        raise CheckFailed("it smokes")

    monkeypatch.setattr(gpu_check, "dry_context", context)
    monkeypatch.setattr(gpu_check, "CHECKS", {"device": lambda _: {}, "soak": broken, "job": lambda _: not_run("no")})
    assert main(["--dry-run", "--keep-going"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == {"wrong": "soak: it smokes", "dry_run": True}
    lines = told.err.splitlines()[-4:]
    assert lines[0] == "dry run, no GPU was used:"
    assert [line.split()[:2] for line in lines[1:]] == [["device", "well"], ["soak", "WRONG"], ["job", "not"]]
    assert main(["--dry-run"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].split() == ["job", "left"]


def test_kernels_that_read_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "supports_graph_capture", False)
    assert "cannot be CUDA graphs" in first_wrong("kernels")


def test_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = FakeCaptures(RuntimeError("not permitted when stream is capturing"))
    monkeypatch.setattr("skipdecode.engine.cuda_graphs.GraphCapture", lambda: captures)
    for check in ("tokens", "captures"):
        assert "cannot be captured: RuntimeError: not permitted" in first_wrong(check)


def test_fewer_graphs_than_there_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails where memory ends the captures, and later checks would time steps without graphs."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPH_BYTES", 1000)
    monkeypatch.setattr("skipdecode.engine.cuda_graphs.GraphCapture", lambda: FakeCaptures(graph_bytes=300))
    sentence = first_wrong("captures")
    assert "4 graphs were captured, and 3 plans at 4 numbers of rows are 12: 4 graphs in " in sentence
    assert "full (all of them may take" in sentence


def test_more_plans_than_graphs_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 9)
    monkeypatch.setattr(decoding, "MAX_GRAPHS", 9)
    assert first_wrong("captures") == "None"


def test_two_gpus_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cpu")] * 2  # one after the other, whatever the order
    monkeypatch.setattr(overlap, "visible", lambda _: devices)
    monkeypatch.setattr(overlap, "MAX_RATIO", 0.01)
    document = run_checks(context(), {"overlap": CHECKS["overlap"]}, lambda _: None)
    assert "one GPU waits for the other" in str(document["wrong"])
    assert document["overlap"]["rows_of_a_part"] == 2  # type: ignore[index]
    monkeypatch.setattr(overlap, "MAX_RATIO", 100.0)
    document = run_checks(context(), {"overlap": CHECKS["overlap"]}, lambda _: None)
    assert document["wrong"] is None
    json.dumps(document)


def test_one_part_is_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """That two parts take longer than one where nothing overlaps is not taken for granted: both are timed."""
    seen: list[tuple[int, int]] = []

    def passes(
        _context: CheckContext, model: Decoder, _plan: object, rows: int, _devices: object
    ) -> tuple[float, float]:
        assert model.placement is not None
        seen.append((model.placement.num_parts, rows))
        return 1.0, 1.0

    monkeypatch.setattr(overlap, "visible", lambda _: [torch.device("cpu")] * 2)
    monkeypatch.setattr(overlap, "timed_passes", passes)
    assert run_checks(context(), {"overlap": CHECKS["overlap"]}, lambda _: None)["wrong"] is None
    assert seen == [(1, 2), (2, 4)]
    assert overlap.overlap_problem(1.0, 1.2) is None
    assert "take 1.90 times as long as one" in str(overlap.overlap_problem(1.0, 1.9))


def test_tokens_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    step = CudaGraphs._step

    def off_by_one(self: CudaGraphs, plan: object, rows: int, prefixes: object) -> None:
        step(self, plan, rows, prefixes)  # type: ignore[arg-type]
        self._tokens[0].fill_(7)

    monkeypatch.setattr(CudaGraphs, "_step", off_by_one)
    assert (
        first_wrong("tokens") == "tokens: captured, greedy: tokens of rows 0 of a small float32 model are not a CPU's"
    )


@pytest.mark.parametrize("raw", [decoding.SMALL, SMALL_GROUPED], ids=["opt", "llama"])
def test_tokens_of_a_small_model_depend_on_every_layer(raw: dict[str, object]) -> None:
    """On half a head of each, or equal tokens would say nothing of the kernels."""
    requests = context().requests([1, 9, 40], 8, 512)
    model = decoding.small_model(raw)

    def tokens() -> list[list[int]]:
        return [one.tokens for one in generate(model, requests, FullDepth(4)).completions]

    wanted = tokens()
    for layer in model.layers:
        for weight in (layer.out_proj.weight, layer.fc2.weight):
            before = weight.clone()
            weight[:, :32] = 0.0
            assert tokens() != wanted
            weight.copy_(before)
    assert tokens() == wanted


def test_swiftkv_that_is_not_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights that only SwiftKV uses are others on the device: what has no part in it is not looked at."""
    move = Decoder.to

    def moved(model: Decoder, *args: object, **keys: object) -> Decoder:
        if model.swiftkv is not None:
            for weight in model.swiftkv.parameters():
                weight.neg_()
        return move(model, *args, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "to", moved)
    found = run_checks(context(is_dry=True), {"swiftkv": CHECKS["swiftkv"]}, lambda _: None)
    assert re.fullmatch(
        "swiftkv: without graphs, greedy: tokens of rows [0-2, ]+ of a small float32 model are not a CPU's",
        str(found["wrong"]),
    )


def test_fp8() -> None:
    """Half the bytes of keys and values, and answers that rounding explains."""
    document = run_checks(context(is_dry=True), {"fp8": CHECKS["fp8"]}, lambda _: None)
    assert document["wrong"] is None
    found: dict[str, Any] = document["fp8"]  # type: ignore[assignment]
    assert list(found["steps"]) == ["bfloat16", "fp8 keys and values", "both"]
    plain, narrow, _ = ([row["cache_bytes"] for row in one["rows"]] for one in found["steps"].values())
    assert plain == [2 * size for size in narrow]
    assert set(found["agreement"]["both"]) == {"full", "2x"}
    rows = [[{"schedule": "full", "cache_bytes": size, "ms_per_step": ms}] for size, ms in ((8, 2.0), (4, 1.9), (5, 1))]
    plain, slow, large = ({"rows": row} for row in rows)
    steps = {"bfloat16": plain, "fp8 keys and values": slow}
    assert speed_problem(steps, on_gpu=False) is None
    assert speed_problem(steps, on_gpu=True) == "full: with keys and values in fp8 a step takes 95% of bfloat16's time"
    assert "take 5 bytes in fp8 and 8" in str(speed_problem(steps | {"fp8 keys and values": large}, on_gpu=True))


def test_fp8_with_wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipdecode.model.decoder.scale_keys_and_values", no_keys)
    found = run_checks(context(is_dry=True), {"fp8": CHECKS["fp8"]}, lambda _: None)
    assert re.fullmatch(
        r"fp8: fp8 keys and values, full: \d+% of an answer comes before it differs from bfloat16's",
        str(found["wrong"]),
    )


def no_keys(config: DecoderConfig, layers: Sequence[Layer], _swiftkv: object) -> None:
    """Scales with which every key and value is rounded to zero."""
    for layer in layers:
        layer.qkv.weight[config.q_dim :] *= 1e-6


def test_graphs_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "plans_of", lambda *_: [])
    assert "graphs were captured within ten batches" in first_wrong("batches")


@pytest.mark.parametrize("kept", [0, 100 << 20])
def test_memory_of_the_largest_batch_is_not_kept(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """The shape that `make gpu` has: torch reserves what the largest part of any prompts took, and keeps it."""
    fake, batches = SimpleNamespace(most=0, kept=0), []

    def generate(_model: object, requests: list[Request], *_: object, **__: object) -> None:
        columns = max(len(request.prompt_tokens) for request in requests)
        rows = min(len(requests), rows_at_once(model, columns, columns, has_mask=True))
        fake.most, fake.kept = max(fake.most, rows * columns * 40 << 10), fake.kept + kept
        batches.append((len(requests), columns))

    device = torch.device("cuda")
    model = SimpleNamespace(config=released("opt-1.3b"), device=device, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    model.max_prefill_tokens = TORCH.max_prefill_tokens([], device)
    monkeypatch.setattr(decoding, "generate", generate)
    monkeypatch.setattr(decoding, "reserved_bytes", lambda _: fake.most + fake.kept)
    shape = CheckContext(torch.device("cpu"), released("opt-1.3b"))
    pool = SimpleNamespace(free_bytes=1)
    shape.model, shape.graphs = model, SimpleNamespace(num_captured=0, nbytes=1, pool=pool)  # type: ignore[assignment]
    if kept:
        with pytest.raises(CheckFailed, match="bytes more over ten batches; something is kept"):
            check_batches(shape)
    else:
        assert len(check_batches(shape)["seconds"]) == 10  # type: ignore[arg-type]
    assert batches[0] == (256, 128) == max(batches)
    assert len(set(batches)) == 10


def test_rows_of_a_larger_model_fit_beside_its_weights() -> None:
    """OPT-6.7B: 13.3 GB of weights, and 128 MiB of keys and values for a row of 256 columns."""
    shape, sizes = released("opt-6.7b"), CheckContext(torch.device("cpu"), released("opt-1.3b"))
    assert rows_that_fit(shape, sizes, 72 * 10**9) == (64, 256)
    assert rows_that_fit(shape, sizes, 34 * 10**9) == (64,)
    assert rows_that_fit(shape, sizes, 20 * 10**9) == ()
    little = run_checks(context(larger=shape), {"larger": CHECKS["larger"]}, lambda _: None)
    assert "hold neither its weights nor 2 rows" in little["larger"]["not_run"]  # type: ignore[index]


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    smi: dict[str, object] = {"driver": None, "cuda": None, "devices": []}
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda: smi)
    assert main(["--output", str(tmp_path)]) == 2
    assert "sees none; run this" in capsys.readouterr().err
    smi |= {"cuda": "12.4", "devices": [{"name": "NVIDIA L4"}]}
    assert main(["--output", str(tmp_path)]) == 2
    assert "though nvidia-smi lists NVIDIA L4 (driver for CUDA 12.4, torch built for" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def _h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "keep_segments_whole", lambda: None)  # it changes the environment
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")


@pytest.mark.usefixtures("_h100")
def test_a_document_with_device_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", {"device": lambda _: {"name": "it"}, "job": lambda _: 1 / 0})
    assert main(["--output", str(tmp_path), "--skip", "job"]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-gpu-check-nvidia-h100-80gb-hbm3.json")
    document = json.loads(file.read_text())
    assert document["device"] == "NVIDIA H100 80GB HBM3"
    assert (document["wrong"], document["left"], document["skipped"]) == (None, [], ["job"])
    assert document["checks"] == {"device": {"name": "it"}}


def test_the_check_that_others_need_is_not_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--skip", "captures"])
    assert "invalid choice: 'captures'" in capsys.readouterr().err


@pytest.mark.usefixtures("_h100")
def test_a_document_is_there_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is taken away leaves what was found on it, and what was not done."""

    def taken_away(_context: CheckContext) -> dict[str, object]:
        raise KeyboardInterrupt

    checks = {"device": lambda _: {"name": "it"}, "speed": taken_away, "job": taken_away}
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    with pytest.raises(KeyboardInterrupt):
        main(["--output", str(tmp_path)])
    document = json.loads(next(tmp_path.iterdir()).read_text())
    assert document["left"] == ["speed", "job"]
    assert document["checks"] == {"device": {"name": "it"}}


def test_needs_neither_ray_nor_pydantic() -> None:
    """A bare GPU machine has torch and little else."""
    names = "ray pydantic pyarrow pytest transformers hypothesis".split()
    blocked = f"import sys; sys.modules.update(dict.fromkeys({names})); import benchmarks.gpu_check"
    subprocess.run([sys.executable, "-c", blocked], check=True, cwd=Path(gpu_check.__file__).parents[1])
