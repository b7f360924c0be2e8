"""Attention by torch's back ends and by our kernel: bandwidth, and what the first call with a new shape costs.

B rows, H query heads, G KV heads, S columns of the cache, T columns of a prompt, K head dim.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from skipdecode.backends.backend import KVRange
from skipdecode.backends.device import backend_on
from skipdecode.kv.view import attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
CHOICE, OURS = "default", "ours"
MAX_NEW_SHAPE_S = 0.005
"""Launching a kernel takes microseconds; one that has to be planned or compiled first takes tens of milliseconds."""
MIN_OF_BEST = 0.9
"""Share of the bandwidth of torch's best back end that our kernel must reach."""
REPEATS = 20
PROMPT_ROWS = 8
GROUP = 4

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Attention at one shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    @property
    def nbytes(self) -> int:
        """The least bytes read and written; queries count twice because the output is as large."""
        mask = 0 if self.mask is None else self.mask.nbytes
        return 2 * self.q.nbytes + self.k.nbytes + self.v.nbytes + mask

    def by_torch(self) -> Tensor:
        """Causal attention over whole prompts."""
        return attention(self.q, self.k, self.v, self.mask)

    def by_us(self) -> Tensor:
        """Attention of one query per row to all columns."""
        attend = backend_on(self.k.device).decode_attention(self.k)
        assert attend is not None, "no kernel for one column"
        first = torch.zeros(len(self.k), dtype=torch.int64, device=self.k.device)
        return attend(self.q, None, None, KVRange(self.k, self.v, first, first + self.k.shape[2] - 1))


def query(context: CheckContext, columns: int) -> Case:
    """Attention of one query per row with a mask [B, 1, 1, S], as in a decode step."""
    rows = min(context.rows)
    return Case(*_tensors(context, rows, 1, columns), _mask(context, rows, 1, columns))


def prompt(context: CheckContext, columns: int, *, is_masked: bool) -> Case:
    """Attention of prompts, with a mask [B, 1, T, T] as for padded ones, or without."""
    rows = min(PROMPT_ROWS, *context.rows)
    mask = _mask(context, rows, columns, columns).tril() if is_masked else None
    return Case(*_tensors(context, rows, columns, columns), mask)


def prompt_of_groups(context: CheckContext, columns: int) -> Case:
    """As `prompt` with a mask, for models where four query heads or more share a KV head."""
    case = prompt(context, columns, is_masked=True)
    heads = max(1, min(case.k.shape[1], case.q.shape[1] // GROUP))
    return Case(case.q, case.k[:, :heads], case.v[:, :heads], case.mask)


CASES: dict[str, Callable[[CheckContext, int], Case]] = {
    "query behind a mask": query,
    "prompt behind a mask": partial(prompt, is_masked=True),
    "prompt of groups behind a mask": prompt_of_groups,
    "prompt without a mask": partial(prompt, is_masked=False),
}


@torch.inference_mode()
def check_attention(context: CheckContext) -> Found:
    """Checks that our kernel reads about as fast as torch's best back end, and that new shapes need no planning or
    compiling."""
    found: dict[str, dict[str, Found]] = {}
    for name, make in CASES.items():
        ways: dict[str, AbstractContextManager[None]] = {CHOICE: nullcontext()}
        ways |= {backend: sdpa_kernel(which) for backend, which in BACKENDS.items()}
        found[name] = {way: _by_torch(context, make, backend) for way, backend in ways.items()}
    found["query behind a mask"][OURS] = _timed(context, query, Case.by_us)
    if sentence := judged(found) or (kept_scores(found) if context.device.type == "cuda" else None):
        raise CheckFailed(sentence, {"cases": found})
    return {"read_bytes_per_s": context.ceilings.bytes_per_s, "cases": found}


def judged(found: dict[str, dict[str, Found]]) -> str | None:
    """What is wrong with these times; None if nothing is."""
    for name, ways in found.items():
        if "refused" in ways[CHOICE]:
            return f"torch takes no attention, {name}: {ways[CHOICE]['refused']}"
        for way in (CHOICE, OURS):
            new_s = float(str(ways.get(way, {}).get("new_shape_s", 0.0)))
            if new_s > MAX_NEW_SHAPE_S:
                return f"{way}, {name}: a new shape takes {1e3 * new_s:.0f} ms the first time, and batches bring many"
    query_ways = found["query behind a mask"]
    speeds = {way: float(str(row["bytes_per_s"])) for way, row in query_ways.items() if "bytes_per_s" in row}
    best = max((way for way in speeds if way != OURS), key=lambda way: speeds[way], default=OURS)
    if speeds[OURS] < MIN_OF_BEST * speeds[best]:
        return f"our attention reads {speeds[OURS] / 1e9:.0f} GB/s, and torch's ({best}) {speeds[best] / 1e9:.0f} GB/s"
    return None


def kept_scores(found: dict[str, dict[str, Found]]) -> str | None:
    """What is wrong if torch's memory-efficient attention does not run prompts, as it must on any GPU; else None."""
    for name, ways in found.items():
        if (why := ways.get("efficient", {}).get("refused")) is not None:
            return f"{name}: what takes little memory refuses it ({why}), and what is left keeps all scores"
    return None


def _by_torch(
    context: CheckContext, make: Callable[[CheckContext, int], Case], backend: AbstractContextManager[None]
) -> Found:
    """The times, or `refused` with torch's warning where the back end does not take the shape."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with backend:
                return _timed(context, make, Case.by_torch)
        except RuntimeError as error:
            why = [str(one.message).splitlines()[0] for one in caught] or str(error).splitlines()[:1]
            return {"refused": "; ".join(why)[:300]}


def _timed(context: CheckContext, make: Callable[[CheckContext, int], Case], run: Callable[[Case], Tensor]) -> Found:
    case = make(context, context.context_tokens)
    run(case)
    new_s = []
    for more in (16, 48, 80):  # as caches grow
        other = make(context, context.context_tokens + more)
        new_s.append(_seconds(context, partial(run, other), 1))
    seconds = median(_seconds(context, partial(run, case), REPEATS) for _ in range(3))
    return {"ms": 1e3 * seconds, "bytes_per_s": case.nbytes / seconds, "new_shape_s": median(new_s)}


def _seconds(context: CheckContext, run: Work, repeats: int) -> float:
    context.wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    context.wait()
    return (time.perf_counter() - start) / repeats


def _tensors(context: CheckContext, rows: int, queries: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    config = context.config
    heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (
        torch.randn(rows, count, width, config.head_dim, device=context.device, dtype=torch.bfloat16)
        for count, width in zip(heads, (queries, columns, columns), strict=True)
    )
    return q, k, v


def _mask(context: CheckContext, rows: int, queries: int, columns: int) -> Tensor:
    return torch.ones(rows, 1, queries, columns, dtype=torch.bool, device=context.device)
