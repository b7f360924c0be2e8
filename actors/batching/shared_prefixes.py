"""Which prompts of a window share prefixes, and the batches that bring them together.

Sorted by their tokens, prompts with a common prefix are neighbours, and the number of tokens that neighbours have in
common says where shared prefixes end. A prefix is shared only if the cost model says that it saves time, so the same
window is always cut the same way. How a batch runs shared prefixes is `skipdecode.engine.prefix_sharing`.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from actors.batching.buckets import PlannedBatch, bucket_of, cut_batches
from skipdecode.config.model import KV_ALIGNMENT, DecoderConfig
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.engine.prefix_sharing import PREFIX_STEP, PrefixSharing, share_prefixes
from skipdecode.schedules.schedule import Schedule

MIN_PREFIX_TOKENS = 16  # shorter ones are mostly the same first word
MIN_GAIN = 0.02  # of the prefill time of a window: below it prefixes are not shared
NOMINAL_CEILINGS = {"cpu": Ceilings(2e11, 2e10, 5e-6), "cuda": Ceilings(3e14, 2e12, 5e-6)}
"""For devices that were not measured: one or two CPU cores, and a data-centre GPU. Only ratios of very different times
depend on them."""


@dataclass(frozen=True)
class PrefillCosts:
    """Costs of a model's prefill by the cost model, in seconds."""

    token_s: float
    """To run one prompt token."""
    pass_s: float
    """For a forward pass with hardly any tokens, which still reads the weights of all layers."""
    column_s: float
    """To read the keys and values of one token, in all layers."""

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        schedule: Schedule,
        ceilings: Ceilings,
        *,
        itemsize: int,
        weight_itemsize: float,
        kv_itemsize: int | None = None,
    ) -> "PrefillCosts":
        predict = partial(
            predict_s,
            config,
            schedule,
            ceilings,
            itemsize=itemsize,
            weight_itemsize=weight_itemsize,
            kv_itemsize=kv_itemsize,
        )
        few, many = (predict(BatchShape(64, (), rows=rows))[0] for rows in (32, 64))
        token_s = (many - few) / (32 * 64)
        _, pass_s = predict(BatchShape(1, (1,)))
        column_bytes = 2 * config.num_hidden_layers * config.kv_dim * (kv_itemsize or itemsize)
        return cls(token_s, pass_s, column_bytes / ceilings.bytes_per_s)


@dataclass(frozen=True)
class Prefixes:
    """The shared prefixes of one prompt, each of which begins with the one before it."""

    ends: tuple[int, ...] = ()
    """Their lengths in tokens, ascending."""
    ids: tuple[int, ...] = ()
    """A number for each prefix, equal in all prompts that share it."""

    @property
    def length(self) -> int:
        """Tokens of the longest one; 0 if there is none."""
        return self.ends[-1] if self.ends else 0


def find_prefixes(prompts: Sequence[Sequence[int]], costs: PrefillCosts, num_steps: int) -> list[Prefixes]:
    """The prefixes that are worth sharing, for each prompt. `num_steps`: decode steps of an answer, which read them."""
    order = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    shared = [_common_length(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    found = [Prefixes()] * len(prompts)
    num_found, stack = 0, [(0, len(order), Prefixes())]  # order[a:b], and the prefixes that all of these share
    while stack:
        a, b, outer = stack.pop()
        if b - a < 2:
            found[order[a]] = outer
            continue
        common, before = min(shared[a : b - 1]), outer.length
        if common - before >= MIN_PREFIX_TOKENS:
            # Not run for all but one prompt; but prompts with an outer prefix no longer read that one together.
            saved_s = (b - a - 1) * (common - before) * (costs.token_s + num_steps * costs.column_s)
            if saved_s > before * num_steps * costs.column_s:
                outer, num_found = Prefixes((*outer.ends, common), (*outer.ids, num_found)), num_found + 1
        edges = [a, *(at + 1 for at in range(a, b - 1) if shared[at] == common), b]
        stack += [(x, y, outer) for x, y in itertools.pairwise(edges)]
    return found


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens of the longest common prefix that leaves both prompts a last token of their own, in whole PREFIX_STEPs."""
    most = min(len(a), len(b)) - 1
    if a[:most] != b[:most]:
        low, high = 0, most  # a[:low] is common, a[:high] is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
        most = low
    return most - most % PREFIX_STEP


def cut_by_prefix(
    lengths: Sequence[int],
    prefixes: Sequence[Prefixes],
    buckets: Sequence[int],
    batch_size: Callable[[int, Sequence[int]], int],
) -> list[PlannedBatch]:
    """`cut_batches` for rows of one schedule, with buckets by the length of what follows the shared prefixes.

    Rows that share all their prefixes stay in one batch if batches of about equal size are still possible. `batch_size`
    is called with the bucket and its rows.
    """
    suffixes = [length - own.length for length, own in zip(lengths, prefixes, strict=True)]
    groups = [own.ids[-1] if own.ids else -1 - row for row, own in enumerate(prefixes)]  # without prefixes: alone
    members: dict[int, list[int]] = {}
    for row, length in enumerate(suffixes):
        members.setdefault(bucket_of(length, buckets), []).append(row)
    batches = []
    for bucket, rows in members.items():
        longest: dict[int, int] = {}
        for row in rows:
            longest[groups[row]] = max(longest.get(groups[row], 0), suffixes[row])
        rows.sort(key=lambda row: (longest[groups[row]], groups[row], suffixes[row]))
        bounds = [at for at in range(1, len(rows)) if groups[rows[at]] != groups[rows[at - 1]]]
        most = batch_size(bucket, rows)
        for a, b in itertools.pairwise(_edges(len(rows), bounds, most)):
            ends = tuple(prefixes[row].ends for row in rows[a:b])
            batches.append(PlannedBatch(tuple(rows[a:b]), bucket, ends if any(ends) else (), most))
    return batches


def _edges(count: int, bounds: Sequence[int], size: int) -> list[int]:
    """Where to cut `count` rows into as few batches of at most `size` rows as possible: evenly, but at one of `bounds`
    where one is near."""
    edges = [0]
    while (left := count - edges[-1]) > 0:
        want, most = edges[-1] + -(-left // -(-left // size)), edges[-1] + size
        near = [at for at in bounds[max(0, bisect_left(bounds, want) - 1) :][:2] if edges[-1] < at <= most]
        near = [at for at in near if -(-(count - at) // size) < -(-left // size) or at == want] or [want]
        edges.append(min(near, key=lambda at: abs(at - want)))
    return edges


def cut_with_shared_prefixes(
    prompts: Sequence[Sequence[int]],
    costs: PrefillCosts,
    num_steps: int,
    buckets: Sequence[int],
    batch_size: Callable[..., int],
    *,
    copies: bool,
) -> list[PlannedBatch] | None:
    """Batches of rows with one schedule that share prefixes; None if these would save too little time.

    `batch_size` is given the bucket and, unless every row has a copy of its prefixes in memory (`copies`), the
    `prefix_columns` per row.
    """
    prefixes = find_prefixes(prompts, costs, num_steps)
    if not any(own.ends for own in prefixes):
        return None
    lengths = [len(prompt) for prompt in prompts]

    def size(bucket: int, rows: Sequence[int]) -> int:
        if copies:
            return batch_size(bucket_of(max(lengths[row] for row in rows), buckets))
        # different prefixes are adjacent in memory, each padded to the longest
        num_prefixes = len({number for row in rows for number in prefixes[row].ids})
        longest = -(-max(prefixes[row].length for row in rows) // KV_ALIGNMENT) * KV_ALIGNMENT
        count = min(len(rows), batch_size(bucket))
        while True:  # of fewer rows each has a larger share
            in_batch = min(num_prefixes, -(-num_prefixes * count // len(rows)) + 1)  # one is cut in two
            fits = batch_size(bucket, prefix_columns=-(-in_batch * longest // count))
            if fits >= count:
                return fits
            count = fits

    batches = cut_by_prefix(lengths, prefixes, buckets, size)
    others = cut_batches(lengths, [None] * len(lengths), buckets, batch_size)
    sharings = [prefixes_in(batch, [prompts[row] for row in batch.rows]) for batch in batches]
    saved = [0 if sharing is None else sharing.tokens_saved for sharing in sharings]
    # every batch runs all decode steps, and shared prefixes take a pass of their own
    more_passes = (len(batches) - len(others)) * (1 + num_steps) + sum(tokens > 0 for tokens in saved)
    saved_s = sum(saved) * costs.token_s - more_passes * costs.pass_s
    return batches if saved_s > MIN_GAIN * sum(lengths) * costs.token_s else None


def shared_prefixes_of(prompts: Sequence[Sequence[int]], costs: PrefillCosts, num_steps: int) -> PrefixSharing | None:
    """The prefixes that the rows of one batch share; None if they are not worth the passes that they take."""
    sharing = share_prefixes(prompts, [own.ends for own in find_prefixes(prompts, costs, num_steps)])
    if sharing is None or sharing.tokens_saved * costs.token_s <= len(sharing.levels) * costs.pass_s:
        return None
    return sharing


def prefixes_in(batch: PlannedBatch, prompts: Sequence[Sequence[int]]) -> PrefixSharing | None:
    """The shared prefixes of a batch, as its `prefix_lengths` say; None if there are none."""
    return share_prefixes(prompts, batch.prefix_lengths) if batch.prefix_lengths else None
