"""Checks that two GPUs with a model's layers work at the same time (`skipdecode.model.pipeline_parallel`).

Prefill is timed, since its products keep a GPU busy far longer than the host takes to launch them. Two micro-batches
should take little longer than one, though they are twice the work. Decode steps are timed too, but not judged: small
models take longer to launch than to run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from actors.measuring.bench import random_model
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from skipdecode.engine.prefill import allocate_cache
from skipdecode.model.decoder import Decoder
from skipdecode.model.pipeline_parallel import Placement, deal
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import FullDepth

COUNT = 2
MAX_RATIO = 1.5
"""The largest ratio of the time of two micro-batches to that of one: near 1 if they overlap, 2 if one waits."""
REPEATS = 5


@dataclass(frozen=True)
class OnePart(Placement):
    """The same placement of layers, with all rows in one micro-batch."""

    @property
    def num_parts(self) -> int:
        return 1


@torch.inference_mode()
def check_overlap(context: CheckContext) -> Found:
    """Checks that two GPUs work at the same time."""
    context.release()
    devices = visible(context.device)
    if len(devices) < COUNT:
        return not_run(f"{len(devices)} GPU is visible, and layers on several take {COUNT}")
    model = placed(context, devices)
    plan, rows = FullDepth(context.layers).prefill(), min(context.rows)
    found: Found = {"rows_of_a_part": rows, "devices": [str(device) for device in devices]}
    seconds: dict[str, tuple[float, float]] = {}
    for name, parts in (("one part", 1), ("two parts", COUNT)):
        kind = OnePart if parts == 1 else Placement
        assert model.placement is not None
        model.placement = kind(model.placement.devices, model.placement.of_layer)
        seconds[name] = timed_passes(context, model, plan, parts * rows, devices)
    prompts, steps = zip(seconds["one part"], seconds["two parts"], strict=True)
    found |= {
        "prompts_s": prompts,
        "step_s": steps,
        "ratio": prompts[1] / prompts[0],
        "step_ratio": steps[1] / steps[0],
    }
    del model
    context.release()
    if sentence := overlap_problem(*prompts):
        raise CheckFailed(sentence, found)
    return found


def overlap_problem(one_s: float, two_s: float) -> str | None:
    """What is wrong with the time of two micro-batches against that of one; None if nothing is."""
    if two_s <= MAX_RATIO * one_s:
        return None
    return (
        f"two parts on two GPUs take {two_s / one_s:.2f} times as long as one (more than {MAX_RATIO:g}): one GPU waits "
        "for the other"
    )


def visible(device: torch.device) -> list[torch.device]:
    """The first GPUs, at most COUNT."""
    found = torch.cuda.device_count() if device.type == "cuda" else 0
    return [torch.device("cuda", number) for number in range(min(found, COUNT))]


def placed(context: CheckContext, devices: Sequence[torch.device]) -> Decoder:
    """A model with random weights whose layers are on several devices; built on the first, which can hold all of it."""
    model = random_model(context.config, device=str(devices[0]), dtype=torch.bfloat16)
    model.placement = deal(context.layers, devices)
    for layer, device in zip(model.layers, model.placement.of_layers, strict=True):
        layer.to(device)
    return model.pack()


def timed_passes(
    context: CheckContext, model: Decoder, plan: LayerPlan, rows: int, devices: Sequence[torch.device]
) -> tuple[float, float]:
    """Median seconds of prefill and of a decode step with `rows` rows."""
    columns, device = context.prompt_tokens, model.device
    pads = torch.zeros(rows, dtype=torch.int64, device=device)
    tokens = torch.full((rows, columns), 4, dtype=torch.int64, device=device)
    positions = torch.arange(columns, device=device).expand(rows, columns)
    cache = allocate_cache(model, pads, columns, FullDepth(context.layers), 2, num_pad_host=[0] * rows)

    def prompts() -> None:
        cache.length = 0
        model(tokens, positions, cache, plan, return_argmax=True)

    def step() -> None:
        cache.length = columns
        model(tokens[:, :1], torch.full_like(tokens[:, :1], columns), cache, plan, return_argmax=True)

    return median_s(prompts, devices), median_s(step, devices)


def median_s(work: Callable[[], None], devices: Sequence[torch.device]) -> float:
    """The median of REPEATS calls after a warm-up call."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        _wait(devices)
        start = time.perf_counter()
        work()
        _wait(devices)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
