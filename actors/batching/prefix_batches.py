"""Which prompts of a window share their heads, and the batches in which they meet: found by tokens, decided by price.

Sorted, prompts that begin alike lie together, and how far neighbours agree says where heads end. A head is worth it
where the tokens that need not be run cost more than what it brings with it. Nothing is random and nothing is measured
while it runs: the same window is cut alike. What becomes of a sharing is `skipdecode.engine.prefix_sharing`.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from actors.batching.buckets import Batch, bucket_of, cut_batches
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import Ceilings, predict_s
from skipdecode.engine.prefix_sharing import PREFIX_STEP, PrefixSharing, share_prefixes
from skipdecode.schedules.plan import Schedule

MIN_HEAD = 16  # tokens; shorter ones are mostly the same first word
MIN_GAIN = 0.02  # of the time for all prompts of a window: below it batches stay as they are
# What a device can do, where it was not measured: of a core or two, and of a GPU of the data centre. Only ratios of
# times that are far apart depend on it.
NOMINAL = {"cpu": Ceilings(2e11, 2e10, 5e-6), "cuda": Ceilings(3e14, 2e12, 5e-6)}


@dataclass(frozen=True)
class PromptPrices:
    """Of a model, by the cost model, in seconds."""

    token_s: float
    """To run a token of a prompt."""
    pass_s: float
    """Of a pass through all layers, however few tokens it has: their weights are read."""
    column_s: float
    """To read a column of keys and values from memory, of all layers."""

    @classmethod
    def of(
        cls, config: DecoderConfig, schedule: Schedule, ceilings: Ceilings, *, itemsize: int, weight_itemsize: int
    ) -> "PromptPrices":
        predict = partial(predict_s, config, schedule, ceilings, itemsize=itemsize, weight_itemsize=weight_itemsize)
        few, many = (predict(prompt_columns=64, batch_rows=(), rows=rows)[0] for rows in (32, 64))
        token_s = (many - few) / (32 * 64)
        _, pass_s = predict(prompt_columns=1, batch_rows=(1,))
        column_bytes = 2 * config.num_hidden_layers * config.kv_dim * itemsize
        return cls(token_s, pass_s, column_bytes / ceilings.bytes_per_s)


@dataclass(frozen=True)
class Head:
    """How a prompt begins: the numbers of tokens at which heads of it end, rising, and which heads these are."""

    ends: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    @property
    def block(self) -> int:
        """Prompts of one block have all their heads in common; -1: it has none."""
        return self.heads[-1] if self.heads else -1

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0


def find_prefixes(prompts: Sequence[Sequence[int]], prices: PromptPrices, num_steps: int) -> list[Head]:
    """The heads of each prompt. `num_steps`: decode steps of an answer, which read them."""
    order = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    shared = [_common(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    found = [Head()] * len(prompts)
    num_heads, stack = 0, [(0, len(order), Head())]  # prompts a..b-1 in order, and what all of them have
    while stack:
        a, b, above = stack.pop()
        if b - a < 2:
            found[order[a]] = above
            continue
        common, before = min(shared[a : b - 1]), above.length
        if common - before >= MIN_HEAD and _gain(b - a, common, before, prices, num_steps) > 0:
            above, num_heads = Head((*above.ends, common), (*above.heads, num_heads)), num_heads + 1
        edges = [a, *(at + 1 for at in range(a, b - 1) if shared[at] == common), b]
        stack += [(x, y, above) for x, y in itertools.pairwise(edges)]
    return found


def _gain(rows: int, end: int, before: int, prices: PromptPrices, num_steps: int) -> float:
    """Seconds that a head of so many rows brings, which shared their first `before` tokens anyway: tokens that are not
    run; less what they no longer read together with others."""
    saved_s = (rows - 1) * (end - before) * (prices.token_s + num_steps * prices.column_s)
    return saved_s - (before * num_steps * prices.column_s if before else 0.0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two prompts begin with, of which neither is a last one; in whole steps."""
    most = min(len(a), len(b)) - 1
    if a[:most] != b[:most]:
        low, high = 0, most  # a[:low] is common, a[:high] is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
        most = low
    return most - most % PREFIX_STEP


def cut_sharing_prefixes(
    lengths: Sequence[int],
    heads: Sequence[Head],
    buckets: Sequence[int],
    batch_size: Callable[[int, Sequence[int]], int],
) -> list[Batch]:
    """As `cut_batches`, of rows with one schedule: by what is behind their heads, and blocks in one batch where that
    leaves batches of about the same size. `batch_size(bucket, rows)`: of these rows, in a bucket of their own ends."""
    own = [length - head.length for length, head in zip(lengths, heads, strict=True)]
    members: dict[int, list[int]] = {}
    for row, length in enumerate(own):
        members.setdefault(bucket_of(length, buckets), []).append(row)
    batches = []
    for bucket, rows in members.items():
        longest: dict[int, int] = {}
        for row in rows:
            longest[_block(heads, row)] = max(longest.get(_block(heads, row), 0), own[row])
        rows.sort(key=lambda row: (longest[_block(heads, row)], _block(heads, row), own[row]))
        bounds = [at for at in range(1, len(rows)) if _block(heads, rows[at]) != _block(heads, rows[at - 1])]
        edges = _edges(len(rows), bounds, batch_size(bucket, rows))
        for a, b in itertools.pairwise(edges):
            marks = tuple(heads[row].ends for row in rows[a:b])
            batches.append(Batch(tuple(rows[a:b]), bucket, marks if any(marks) else ()))
    return batches


def _block(heads: Sequence[Head], row: int) -> int:
    """A row without heads is a block of its own."""
    return heads[row].block if heads[row].ends else -1 - row


def _edges(count: int, bounds: Sequence[int], size: int) -> list[int]:
    """Where to cut `count` rows into as few batches of at most `size` as there must be: evenly, and at one of `bounds`
    where one is near."""
    edges = [0]
    while (left := count - edges[-1]) > 0:
        want, most = edges[-1] + -(-left // -(-left // size)), edges[-1] + size
        near = [at for at in bounds[max(0, bisect_left(bounds, want) - 1) :][:2] if edges[-1] < at <= most]
        near = [at for at in near if -(-(count - at) // size) < -(-left // size) or at == want] or [want]
        edges.append(min(near, key=lambda at: abs(at - want)))
    return edges


class BatchSize(Protocol):
    """Rows per batch (`Generator.batch_size`)."""

    def __call__(self, bucket: int, *, head_columns: int = 0) -> int: ...


def cut_window(
    prompts: Sequence[Sequence[int]],
    prices: PromptPrices,
    num_steps: int,
    buckets: Sequence[int],
    batch_size: BatchSize,
    *,
    copies: bool,
) -> list[Batch] | None:
    """Batches of rows with one schedule, in which what rows begin with alike is run once; None where they take no less
    time than others. `copies`: heads lie in the memory of every row."""
    heads = find_prefixes(prompts, prices, num_steps)
    if not any(head.ends for head in heads):
        return None
    lengths = [len(prompt) for prompt in prompts]

    def size(bucket: int, rows: Sequence[int]) -> int:
        if copies:
            return batch_size(bucket_of(max(lengths[row] for row in rows), buckets))
        return batch_size(bucket, head_columns=_head_columns([heads[row] for row in rows]))

    batches = cut_sharing_prefixes(lengths, heads, buckets, size)
    others = cut_batches(lengths, [None] * len(lengths), buckets, batch_size)
    sharings = [
        share_prefixes([prompts[row] for row in batch.rows], batch.marks) if batch.marks else None for batch in batches
    ]
    saved = [0 if sharing is None else sharing.tokens_saved for sharing in sharings]
    # every batch makes all steps, and heads take a pass of their own
    more = (len(batches) - len(others)) * (1 + num_steps) + sum(tokens > 0 for tokens in saved)
    saved_s = sum(saved) * prices.token_s - more * prices.pass_s
    return batches if saved_s > MIN_GAIN * sum(lengths) * prices.token_s else None


def share_batch(prompts: Sequence[Sequence[int]], prices: PromptPrices, num_steps: int) -> PrefixSharing | None:
    """What the rows of one batch share; None: nothing that pays for the passes of its own."""
    heads = find_prefixes(prompts, prices, num_steps)
    sharing = share_prefixes(prompts, [head.ends for head in heads]) if any(head.ends for head in heads) else None
    if sharing is None or sharing.tokens_saved * prices.token_s <= len(sharing.levels) * prices.pass_s:
        return None
    return sharing


def _head_columns(heads: Sequence[Head]) -> int:
    """Columns per row of all heads of these rows, as they lie beside each other: each as long as the longest."""
    found = {number for head in heads for number in head.heads}
    return -(-len(found) * max((head.length for head in heads), default=0) // len(heads))
