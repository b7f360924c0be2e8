"""Where the time of a decode step goes: times every stage of a model while it decodes.

Calls are wrapped for one run, so that the decoder itself has no code for it. On CUDA every stage waits for the device,
which makes steps longer: read the shares, not the sum.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import skipdecode.kv.slot_cache
import skipdecode.kv.static_cache
from skipdecode.backends.device import backend_on
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.sampler import Sampler
from skipdecode.schedules.schedule import Schedule

REST = "rest (host, views, adds)"


def profile_step(model: Decoder, requests: list[Request], schedule: Schedule) -> list[dict[str, Any]]:
    """One row per stage of an average decode step, longest first: `stage`, `ms_per_step`, `share`."""
    cohort = StaticBatch(model, requests, schedule, compact_at=0.0)
    cohort.prefill()
    with _timed(model) as seconds:
        start = time.perf_counter()
        while not cohort.is_done:
            cohort.step()
        _wait(model.device)
        whole = time.perf_counter() - start
    seconds[REST] = whole - sum(seconds.values())
    steps = max(cohort.stats.decode_steps, 1)
    rows = [{"stage": k, "ms_per_step": 1e3 * s / steps, "share": s / whole} for k, s in seconds.items()]
    return sorted(rows, key=lambda row: -row["share"])


@contextmanager
def _timed(model: Decoder) -> Iterator[dict[str, float]]:
    """Seconds by stage while the block runs; a stage within another counts only for the inner one."""
    seconds: dict[str, float] = {}
    inside: list[float] = []  # for each open stage, the time of stages within it

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keys: Any) -> Any:
            _wait(model.device)
            start = time.perf_counter()
            inside.append(0.0)
            try:
                return call(*args, **keys)
            finally:
                _wait(model.device)
                took = time.perf_counter() - start
                seconds[stage] = seconds.get(stage, 0.0) + took - inside.pop()
                if inside:
                    inside[-1] += took

        return run

    backend = backend_on(model.device)
    targets: list[tuple[Any, str, str]] = [
        (model, "embed", "embedding"),
        (model, "head", "head"),
        (model, "argmax", "head"),  # includes sampling
        (Sampler, "__call__", "sampling"),
        *backend.timed_calls(),
        (KVCache, "append", "cache write"),
        *((module, "attention", "attention") for module in (skipdecode.kv.static_cache, skipdecode.kv.slot_cache)),
    ]
    for block in model.layers:
        targets += [(block.attn_norm, "forward", "norms"), (block.ffn_norm, "forward", "norms")]
        targets += [(block.qkv, "forward", "query, key, value"), (block.out_proj, "forward", "attention output")]
        targets += [(block.fc1, "forward", "feed-forward"), (block.fc2, "forward", "feed-forward")]
    if model.swiftkv is not None:
        targets += model.swiftkv.timed_calls()
    had = [vars(owner).get(name) for owner, name, _ in targets]  # None: inherited from the class
    try:
        for owner, name, stage in targets:
            setattr(owner, name, timed(stage, getattr(owner, name)))
        with backend.timed_layers() as in_layers:
            yield seconds
        for stage, took in in_layers.items():
            if took:
                seconds[stage] = seconds.get(stage, 0.0) + took
    finally:
        for (owner, name, _), before in zip(targets, had, strict=True):
            delattr(owner, name) if before is None else setattr(owner, name, before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
