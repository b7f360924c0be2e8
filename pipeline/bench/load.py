"""Open-loop load on a completions server: requests arrive by a seeded Poisson process, whatever the server does.

Latencies count from the time a request was due, so a server that falls behind cannot hide it. The figures have the
names of `vllm bench serve`.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.formatting import Json


@dataclass(frozen=True)
class Work:
    """One request and the time it is due."""

    due_s: float
    prompt: str
    max_tokens: int


@dataclass
class Outcome:
    work: Work
    status: int = 0
    """HTTP status; 0 if the connection failed."""
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    error: str = ""
    text: str = ""

    @property
    def is_good(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.work.due_s

    @property
    def e2el_s(self) -> float:
        return self.last_s - self.work.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        assert self.first_s is not None
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Figures:
    """Figures of one load, times in milliseconds; None where no answer has such a time."""

    requests: int
    statuses: dict[str, int]
    request_throughput: float
    """Good answers per second, from the first arrival to the last token."""
    output_throughput: float
    """New tokens per second over the same time."""
    goodput: float
    """Answers per second that met both latency limits."""
    late_p99_ms: float | None
    """How late requests were sent; a large value means that this client is too slow."""
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None
    p50_tpot_ms: float | None
    p99_tpot_ms: float | None
    p50_e2el_ms: float | None
    p99_e2el_ms: float | None


def make_work(
    rate: float, duration_s: float, *, tokens: Sequence[int], weights: Sequence[float], seed: int
) -> list[Work]:
    """Requests at `rate` per second on average, with `max_tokens` drawn from `tokens` by `weights`."""
    rng = random.Random(seed)
    prompts = [row["prompt"] for row in make_prompts(512, seed=1)]
    due, work = rng.expovariate(rate), []
    while due < duration_s:
        (length,) = rng.choices(tokens, weights)
        work.append(Work(due, rng.choice(prompts), length))
        due += rng.expovariate(rate)
    return work


async def send(
    session: aiohttp.ClientSession, url: str, work: Work, began: float, body: Mapping[str, Json], keep_text: bool
) -> Outcome:
    """Sends one streamed completion when it is due."""
    await asyncio.sleep(max(0.0, began + work.due_s - time.perf_counter()))
    outcome = Outcome(work, sent_s=time.perf_counter() - began)
    asked = {"prompt": work.prompt, "max_tokens": work.max_tokens, "stream": True, **body}
    try:
        async with session.post(f"{url}/v1/completions", json=asked) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.error = (await answer.text())[:500]
            else:
                await _read(answer, outcome, began, keep_text)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.last_s = time.perf_counter() - began
    return outcome


async def _read(answer: aiohttp.ClientResponse, outcome: Outcome, began: float, keep_text: bool) -> None:
    is_done = False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            is_done = True
            break
        event = json.loads(line[6:])
        if "error" in event:
            outcome.error = event["error"]["message"]
            return
        now = time.perf_counter() - began
        for choice in event["choices"]:
            if choice["token_ids"]:
                outcome.first_s = outcome.first_s or now
                outcome.tokens += len(choice["token_ids"])
            if keep_text:
                outcome.text += choice["text"]
    if not is_done:
        outcome.error = "the stream was cut off"


async def offer(
    url: str,
    work: Sequence[Work],
    body: Mapping[str, Json],
    *,
    keep_text: bool = False,
    headers: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Sends every request when it is due and waits for the answers."""
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        began = time.perf_counter() + 0.05
        return await asyncio.gather(*(send(session, url, one, began, body, keep_text) for one in work))


def figures(outcomes: Sequence[Outcome], *, slo_ttft_s: float, slo_tpot_s: float) -> Figures:
    good = [one for one in outcomes if one.is_good]
    span = max((one.last_s for one in good), default=0.0) - min((one.work.due_s for one in outcomes), default=0.0)
    statuses: dict[str, int] = {}
    for one in outcomes:
        name = str(one.status) if one.status != 200 or one.is_good else "cut off"
        statuses[name] = statuses.get(name, 0) + 1
    kept = [one for one in good if one.ttft_s <= slo_ttft_s and (one.tpot_s or 0) <= slo_tpot_s]
    p50_ttft, p99_ttft = _percentiles([one.ttft_s for one in good])
    p50_tpot, p99_tpot = _percentiles([one.tpot_s for one in good if one.tpot_s is not None])
    p50_e2el, p99_e2el = _percentiles([one.e2el_s for one in good])
    return Figures(
        requests=len(outcomes),
        statuses=statuses,
        request_throughput=len(good) / span if span else 0.0,
        output_throughput=sum(one.tokens for one in good) / span if span else 0.0,
        goodput=len(kept) / span if span else 0.0,
        late_p99_ms=_percentiles([one.sent_s - one.work.due_s for one in outcomes])[1],
        p50_ttft_ms=p50_ttft,
        p99_ttft_ms=p99_ttft,
        p50_tpot_ms=p50_tpot,
        p99_tpot_ms=p99_tpot,
        p50_e2el_ms=p50_e2el,
        p99_e2el_ms=p99_e2el,
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """p50 and p99 in milliseconds."""
    if not seconds:
        return None, None
    low, high = np.percentile(seconds, [50, 99])
    return 1e3 * float(low), 1e3 * float(high)
