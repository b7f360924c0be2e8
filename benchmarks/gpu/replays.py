"""Profiles twenty replays of a captured step: kernels per layer, gaps between them, and shares of the time.

Kernels per layer are the difference between the deepest and the shallowest plan, divided by their difference in layers,
so that embeddings, LM head and the choice of a token cancel out.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from skipdecode.engine.cuda_graphs import plans_of
from skipdecode.schedules.layer_plan import LayerPlan

REPLAYS = 20
PROMISED = {"relu": 7, "swiglu": 8, "geglu": 10}
"""Kernels of a layer by its activation (`skipdecode.backends.cuda_backend`)."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace."""
SPLIT = re.compile(r"splitk_?reduce", re.IGNORECASE)
"""cuBLAS sometimes splits a product of few rows, and adds the parts in another kernel, which counts to the product."""
KINDS = {
    "attention": re.compile(r"attend_kernel"),
    "norms": re.compile(r"add_norm_kernel"),
    "gate": re.compile(r"gate_kernel"),
    "choice of a token": re.compile(r"argmax_kernel"),
    "products": re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk", re.IGNORECASE),
}

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy or fill of device memory."""

    name: str
    start_us: float
    end_us: float


@torch.inference_mode()
def check_replays(context: CheckContext) -> Found:
    """Checks that a layer has no more kernels than promised; reports the gaps between kernels and their shares."""
    plans = plans_of(context.schedules().values(), context.new_tokens)
    deep, shallow = plans[0], plans[-1]
    found: list[Found] = []
    for rows in context.rows:
        traces = [kernels_in(_traced(_replaying(context, plan, rows))) for plan in (deep, shallow)]
        if not all(traces):
            return not_run("the profiler saw no kernel of the device; CUPTI may need rights that are not given here")
        each = per_layer(traces[0], traces[1], deep.num_layers_run - shallow.num_layers_run)
        found.append({"rows": rows, "layers": deep.num_layers_run, "a_layer": each} | described(traces[0]))
        if sentence := too_many(each, PROMISED[context.config.mlp]):
            raise CheckFailed(f"at {rows} rows {sentence}", {"replays": found})
    return {"replays": found}


def kernels_in(events: Iterable[Event]) -> list[Kernel]:
    """The kernels of a Chrome trace, by their start."""
    whole = (event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE)
    found = [Kernel(str(one["name"]), float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in whole]
    return sorted(found, key=lambda kernel: kernel.start_us)


def per_layer(
    deep: Sequence[Kernel], shallow: Sequence[Kernel], layers: int, replays: int = REPLAYS
) -> dict[str, float]:
    """Kernels per layer by name; `layers`: how many more layers the first trace has than the second."""
    counts = Counter(kernel.name for kernel in deep)
    counts.subtract(Counter(kernel.name for kernel in shallow))
    return {name: count / (replays * layers) for name, count in counts.items() if count}


def too_many(each: Mapping[str, float], promised: int) -> str | None:
    """What is wrong with these kernels of a layer; None if nothing is."""
    counted = {name: number for name, number in each.items() if not SPLIT.search(name)}
    total = round(sum(counted.values()), 2)
    if total <= promised:
        return None
    names = ", ".join(f"{number:g} {name[:60]}" for name, number in counted.items())
    return f"a layer is {total:g} kernels, and {promised} are promised: {names}"


def described(kernels: Sequence[Kernel], replays: int = REPLAYS) -> Found:
    """Microseconds of a replay and of the gaps within and between replays, and the share of each kind of kernel."""
    a_step = len(kernels) // replays if len(kernels) % replays == 0 else None  # else where one ends is not known
    inside: list[float] = []
    between: list[float] = []
    ended, idle = kernels[0].end_us, 0.0
    for number, kernel in enumerate(kernels[1:], start=1):
        gap = max(0.0, kernel.start_us - ended)
        idle, ended = idle + gap, max(ended, kernel.end_us)
        (between if a_step and number % a_step == 0 else inside).append(gap)
    whole = ended - kernels[0].start_us
    return {
        "kernels_of_a_step": len(kernels) / replays,
        "us_of_a_step": whole / replays,
        "idle_share": idle / whole,
        "gap_us": median(inside) if inside else None,
        "gap_between_steps_us": median(between) if between else None,
        "shares": shares(kernels),
    }


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Shares of the kernels' time by kind, largest first."""
    times: Counter[str] = Counter()
    for kernel in kernels:
        kind = next((kind for kind, names in KINDS.items() if names.search(kernel.name)), "others")
        times[kind] += kernel.end_us - kernel.start_us  # type: ignore[assignment]
    return {kind: time / sum(times.values()) for kind, time in times.most_common()}


def _replaying(context: CheckContext, plan: LayerPlan, rows: int) -> Callable[[], None]:
    """Replays steps of `plan` over uninitialised keys and values, on which the time does not depend."""
    graphs, layers = context.graphs, context.layers
    pads = torch.zeros(rows, dtype=torch.int64, device=context.device)
    columns = context.prompt_tokens + REPLAYS + 1
    cache = graphs.allocate(pads, [columns] * layers, range(layers), force_mask=True)
    cache.length = context.prompt_tokens
    newest = graphs(pads, cache, plan, return_argmax=True)  # brings the batch's tables to their place

    def work() -> None:
        token = newest
        for _ in range(REPLAYS):
            token = graphs(token, cache, plan, return_argmax=True)
        context.wait()

    context.wait()
    return work


def _traced(work: Callable[[], None]) -> list[Event]:
    """The events of a Chrome trace of `work`."""
    wanted = supported_activities() & {ProfilerActivity.CUDA} or supported_activities()
    with profile(activities=wanted) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        return events
