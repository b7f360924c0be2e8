"""`skipdecode bench --serve`: the same load on several servers, one after the other, at rising request rates.

Our servers are real Ray Serve applications; a peer is any command that listens on {port}.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, JsonValue

from actors.measuring.bench import random_model
from pipeline.bench.load import Figures, figures, make_work, offer
from pipeline.cluster.machine import provenance
from pipeline.config.job import Section, build_config, read_tree, set_key
from pipeline.formatting import Json, Log
from pipeline.service.config import load_serve_file
from pipeline.service.serve import running
from skipdecode.checkpoint.hub import DEMO
from skipdecode.checkpoint.weights import save_model
from skipdecode.families import released

Positive = Annotated[float, Field(gt=0)]
START_S = 120.0


class System(Section):
    """A server under load: `args` of our application, or `command`, a peer that listens on {port}."""

    name: str
    """In the table, and for `only`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Dotted keys over those of the benchmark, e.g. engine.scheduler."""
    command: str | None = None
    """{python}, {model}, {dtype} and {port} are filled in."""


class ServeBenchConfig(Section):
    source: str | None = DEMO
    """A checkpoint; or null and `shape`, a released shape with random weights."""
    shape: str | None = None
    """A released shape, in place of `source`."""
    tokenizer: str | None = None
    """A folder with the tokenizer for `shape`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Dotted keys of every application."""
    systems: Annotated[tuple[System, ...], Field(min_length=1)]
    only: tuple[str, ...] = ()
    """Names of the systems to measure; empty: all."""
    rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4, 8, 16)
    """Requests per second."""
    duration_s: Positive = 20
    """Seconds of load at each rate."""
    max_tokens: Annotated[tuple[int, ...], Field(min_length=1)] = (64,)
    """Drawn for each request, by `weights`."""
    weights: tuple[Positive, ...] = ()
    """Shares of `max_tokens`; empty: equal ones."""
    ignore_eos: bool = True
    """Makes every answer exactly max_tokens long, so that servers do the same work."""
    slo_ttft_ms: Positive = 500
    """Goodput counts answers whose first token came within this time."""
    slo_tpot_ms: Positive = 50
    """And whose later tokens took no longer than this on average."""
    seed: int = 0
    """Decides on arrivals, prompts and lengths."""


def load_serve_bench_config(path: str | None, overrides: list[str]) -> ServeBenchConfig:
    return build_config(ServeBenchConfig, read_tree(path, overrides))


def run_serve_bench(config: ServeBenchConfig, log: Log) -> dict[str, Json]:
    """Measures every system at every rate; returns the JSON document with a row for each."""
    chosen = [system for system in config.systems if not config.only or system.name in config.only]
    rows: list[Json] = []
    with checkpoint(config) as source:
        for system in chosen:
            with started(system, source, config) as url:
                body: dict[str, Json] = {"temperature": 0, "ignore_eos": config.ignore_eos, "return_token_ids": True}
                warm = make_work(4, 2, tokens=[8], weights=[1], seed=99)
                asyncio.run(offer(url, warm, body))
                for rate in config.rates:
                    work = make_work(
                        rate,
                        config.duration_s,
                        tokens=config.max_tokens,
                        weights=config.weights or [1.0] * len(config.max_tokens),
                        seed=config.seed,
                    )
                    outcomes = asyncio.run(offer(url, work, body))
                    found = figures(outcomes, slo_ttft_s=config.slo_ttft_ms / 1e3, slo_tpot_s=config.slo_tpot_ms / 1e3)
                    rows.append({"system": system.name, "rate": rate, **asdict(found)})
                    log(line(system.name, rate, found))
    return provenance(torch.device("cpu"), ("torch", "ray")) | {"config": config.model_dump(mode="json"), "rows": rows}


def line(system: str, rate: float, found: Figures) -> str:
    """One line of the table."""
    parts = [f"{system:24}", f"rate {rate:g}", f"{found.output_throughput:.0f} tokens/s"]
    parts += [f"goodput {found.goodput:.1f}/s"]
    for name, *values in (
        ("ttft", found.p50_ttft_ms, found.p99_ttft_ms),
        ("tpot", found.p50_tpot_ms, found.p99_tpot_ms),
        ("e2el", found.p50_e2el_ms, found.p99_e2el_ms),
    ):
        parts.append(f"{name} p50/p99 " + "/".join("-" if v is None else f"{v:.0f}" for v in values) + " ms")
    return "  ".join([*parts, json.dumps(found.statuses)])


@contextmanager
def checkpoint(config: ServeBenchConfig) -> Iterator[str]:
    """The model's folder; for a `shape`, a temporary one with random weights and a tokenizer."""
    if config.shape is None:
        assert config.source is not None, "config.source"
        yield config.source
        return
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(released(config.shape), device="cpu", dtype=torch.float32)
        save_model(model, folder)
        tokenizer = Path(config.tokenizer or DEMO) / "tokenizer.json"
        (Path(folder) / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        yield folder


@contextmanager
def started(system: System, source: str, config: ServeBenchConfig) -> Iterator[str]:
    """Starts the server; yields its URL once it answers."""
    port = _free_port()
    if system.command is not None:
        with _command(system.command, source, port, str(config.args.get("model.dtype", "auto"))) as url:
            yield url
        return
    args: dict[str, Json] = {}
    own: dict[str, Json] = {"model.source": source, "model_name": "bench", "auth.open_on_loopback": True}
    for key, value in {**own, **config.args, **system.args}.items():
        set_key(args, key, value)
    tree: dict[str, Json] = {"applications": [{"args": args}], "http_options": {"host": "127.0.0.1", "port": port}}
    with running(load_serve_file(tree)) as url:
        yield url.rstrip("/")


@contextmanager
def _command(command: str, source: str, port: int, dtype: str) -> Iterator[str]:
    filled = command.format(python=sys.executable, model=source, port=port, dtype=dtype)
    process = subprocess.Popen(shlex.split(filled), stdout=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{filled}: did not start")
            time.sleep(0.2)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
