"""The Prometheus metrics of a replica, and the text of `GET /metrics`, which is read back from Ray's nodes.

Ray prefixes names with `ray_` and adds `_total` to counters; Serve tags each series with `application`, `deployment`
and `replica`. A histogram's `_sum` is useless: Ray's agent computes it from the middles of the buckets. The metrics of
`generate` are in `pipeline.report.prometheus`.
"""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.serve.metrics import Counter, Gauge, Histogram

from pipeline.batches.runner import BatchRunner
from pipeline.batches.status import STATES
from pipeline.service.api_error import ApiError
from pipeline.service.endpoint import Endpoint

PREFIX = "skipdecode_serve_"
SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
STATUSES = (200, 400, 404, 408, 413, 429, 500, 503)  # of completions
SCRAPE_S = 3.0


class RayMetrics:
    """`answered` is told of every completion and chat; `update` reads the state of the engine, from time to time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._requests = Counter(PREFIX + "requests", "Completions by status", tag_keys=("status",))
        self._ttft = Histogram(PREFIX + "ttft_s", "Time to the first token", boundaries=SECONDS)
        self._e2e = Histogram(PREFIX + "e2e_s", "Time to the last token", boundaries=SECONDS)
        self._gauges = {
            name: Gauge(PREFIX + name, text)
            for name, text in (
                ("waiting", "Prompts that have not started"),
                ("running", "Prompts in a batch"),
                ("background", "Rows of OpenAI batches in a batch, with batches.workers=shared"),
                ("cache_bytes", "K and V of all batches"),
            )
        }
        self._counters = {
            name: Counter(PREFIX + name, text)
            for name, text in (
                ("input_tokens", "Prompt tokens"),
                ("output_tokens", "New tokens"),
                ("layers_run", "Layers, summed over new tokens"),
                ("cancelled", "Prompts whose client went away"),
                ("failed", "Prompts that could not be decoded"),
                ("background_output_tokens", "New tokens of rows of OpenAI batches"),
                ("gave_way", "Times that a row of an OpenAI batch gave its place to a prompt"),
            )
        }
        self._told = dict.fromkeys(self._counters, 0)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        """Otherwise Prometheus first sees a counter at its first value, and `rate` never counts that."""
        for status in STATUSES:
            self._requests._record(0, {"status": str(status)})  # `inc` refuses 0
        for counter in self._counters.values():
            counter._record(0)

    def answered(self, status: int, ttft_s: float | None, total_s: float) -> None:
        self._requests.inc(tags={"status": str(status)})
        if ttft_s is not None:
            self._ttft.observe(max(ttft_s, 1e-6))
        if status == 200:
            self._e2e.observe(max(total_s, 1e-6))

    def update(self) -> None:
        thread = self._endpoint.thread
        self._gauges["waiting"].set(thread.num_waiting)
        self._gauges["running"].set(thread.num_running)
        self._gauges["background"].set(thread.num_background)
        self._gauges["cache_bytes"].set(thread.cache_bytes)
        for name, counter in self._counters.items():
            now: int = getattr(self._endpoint.engine.counts, name)
            if now > self._told[name]:
                counter.inc(now - self._told[name])
                self._told[name] = now


class BatchMetrics:
    """What is stored of batches, as their runner last saw it."""

    def __init__(self) -> None:
        self._batches = Gauge(PREFIX + "batches", "OpenAI batches by status", tag_keys=("status",))
        self._lines = Gauge(PREFIX + "batch_lines", "Lines of all batches that are kept", tag_keys=("result",))

    def update(self, runner: BatchRunner) -> None:
        for status in STATES:
            self._batches.set(runner.counts[status], tags={"status": status})
        for result in ("completed", "failed"):
            self._lines.set(runner.lines[result], tags={"result": result})


_nodes = ThreadPoolExecutor(1, "nodes")
_asked: "Future[list[str]] | None" = None


async def scrape(application: str) -> str:
    """The metrics of all replicas of `application`, as Prometheus text from all Ray nodes; ApiError 503 if the head
    does not tell which nodes there are."""
    loop = asyncio.get_running_loop()
    pages = await asyncio.gather(*(loop.run_in_executor(None, _read, url) for url in await urls(_urls)))
    return "\n".join(ours((line for page in pages for line in page.splitlines()), application)) + "\n"


def ours(lines: Iterable[str], application: str) -> list[str]:
    """The lines of `application`'s metrics among all that its nodes export; each header once."""
    named = re.compile(rf"(# (HELP |TYPE )?)?ray_{PREFIX}")
    value = re.escape(json.dumps(application, ensure_ascii=False))
    tagged = re.compile(rf"[{{,]application={value}[,}}]")
    kept = (line for line in lines if named.match(line) and (line.startswith("#") or tagged.search(line)))
    return list(dict.fromkeys(kept))


async def urls(ask: Callable[[], list[str]]) -> list[str]:
    """The result of `ask`, called in a thread, since it blocks for minutes while the head is down. Concurrent callers
    share one call, and wait at most SCRAPE_S."""
    global _asked
    if _asked is None or _asked.done():
        _asked = _nodes.submit(ask)
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(_asked)), SCRAPE_S)
    except TimeoutError:
        raise ApiError.unavailable("Ray's head does not say which nodes there are", "head_silent") from None


def _urls() -> list[str]:
    nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort")]
    return [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_S) as page:
            text: str = page.read().decode()
            return text
    except OSError as error:
        return f"# ray_{PREFIX}scrape {url}: {error}"
