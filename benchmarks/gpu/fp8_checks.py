"""The check `fp8`: what keys and values, and weights, in 8 bits do to tokens, to the time of a step and to memory."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from actors.measuring.bench import random_model
from actors.memory import DeviceMemory
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from benchmarks.gpu.corpus import DECODES
from benchmarks.gpu.decoding_checks import refuse_failed, rows_that_fit, timed
from benchmarks.gpu.subprocess_checks import ROOT, absent
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends.device import backend_on
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.predict import FP8_FLOPS
from skipdecode.engine.cuda_graphs import CudaGraphs, plans_of
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.model.kv_scales import why_no_scales
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import Schedule

DEMO = "models/opt-e2e"
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8 keys and values": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "both": {"kv_cache_dtype": "fp8", "quantization": "fp8"},
}
"""Arguments of `Decoder.pack`."""
TIMED = ("bfloat16", "fp8 keys and values", "both")
PROMPTS, NEW = 64, 32
MIN_KEPT = 0.6
"""The share of an answer that has to come before it first differs from bfloat16's: 0.89 to 0.99 on a CPU, and next to
nothing where a kernel or a scale is wrong."""
MAX_OF_STEP = 0.9
"""The share of bfloat16's step that is left with keys and values in FP8."""


def check_fp8(context: CheckContext) -> Found:
    """Answers of the demo model beside those of bfloat16, and steps and memory of a large model."""
    context.release()
    backend, config = backend_on(context.device), context.config
    if why := backend.why_no_fp8(context.device) or why_no_scales(config) or absent((DEMO,)):
        return not_run(why)
    found: Found = {"agreement": agreement_by_kind(context), "steps": {}}
    context.note(found)
    if problem := agreement_problem(found["agreement"]):  # type: ignore[arg-type]
        raise CheckFailed(problem, found)
    ceilings = context.ceilings  # before a model takes the memory
    room = context.cache_bytes or DeviceMemory.of(context.device).for_caches(MEMORY_SHARE)
    rows = max(rows_that_fit(config, context, room), default=0)
    if not rows:
        return found | not_run(f"{room} bytes hold neither the model nor {min(context.rows)} rows beside it")
    steps: dict[str, Any] = found["steps"]  # type: ignore[assignment]
    for name in TIMED:
        kind = KINDS[name]
        other = copy(context)
        # torch measures products of bfloat16; those of FP8 are twice as fast by the data sheets
        other.ceilings = replace(
            ceilings, flops_per_s=ceilings.flops_per_s * (FP8_FLOPS if "quantization" in kind else 1)
        )
        before = allocated_bytes(context.device)
        other.model = random_model(config, device=str(context.device), dtype=torch.bfloat16).pack(**kind)
        weights = allocated_bytes(context.device) - before
        room = context.cache_bytes or DeviceMemory.of(context.device).for_caches(MEMORY_SHARE)
        other.graphs = CudaGraphs(other.model, room, max_rows=rows)
        other.graphs.capture_all(plans_of(context.schedules().values(), context.new_tokens), [rows])
        refuse_failed(other.graphs)
        steps[name] = {"weight_bytes": weights, "rows": timed(other, rows)}
        other.release()
        context.note(found)
    if sentence := speed_problem(steps, on_gpu=context.device.type == "cuda"):
        raise CheckFailed(sentence, found)
    return found


def agreement_by_kind(context: CheckContext) -> dict[str, dict[str, dict[str, float]]]:
    """By kind and schedule, how many of the demo model's greedy answers are bfloat16's."""
    plain: dict[str, list[list[int]]] = {}
    found: dict[str, dict[str, dict[str, float]]] = {}
    count, num_new = (8, 6) if context.is_dry else (PROMPTS, NEW)
    texts = [str(row["prompt"]) for row in make_prompts(count)]
    for name, kind in KINDS.items():
        model = load_model(ROOT / DEMO, device=context.device, dtype=torch.bfloat16).pack(**kind)
        prompts, layers = Tokenizer(ROOT / DEMO, model.config).encode(texts), model.config.num_hidden_layers
        found[name] = {}
        for title, decode in DECODES.items():
            schedule = make_schedule(decode, num_layers=layers, max_new_tokens=num_new)
            made = answers(model, prompts, schedule, num_new)
            found[name][title] = agreement(made, plain.setdefault(title, made))
    return found


def answers(model: Decoder, prompts: Sequence[list[int]], schedule: Schedule, num_new: int) -> list[list[int]]:
    """The tokens of each greedy answer, of prompts that are decoded together."""
    requests = [Request(str(at), prompt, Sampling(max_new_tokens=num_new)) for at, prompt in enumerate(prompts)]
    return [completion.tokens for completion in generate(model, requests, schedule).completions]


def agreement(made: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> dict[str, float]:
    """The share of answers that are the same, and the mean share of an answer before it first differs."""
    same = sum(list(a) == list(b) for a, b in zip(made, plain, strict=True))
    first = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) / len(b)
             for a, b in zip(made, plain, strict=True)]  # fmt: skip
    return {"same": same / len(made), "before_first_difference": sum(first) / len(first)}


def agreement_problem(found: dict[str, dict[str, dict[str, float]]]) -> str | None:
    """Which kind has other answers than rounding to 8 bits can explain; None if none has."""
    for name, schedules in found.items():
        for schedule, one in schedules.items():
            if (kept := one["before_first_difference"]) < MIN_KEPT:
                return f"{name}, {schedule}: {kept:.0%} of an answer comes before it differs from bfloat16's"
    return None


def speed_problem(steps: dict[str, Any], *, on_gpu: bool) -> str | None:
    """What is wrong with the memory of caches, and on a GPU with the time of steps; None if nothing is."""
    plain, narrow = (steps[name]["rows"] for name in ("bfloat16", "fp8 keys and values"))
    for before, after in zip(plain, narrow, strict=True):
        title, (was, now) = after["schedule"], (before["cache_bytes"], after["cache_bytes"])
        if 2 * now > was:
            return f"{title}: keys and values take {now} bytes in fp8 and {was} in bfloat16"
        share = after["ms_per_step"] / before["ms_per_step"]
        if on_gpu and share > MAX_OF_STEP:
            return f"{title}: with keys and values in fp8 a step takes {share:.0%} of bfloat16's time"
    return None


def allocated_bytes(device: torch.device) -> int:
    """Device memory that tensors take."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
