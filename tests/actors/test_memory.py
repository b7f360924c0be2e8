"""What a worker does with a GPU, without one: its memory, lost devices, batches and cohorts on graphs.

The CUDA back end runs with torch's operators on the CPU, and says that it is a GPU where that is asked.
"""

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors import generator, loading, memory
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.memory import (
    DeviceMemory,
    MemoryBudget,
    check_weights_fit,
    is_device_lost,
    keep_segments_whole,
    wait_for_memory,
)
from actors.serving import cohort_scheduler
from actors.serving.engine import Engine
from actors.serving.scheduler import EngineConfig
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.device import TorchOnCuda, choose_cuda
from skipdecode.backends.fp8 import FP8
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.config.model import KV_ALIGNMENT
from skipdecode.config.sampling import Sampling
from skipdecode.cost.batch_sizes import ladder, rung_within
from skipdecode.cost.gpu_specs import GPUS, MEMORY_SHARE
from skipdecode.cost.predict import MODELS, Workload, gpus_needed, num_weights, predict
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.cuda_graphs import CudaGraphs, GraphCapture
from skipdecode.engine.prefill import has_room
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.families import released
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth
from tests.support.cuda_models import cpu_computed_by
from tests.support.graphs import FakeCaptures, cpu_as_cuda
from tests.support.naive import random_prompts

DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2}
GB = 10**9


def some(count: int, num_new: int = 12, **keys: float) -> list[Request]:
    prompts = random_prompts([3 + 5 * i % 27 for i in range(count)], seed=4)
    return [Request(f"r{i}", p, Sampling(max_new_tokens=num_new, **keys)) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


@pytest.fixture
def _on_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generators decode by graphs, in a memory of 4 MB."""
    monkeypatch.setattr(generator, "graphs_serve", lambda _model: True)
    monkeypatch.setattr(MemoryBudget, "gpu_cache_bytes", 1 << 22)
    with cpu_as_cuda():
        yield


def build(folder: Path, **keys: object) -> Generator:
    given = {"dtype": "float32", "num_threads": 1, "length_buckets": (8, 32), "batch_size": 8} | keys
    return Generator(GeneratorConfig(str(folder), DECODE, **given))  # type: ignore[arg-type]


# Memory


@pytest.mark.parametrize(
    ("name", "count", "share", "itemsize", "message"),
    [
        ("opt-66b", 1, 0.85, 2, r"opt-66b takes 12\d\.\d GiB, and 63\.3 GiB of a GPU .* set actors\.num_gpus=3, which"),
        ("opt-66b", 1, 0.85, 4, r"set actors\.num_gpus=6, which"),
        ("llama-3.1-70b", 2, 0.85, 2, r"of 2 GPUs .* set actors\.num_gpus=3, which"),
        ("opt-13b", 1, 0.28, 2, r"set actors\.num_gpus=1 where workers share a GPU, else raise actors\.memory_share"),
        ("opt-13b", 1, 0.85, 2, None),
        ("llama-3.1-70b", 3, 0.85, 2, None),
    ],
)
def test_a_model_too_large_for_its_gpus_says_how_many_would_do(
    name: str, count: int, share: float, itemsize: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemory, "of", lambda _: DeviceMemory(80 * GB, 79 * GB, 0))
    gpus = [torch.device("cuda", number) for number in range(count)]
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_weights_fit(released(name), name, gpus, itemsize, share)


def test_a_model_that_no_number_of_gpus_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "of", lambda _: DeviceMemory(8 * GB, 8 * GB, 0))
    with pytest.raises(ValueError, match=r"not even actors\.num_gpus=8 would do"):
        check_weights_fit(released("opt-66b"), "it", [torch.device("cuda")], 2, 0.85)


def test_it_is_said_before_anything_is_loaded(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "of", lambda _: DeviceMemory(1 << 16, 1 << 16, 0))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("loads"))
    with pytest.raises(ValueError, match=r"actors\.num_gpus"):
        build(tiny_checkpoint, device="cuda")


@pytest.mark.parametrize(("gpu", "rows"), [("h200", 391), ("a100", 200)])
def test_caches_take_most_of_a_gpu(gpu: str, rows: int) -> None:
    """OPT-6.7B, prompts of 256, 512 new tokens, SkipDecode 2x: a quarter of what was free held 124 and 65 rows."""
    config = released("opt-6.7b")
    schedule = make_schedule({"method": "skipdecode", "speedup": 2}, num_layers=32, max_new_tokens=512)
    per_row = cache_bytes_per_row(config, schedule, prompt_columns=256, num_new=512, itemsize=2)
    weights, total = 2 * 6_658_473_984, GPUS[gpu].memory_bytes
    memory = DeviceMemory(total=total, free=total - weights, own=weights)
    assert memory.for_caches(MEMORY_SHARE) // per_row == pytest.approx(rows, rel=0.02)


def test_what_others_hold_is_not_taken() -> None:
    memory = DeviceMemory(total=80 * GB, free=20 * GB, own=2 * GB)
    assert memory.for_caches(0.85) == 16 * GB  # a twentieth of the device stays free
    assert DeviceMemory(total=80 * GB, free=1 * GB, own=2 * GB).for_caches(0.85) == 0
    assert DeviceMemory(total=80 * GB, free=78 * GB, own=2 * GB).for_caches(0.425) == 32 * GB  # half a GPU


class Clock:
    """Time that passes in `sleep` alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(memory.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(memory.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("free", "waited_s", "is_said"),
    [([70], 0, False), ([5, 5, 30, 79], 3, False), ([48], 60, True), ([67], 60, False)],
)
def test_a_worker_waits_for_the_memory_that_its_predecessor_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: list[int], waited_s: int, is_said: bool
) -> None:
    """What it finds at its start it keeps for good; of 80 GB it may take 68."""
    clock = Clock(monkeypatch)
    seen = lambda _: DeviceMemory(80 * GB, free[min(int(clock.now), len(free) - 1)] * GB, 0)  # noqa: E731
    monkeypatch.setattr(DeviceMemory, "of", seen)
    wait_for_memory([torch.device("cuda")], 0.85)
    assert clock.now == waited_s
    said = "60 % of a GPU's memory is free, and this worker may take 85 % (actors.memory_share)"
    assert (said in caplog.text) == is_said


def test_workers_that_share_a_gpu_wait_for_their_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(DeviceMemory, "of", lambda _: DeviceMemory(80 * GB, 40 * GB, 0))
    wait_for_memory([torch.device("cuda")], 0.425)
    assert clock.now == 0


def test_torchs_allocator_grows_its_segments_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    keep_segments_whole()
    made = {name: os.environ.pop(name, None) for name in memory.ALLOCATOR_VARIABLES}
    assert sorted(made.values(), key=str) == [None, "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:256")
    keep_segments_whole()
    assert os.environ.get("PYTORCH_ALLOC_CONF") is None
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:256"


def test_a_worker_tells_the_allocator_before_it_uses_its_gpu(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the variable as CUDA starts."""
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    seen: list[str | None] = []

    def of(_device: torch.device) -> DeviceMemory:
        seen.append(next(filter(None, map(os.environ.get, memory.ALLOCATOR_VARIABLES)), None))
        return DeviceMemory(1 << 16, 1 << 16, 0)

    monkeypatch.setattr(DeviceMemory, "of", of)
    with pytest.raises(ValueError, match=r"actors\.num_gpus"):
        build(tiny_checkpoint, device="cuda")
    assert seen[0] == "expandable_segments:True"


def test_rows_of_a_gpu_are_rungs_whatever_is_free(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes more or less from run to run must not make other shapes; full depth has to fit, too."""
    made = build(tiny_checkpoint, batch_size=None, baseline_fraction=0.5)
    monkeypatch.setattr(made, "memory", replace(made.memory, devices=[torch.device("cuda")]))
    per_row = cache_bytes_per_row(made.model.config, FullDepth(6), prompt_columns=47, num_new=12, itemsize=4)
    sizes = set()
    for rows in (1, 2, 5, 47, 50, 63, 9000):
        monkeypatch.setattr(MemoryBudget, "gpu_cache_bytes", per_row * rows)
        size = made.batch_size(32, 12)
        assert size <= rows
        sizes.add(size)
    # of half: without graphs rows that stay are copied while the old ones are there
    assert sizes == {1, 2, 16, 24, 256}
    assert sizes <= set(ladder(256))


def test_the_device_with_the_least_memory_decides(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are dealt evenly; parts of a batch have the rows of a device alone."""
    made = build(tiny_checkpoint, batch_size=None)
    devices = [torch.device("cuda", number) for number in range(3)]
    monkeypatch.setattr(made, "memory", replace(made.memory, devices=devices))
    memory = dict(zip(devices, (50_000_000, 20_000_000, 30_000_000), strict=True))
    monkeypatch.setattr(DeviceMemory, "of", lambda device: DeviceMemory(2 * memory[device], 2 * memory[device], 0))
    assert made.memory.gpu_cache_bytes == 3 * int(2 * 20_000_000 * made.config.memory_share)
    monkeypatch.setattr(MemoryBudget, "gpu_cache_bytes", 3 * 10_000_000)
    one = rung_within(10_000_000 // 2 // int(1e5))
    monkeypatch.setattr("actors.memory.cache_bytes_per_row", lambda *_, **__: 1e5)
    monkeypatch.setattr("actors.memory.row_rounding", lambda *_: 0)
    assert made.batch_size(32, 12) == 3 * one > 3


@pytest.mark.parametrize("name", MODELS)
def test_predicted_rows_are_those_of_a_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU by graphs, on several without: `doctor --gpu` promises no more rows than `batch_size: auto` takes."""
    config, gpu, work = released(name), GPUS["h100"], Workload()
    count = gpus_needed(config, gpu.memory_bytes, work)
    assert count is not None
    own = 2 * num_weights(config) // count
    memory = DeviceMemory(gpu.memory_bytes, gpu.memory_bytes - own, own)
    monkeypatch.setattr(DeviceMemory, "of", lambda _device: memory)
    budget = MemoryBudget(config, 2, [torch.device("cuda", number) for number in range(count)], MEMORY_SHARE)
    if count == 1:
        graphs = SimpleNamespace(nbytes=budget.gpu_cache_bytes, rungs=ladder(256))
        budget = replace(budget, graphs=graphs)  # type: ignore[arg-type]
    fast = make_schedule(
        {"method": "skipdecode", "speedup": 2}, num_layers=config.num_hidden_layers, max_new_tokens=work.new_tokens
    )
    for schedule in (FullDepth(config.num_hidden_layers), fast):
        rows = budget.rows({schedule: 1.0}, prompt_columns=work.num_prompt_tokens, num_new=work.new_tokens)
        assert predict(config, schedule, gpu, work, count).rows == rows


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3.1-8b"])
def test_160_batches_of_a_corpus_fit_the_memory_of_an_h100(
    name: str, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 128 to 1,024 tokens and 512 new ones, each batch at full depth too: as many rows as have a graph and
    fit beside the weights."""
    config, total = released(name), GPUS["h100"].memory_bytes
    weights = 2 * num_weights(config)
    monkeypatch.setattr(DeviceMemory, "of", lambda _device: DeviceMemory(total, total - weights, weights))
    budget = MemoryBudget(config, kv_dtype.itemsize, [torch.device("cuda")], MEMORY_SHARE)
    model = SimpleNamespace(config=config, device=torch.device("meta"), dtype=torch.bfloat16, kv_dtype=kv_dtype)
    graphs = CudaGraphs(model, budget.gpu_cache_bytes, captures=FakeCaptures())  # type: ignore[arg-type]
    assert graphs.nbytes + weights <= MEMORY_SHARE * total
    budget, layers, rng = replace(budget, graphs=graphs), config.num_hidden_layers, random.Random(7)
    fast = make_schedule({"method": "skipdecode", "speedup": 2}, num_layers=layers, max_new_tokens=512)
    schedules = {fast: 1.0, FullDepth(layers): 1.0}
    for _ in range(160):
        columns = rng.randint(128, 1024)
        rows = budget.rows(schedules, prompt_columns=columns, num_new=512)
        assert all(has_room(graphs, schedule, rows, columns, 512) for schedule in schedules)
        if larger := [rung for rung in graphs.rungs if rung > rows]:  # what rounding may take is left
            assert not has_room(graphs, FullDepth(layers), larger[0], columns + KV_ALIGNMENT, 512)


@pytest.mark.usefixtures("_on_graphs")
def test_a_fixed_number_of_rows_has_a_graph(tiny_checkpoint: Path) -> None:
    """And takes no memory for more rows than that."""
    made = build(tiny_checkpoint, batch_size=5)
    assert made.graphs is not None
    assert made.graphs.rungs == (1, 2, 3, 4, 5)
    assert made.graphs.num_captured == 4 * 5, "depths 5 to 2"
    assert made.graphs.rows_for(5) == 5


@pytest.mark.usefixtures("_on_graphs")
def test_automatic_rows_fit_the_memory_of_graphs(tiny_checkpoint: Path) -> None:
    """To the last byte, columns rounded up: else every batch would be tried in vain, and halved."""
    for nbytes in (150_000, 333_333):
        made = build(tiny_checkpoint, batch_size=None, length_buckets=(29,), baseline_fraction=1.0)
        made.graphs = CudaGraphs(made.model, nbytes)
        made.memory = replace(made.memory, devices=[torch.device("cuda")], graphs=made.graphs)
        size = made.batch_size(29, 12)
        for schedule in (made.schedule(12), made.full):
            assert has_room(made.graphs, schedule, size, 29, 12)
        assert not has_room(made.graphs, made.full, 2 * size, 29, 12)


# Slow paths


def test_a_worker_with_torchs_operators_says_so(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU whose kernels were not chosen decodes, several times slower; `actors.require_kernels` does without it."""
    with cpu_computed_by(TorchOnCuda()):
        made = build(tiny_checkpoint, baseline_fraction=0.0)
        assert made.why_slow == f"the CUDA kernels are not used: {choose_cuda().reason}"
        assert f"decoding is slower than it could be: {made.why_slow}" in caplog.text
        monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("loads"))
        with pytest.raises(ValueError, match=r"^actors\.require_kernels is set, and the CUDA kernels are not used: "):
            build(tiny_checkpoint, require_kernels=True)


@pytest.mark.usefixtures("_on_graphs")
def test_steps_that_could_not_be_captured_are_a_slow_path(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = build(tiny_checkpoint, require_kernels=True)
    assert made.why_slow is None
    assert "slower" not in caplog.text

    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphCapture, "capture", fails)
    made = build(tiny_checkpoint)
    assert made.why_slow is not None
    assert "operation not permitted" in made.why_slow
    assert f"decoding is slower than it could be: {made.why_slow}" in caplog.text
    with pytest.raises(ValueError, match=r"^actors\.require_kernels is set, and steps run kernel by kernel"):
        build(tiny_checkpoint, require_kernels=True)


@pytest.mark.parametrize(
    ("keys", "is_slow"), [({}, True), ({"dtype": "float32"}, False), ({"deterministic": True}, False)]
)
def test_prompts_with_padding_are_a_slow_path(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keys: dict[str, object],
    is_slow: bool,
) -> None:
    """Where torch has no flash attention that runs; but not where they have padding by nature."""
    monkeypatch.setattr(generator, "choice_on", lambda _device: SimpleNamespace(name="triton", dtype="bfloat16"))
    lacking = "torch 2.6.0 was built without flash attention"
    with cpu_computed_by(CudaBackend(TorchKernels(), no_packed_prompts=lacking)):
        made = build(tiny_checkpoint, **{"dtype": "bfloat16"} | keys)
        assert made.why_slow == (f"prompts are fed with padding: {lacking}" if is_slow else None)
        assert ("decoding is slower than it could be: prompts are fed with padding" in caplog.text) == is_slow
        if is_slow:
            with pytest.raises(ValueError, match=r"^actors\.require_kernels is set, and prompts are fed with padding"):
                build(tiny_checkpoint, dtype="bfloat16", require_kernels=True)


# Lost devices


class CudaError(Exception):
    """As torch raises it for all that CUDA says."""


def test_an_error_after_which_the_device_counts_is_the_batches_own(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation that cannot be captured or launched must not kill workers until its rows are parked."""
    assert not is_device_lost(CudaError("operation not permitted when stream is capturing"), [torch.device("cpu")])
    assert not is_device_lost(ValueError("whatever"), [torch.device("cpu")])
    made, calls = build(tiny_checkpoint), []

    run = Generator._run

    def failing(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise CudaError("invalid configuration argument")
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "_run", failing)
    requests = some(4)
    result = made(requests)
    assert [answer.tokens for answer in result.answers] == [a.tokens for a in build(tiny_checkpoint)(requests).answers]  # type: ignore[union-attr]


def test_a_device_that_counts_no_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:

    def lost(*_args: object, **_keys: object) -> torch.Tensor:
        raise CudaError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", lost)
    for error in (CudaError("an illegal memory access"), RuntimeError("Triton Error [CUDA]: an illegal memory access")):
        assert is_device_lost(error, [torch.device("cpu")])
    assert not is_device_lost(torch.OutOfMemoryError("CUDA out of memory"), [torch.device("cpu")])
    monkeypatch.setattr("actors.memory._works", lambda device: device.type == "cpu")
    assert is_device_lost(CudaError("whatever"), [torch.device("cpu"), torch.device("cuda", 1)])


def test_a_full_device_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose driver says so, which has types of its own for it."""

    def full(*_args: object, **_keys: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(torch, "ones", full)
    assert not is_device_lost(CudaError("invalid configuration argument"), [torch.device("cpu")])
    monkeypatch.setattr(torch, "ones", lambda *_, **__: pytest.fail("asks the device"))
    assert not is_device_lost(RuntimeError("Triton Error [CUDA]: out of memory"), [torch.device("cpu")])


def test_a_lost_device_in_a_measurement_ends_the_worker(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(tiny_checkpoint, baseline_fraction=1.0)
    monkeypatch.setattr(generator, "is_device_lost", lambda error, _device: isinstance(error, CudaError))

    run = Generator._run

    def failing(self: Generator, batch: object, requests: object, schedule: object, *others: object) -> object:
        if schedule == made.full:
            raise CudaError("gone")
        return run(self, batch, requests, schedule, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "_run", failing)
    with pytest.raises(CudaError):
        made(some(4))


# Batches and cohorts on graphs


@pytest.mark.usefixtures("_on_graphs")
def test_offline_batches_and_cohorts_of_an_endpoint_share_graphs(tiny_checkpoint: Path) -> None:
    """Tokens are those without graphs, and nothing is captured after loading: full depth for the baseline, too."""
    requests = some(7) + some(3, temperature=0.9)
    requests = [Request(f"x{i}", r.prompt_tokens, r.sampling) for i, r in enumerate(requests)]
    wanted = build(tiny_checkpoint, has_graphs=False)(requests).answers
    made = build(tiny_checkpoint, baseline_fraction=1.0)
    assert made.graphs is not None
    assert made.graphs.num_captured == 5 * len(ladder(8)), "depths 6 to 2, at 1, 2, 3, 4, 6 and 8 rows"
    assert made(requests).answers == wanted
    engine = Engine(made, EngineConfig(batch_size=4))
    tickets = [engine.add(request) for request in requests]
    while not engine.is_idle:
        engine.step()
    assert [ticket.row.tokens for ticket in tickets if ticket.row] == [answer.tokens for answer in wanted]  # type: ignore[union-attr]
    assert made.graphs.num_late == 0
    assert made.graphs.pool.free_bytes == made.graphs.nbytes


@pytest.mark.usefixtures("_on_graphs")
def test_deterministic_runs_on_graphs_offline_and_online(tiny_checkpoint: Path) -> None:
    """One shape, one set of graphs: bit for bit in bfloat16, whoever else comes."""
    made = build(tiny_checkpoint, deterministic=True, batch_size=4, dtype="bfloat16")
    assert made.graphs is not None
    assert made.graphs.num_captured == 4, "one number of rows"
    requests = some(6)
    wanted = [answer.tokens for answer in made(requests).answers]  # type: ignore[union-attr]
    for arriving in (requests, requests[::-1]):
        engine = Engine(made, EngineConfig(batch_size=4))
        tickets = {}
        for request in arriving:
            tickets[request.id] = engine.add(request)
            engine.step()
        while not engine.is_idle:
            engine.step()
        rows = [tickets[request.id].row for request in requests]
        assert [row.tokens for row in rows if row] == wanted
    assert made.graphs.num_late == 0


@pytest.mark.usefixtures("_on_graphs")
@pytest.mark.parametrize(("memory", "batch_size", "beside"), [(300_000, 1, 0), (500_000, 5, 0), (20_000, 1, 6)])
def test_cohorts_wait_for_the_memory_of_graphs(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, memory: int, batch_size: int, beside: int
) -> None:
    """Five rows take what six do. Only what is too large for all of it decodes beside it, one cohort at a time."""
    made, seen = build(tiny_checkpoint), []
    wanted = made(some(6, 40)).answers
    made.graphs = CudaGraphs(made.model, memory, max_rows=8)  # memory for a cohort or two, or for none
    monkeypatch.setattr(
        cohort_scheduler,
        "StaticBatch",
        lambda *args, **keys: (seen.append(keys["graphs"]), StaticBatch(*args, **keys))[1],
    )
    engine = Engine(made, EngineConfig(batch_size=batch_size))
    tickets, most = [engine.add(request) for request in some(6, 40)], 0
    while not engine.is_idle:
        engine.step()
        most = max(most, len(engine._scheduler.running))
    assert [ticket.row.tokens for ticket in tickets if ticket.row] == [answer.tokens for answer in wanted]  # type: ignore[union-attr]
    assert len(seen) > 1
    assert seen.count(None) == beside
    assert most == 1 or not beside


@pytest.mark.usefixtures("_on_graphs")
def test_a_batch_that_does_not_fit_is_split_and_graphs_stay(tiny_checkpoint: Path) -> None:
    made = build(tiny_checkpoint, batch_size=8)
    requests = some(8)
    wanted = made(requests).answers
    captures = FakeCaptures()
    per_row = cache_bytes_per_row(made.model.config, FullDepth(6), prompt_columns=48, num_new=12, itemsize=4)
    made.graphs = CudaGraphs(made.model, 4 * per_row, max_rows=8, captures=captures)
    made._capture_graphs()
    captured = captures.captures
    result = made(requests)
    assert result.answers == wanted
    assert any("actors.memory_share" in batch.get("split_error", "") for batch in result.batches)
    assert captures.captures == captured > 0
    assert made.graphs.num_graphs == captured
