"""Times the decoder or a training step under several schedules, on the same rows and interleaved. No Ray, no files."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from actors.ceilings import measure_ceilings
from actors.measuring.profile import profile_step
from actors.memory import DeviceMemory, free_bytes
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.cost.batch_sizes import row_rounding, rows_within
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.roofline import BatchShape, Ceilings, cache_bytes_per_row, predict_s, training_flops
from skipdecode.engine.cuda_graphs import CudaGraphs, graphs_serve
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import dtype_name
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.from_config import listed_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule
from skipdecode.training.loss import ResponseLoss


@dataclass(frozen=True)
class BenchCase:
    """One shape of work; every schedule decodes the same prompts."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int


def random_model(config: DecoderConfig, *, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """Random weights: speed does not depend on their values, and EOS is ignored."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Decoder(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    return model.eval().requires_grad_(False)


def largest_batch(model: Decoder, prompt_tokens: int, new_tokens: int) -> int:
    """The rows whose keys and values at full depth, with the logits, take 0.8 of a host's free memory.

    On a GPU, the rows whose keys and values take its memory share.
    """
    full = FullDepth(model.config.num_hidden_layers)
    shape = {"prompt_columns": prompt_tokens, "num_new": new_tokens, "itemsize": model.kv_itemsize}
    logits = 8 * model.config.vocab_size  # bytes: the logits, those of sampling, and a float32 copy
    if model.device.type == "cuda":
        cache_bytes = DeviceMemory.of(model.device).for_caches(MEMORY_SHARE)
        per_row = cache_bytes_per_row(model.config, full, **shape) + row_rounding(model.config, model.kv_itemsize)
        return max(1, rows_within(cache_bytes, per_row, has_graphs=True))
    rows = int(0.8 * free_bytes(model.device) / (cache_bytes_per_row(model.config, full, **shape) + logits))
    return max(1, rows - rows % 8)


def make_graphs(model: Decoder, *, max_rows: int) -> CudaGraphs | None:
    """The graphs of a model on a GPU, captured at the first steps; None elsewhere."""
    if not graphs_serve(model):
        return None
    return CudaGraphs(model, DeviceMemory.of(model.device).for_caches(MEMORY_SHARE), max_rows=max_rows)


def profile_case(model: Decoder, case: BenchCase, schedules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stages of a decode step under every schedule (`actors.measuring.profile`)."""
    shape = {"batch_size": case.batch_size, "prompt_tokens": case.prompt_tokens}
    requests, rows = _requests(model.config, case), []
    for name, schedule in _named_schedules(model.config, case, schedules):
        generate(model, requests, schedule)  # warm up
        rows += [{"schedule": name} | shape | row for row in profile_step(model, requests, schedule)]
    return rows


def _requests(config: DecoderConfig, case: BenchCase) -> list[Request]:
    rng = random.Random(0)
    sampling = Sampling(max_new_tokens=case.new_tokens, ignore_eos=True)
    return [
        Request(str(row), [rng.randrange(4, config.vocab_size) for _ in range(case.prompt_tokens)], sampling)
        for row in range(case.batch_size)
    ]


def bench_case(model: Decoder, case: BenchCase, schedules: list[dict[str, Any]], repeats: int) -> list[dict[str, Any]]:
    """One row per schedule, full depth first: medians over `repeats`, with ratios taken within each repeat.

    The fraction of the roofline uses ceilings measured right before each run, since those of a shared machine change
    from minute to minute; predicted speedups use their medians. On a GPU they are measured once, at the end, since that
    takes memory.
    """
    config = model.config
    named = _named_schedules(config, case, schedules)
    requests, graphs = _requests(config, case), make_graphs(model, max_rows=case.batch_size)
    for _, schedule in named:
        generate(model, requests, schedule, graphs=graphs)  # warm up, capture
    runs, ceilings = _run_interleaved(model, requests, named, graphs, repeats)
    measured = zip(*(astuple(one) for own in ceilings.values() for one in own), strict=True)
    typical = Ceilings(*map(median, measured))
    rows, predictions = [], {}
    for name, schedule in named:
        stats = runs[name][0]
        predict = partial(
            predict_s,
            config,
            schedule,
            batch=BatchShape(case.prompt_tokens, stats.batch_rows, deferred_ffn_rows=stats.deferred_ffn_rows),
            itemsize=model.dtype.itemsize,
            weight_itemsize=model.weight_itemsize,
            kv_itemsize=model.kv_itemsize,
            in_graphs=graphs is not None and graphs.failure is None,
        )
        predictions[name] = predict(ceilings=typical)
        fractions = [predict(ceilings=c)[1] / s.decode_s for c, s in zip(ceilings[name], runs[name], strict=True)]
        decode_s, prefill_s = (median(getattr(s, key) for s in runs[name]) for key in ("decode_s", "prefill_s"))
        steps = stats.decode_steps
        rows.append(
            {
                "schedule": name,
                "batch_size": case.batch_size,
                "prompt_tokens": case.prompt_tokens,
                "new_tokens": case.new_tokens,
                "prefill_ms": 1e3 * prefill_s,
                "ms_per_step": 1e3 * decode_s / steps,
                "output_tokens_per_s": stats.output_tokens / (prefill_s + decode_s),
                "layers_per_token": stats.layers_run / (case.batch_size * steps),
                "ffns_per_token": stats.ffns_run / (case.batch_size * steps),
                "cache_mb": stats.cache_bytes / 1e6,
                "fraction_of_roofline": median(fractions),
                "speedup_decode_measured": median(
                    f.decode_s / s.decode_s for f, s in zip(runs["full"], runs[name], strict=True)
                ),
                "speedup_layers": config.num_hidden_layers * case.batch_size * steps / stats.layers_run,
                "speedup_decode_predicted": predictions["full"][1] / predictions[name][1],
                "speedup_prefill_measured": median(
                    f.prefill_s / s.prefill_s for f, s in zip(runs["full"], runs[name], strict=True)
                ),
                "speedup_prefill_predicted": predictions["full"][0] / predictions[name][0],
            }
        )
    return rows


def _run_interleaved(
    model: Decoder,
    requests: list[Request],
    named: list[tuple[str, Schedule]],
    graphs: CudaGraphs | None,
    repeats: int,
) -> tuple[dict[str, list[Any]], dict[str, list[Ceilings]]]:
    """The statistics and the ceilings of each run, by schedule."""
    runs: dict[str, list[Any]] = {name: [] for name, _ in named}
    ceilings: dict[str, list[Ceilings]] = {name: [] for name, _ in named}
    measure = partial(measure_ceilings, str(model.device), dtype_name(model.dtype))
    for _ in range(repeats):
        for name, schedule in named:
            if model.device.type == "cpu":
                ceilings[name].append(measure())
            runs[name].append(generate(model, requests, schedule, graphs=graphs).stats)
    if model.device.type != "cpu":
        ceilings = dict.fromkeys(ceilings, [measure()] * repeats)
    return runs, ceilings


def bench_training(
    model: Decoder, case: BenchCase, schedules: list[dict[str, Any]], repeats: int, precision: str
) -> list[dict[str, Any]]:
    """One row per schedule, full depth first: optimiser steps on the same pairs, with ratios taken within each repeat.

    `speedup_bound` is the ratio of FLOPs (`skipdecode.cost.roofline.training_flops`): head, optimiser and prompts cost
    the same under every schedule.
    """
    config = model.config
    named = _named_schedules(config, case, schedules)
    rng = random.Random(0)
    rows = [
        [rng.randrange(4, config.vocab_size) for _ in range(case.prompt_tokens + case.new_tokens)]
        for _ in range(case.batch_size)
    ]
    pairs = [(row[: case.prompt_tokens], row[case.prompt_tokens :]) for row in rows]
    batch = teacher_batch(pairs, config.filler_token_id, model.device)
    loss = ResponseLoss(model.train().requires_grad_(True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step_s(schedule: Schedule) -> float:
        start = time.perf_counter()
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            value = loss(batch, schedule).sum() / (case.batch_size * case.new_tokens)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        optimizer.step()
        value.item()  # waits for the device
        return time.perf_counter() - start

    for _, schedule in named:
        step_s(schedule)  # warm up
    times: dict[str, list[float]] = {name: [] for name, _ in named}
    for _ in range(repeats):
        for name, schedule in named:
            times[name].append(step_s(schedule))
    shape = {"rows": case.batch_size, "num_prompt_tokens": case.prompt_tokens, "new_tokens": case.new_tokens}
    flops = {name: training_flops(config, schedule, **shape) for name, schedule in named}
    return [
        {
            "schedule": name,
            "batch_size": case.batch_size,
            "prompt_tokens": case.prompt_tokens,
            "new_tokens": case.new_tokens,
            "ms_per_step": 1e3 * median(times[name]),
            "pairs_per_s": case.batch_size / median(times[name]),
            "speedup_measured": median(f / s for f, s in zip(times["full"], times[name], strict=True)),
            "speedup_bound": flops["full"] / flops[name],
        }
        for name, _ in named
    ]


def _named_schedules(
    config: DecoderConfig, case: BenchCase, schedules: list[dict[str, Any]]
) -> list[tuple[str, Schedule]]:
    named: list[tuple[str, Schedule]] = [("full", FullDepth(config.num_hidden_layers))]
    for decode in schedules:
        schedule = listed_schedule(config, decode, case.new_tokens)
        if schedule in (known for _, known in named):
            continue
        name = " ".join(_words(decode))
        taken = [known for known, _ in named]
        named.append((name if name not in taken else json.dumps(decode), schedule))
    return named


def _words(decode: dict[str, Any]) -> Iterator[str]:
    """A short form of a `decode:` mapping: its values, and those of `ffn_skip` with their keys."""
    for key, value in decode.items():
        if key == "ffn_skip" and value is not None:
            yield from ("ffn_skip", *(f"{k}={v}".replace(" ", "") for k, v in value.items()))
        else:
            yield f"{value:g}" if isinstance(value, float) else str(value)
