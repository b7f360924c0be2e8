"""Shared prompt prefixes of a batch, which are run once: which they are, where their K/V are, how prompts are fed.

A shared prefix begins two or more prompts of the batch, or other prefixes. Where attention reads it in place, its keys
and values are stored once, beside the rows' own (`skipdecode.kv.static_cache`); elsewhere (torch's operators, and where
it would take more memory or more reading) they are copied into every row's cache, and decode steps are those of any
batch. The caller
chooses which prompts share what (`actors.batching.shared_prefixes`).

The last token of a prompt is never shared, since the first new token comes from it. Prefixes have an even number of
tokens: kernels add up bfloat16 values of two columns at a time, which keeps the order of an undivided prompt.

B rows, R prefixes, P columns of whole prompts, T of those fed, S of prefixes, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.backends.fp8 import as_bytes
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.model import KV_ALIGNMENT
from skipdecode.cost.roofline import SharedPrefixShape
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.kv.graph_cache import GraphedCache
from skipdecode.kv.static_cache import KVCache, SharedPrefixKV
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers

COPY_BYTES = 1 << 28  # of keys or values that are copied to rows at a time: a copy takes as much memory beside
PREFIX_STEP = 2  # the length of a prefix is a multiple of this


class Allocate(Protocol):
    """Allocates the rows' own cache."""

    def __call__(self, num_pad: Tensor, columns: int, *, num_pad_host: Sequence[int]) -> KVCache:
        """A cache with `columns` for prompts; `num_pad` and `num_pad_host` [B] are the same numbers, on the device and
        on the host."""


class Parts(NamedTuple):
    """How prompts are split into parts that go through the model together (`skipdecode.engine.prefill`)."""

    rows_at_once: Callable[[int, int], int]
    """From columns fed and columns attended to: the rows of a part, with padding."""
    packed: Callable[[Sequence[int], Sequence[int]], Iterable[slice]]
    """From the tokens fed and the tokens cached of each row: the rows of each part, without padding."""


@dataclass(frozen=True)
class PrefixSharing:
    """The shared prefixes of a batch, and the rows that begin with them. Every prefix comes after its parent."""

    prefixes: tuple[tuple[int, ...], ...]
    """The tokens of each prefix."""
    parents: tuple[int, ...]
    """The prefix that each prefix begins with, -1 if none."""
    prefix_of_row: tuple[int, ...]
    """The prefix that each row begins with, -1 if none."""

    def lengths(self, prefixes: Sequence[int]) -> list[int]:
        """The length of each of these prefixes in tokens; 0 for -1."""
        return [0 if prefix < 0 else len(self.prefixes[prefix]) for prefix in prefixes]

    @property
    def tokens_saved(self) -> int:
        """How many tokens of the rows' prompts are not fed thanks to sharing."""
        own = sum(
            len(prefix) - length for prefix, length in zip(self.prefixes, self.lengths(self.parents), strict=True)
        )
        return sum(self.lengths(self.prefix_of_row)) - own

    @property
    def levels(self) -> list[range]:
        """Ranges of prefixes that are run in one pass, since their parents were run before."""
        found, start = [], 0
        while start < len(self.parents):
            end = start + 1
            while end < len(self.parents) and self.parents[end] < start:
                end += 1
            found.append(range(start, end))
            start = end
        return found

    def of_rows(self, rows: Sequence[int]) -> "PrefixSharing | None":
        """The prefixes of some of the rows, though others may have them too; None if these have none."""
        chosen = [self.prefix_of_row[row] for row in rows]
        kept = {prefix for prefix in chosen if prefix >= 0}
        for prefix in reversed(range(len(self.prefixes))):  # parents come before their children
            if prefix in kept and self.parents[prefix] >= 0:
                kept.add(self.parents[prefix])
        if not kept:
            return None
        number = {prefix: at for at, prefix in enumerate(sorted(kept))} | {-1: -1}
        return PrefixSharing(
            tuple(self.prefixes[prefix] for prefix in sorted(kept)),
            tuple(number[self.parents[prefix]] for prefix in sorted(kept)),
            tuple(number[prefix] for prefix in chosen),
        )

    def columns_read(self, group_rows: int | None) -> int:
        """Columns of prefixes that a decode step reads, if at most `group_rows` rows read one together; None: all that
        have it."""
        users = Counter(self.prefix_of_row)
        return sum(
            len(prefix) * (bool(users[at]) if group_rows is None else -(-users[at] // group_rows))
            for at, prefix in enumerate(self.prefixes)
        )

    def shape(
        self, prompts: Sequence[Sequence[int]], *, copies: bool, group_rows: int | None = None
    ) -> SharedPrefixShape:
        """The passes for the cost model. `copies`: every row reads its own copy of the prefix. `group_rows` as in
        `columns_read`."""

        def one_pass(wholes: Sequence[int], prefixes: Sequence[int]) -> tuple[int, int, int]:
            count, seen = len(wholes), sum(wholes)
            return count, -(-(seen - sum(self.lengths(prefixes))) // count), -(-seen // count)

        lengths = [len(prefix) for prefix in self.prefixes]
        passes = [one_pass([lengths[at] for at in level], [self.parents[at] for at in level]) for level in self.levels]
        passes.append(one_pass([len(prompt) for prompt in prompts], self.prefix_of_row))
        once = sum(self.lengths(self.prefix_of_row)) - self.columns_read(group_rows)
        return SharedPrefixShape(tuple(passes), 0 if copies else once)


def share_prefixes(prompts: Sequence[Sequence[int]], prefix_lengths: Sequence[Sequence[int]]) -> PrefixSharing | None:
    """The prefixes of `prompts` with the `prefix_lengths` given for each (ascending), as far as at least two prompts
    begin with them; None if there are none."""
    users: dict[tuple[int, ...], set[tuple[int, ...] | int]] = {}
    parent: dict[tuple[int, ...], tuple[int, ...]] = {}
    prefix_of_row: list[tuple[int, ...]] = []
    for row, (prompt, ends) in enumerate(zip(prompts, prefix_lengths, strict=True)):
        above: tuple[int, ...] = ()
        for end in ends:
            assert len(above) < end < len(prompt), (ends, len(prompt))
            assert end % PREFIX_STEP == 0, end
            prefix = tuple(prompt[:end])
            users.setdefault(prefix, set())
            users.setdefault(above, set()).add(prefix)
            parent[prefix] = above
            above = prefix
        users.setdefault(above, set()).add(row)
        prefix_of_row.append(above)
    for prefix in sorted(parent, key=len, reverse=True):  # a prefix with one user saves nothing
        if len(users[prefix]) == 1:
            (user,) = users[prefix]
            if isinstance(user, int):
                prefix_of_row[user] = parent[prefix]
            else:
                parent[user] = parent[prefix]
            users[parent[prefix]].remove(prefix)
            users[parent[prefix]].add(user)
            del users[prefix], parent[prefix]
    if not parent:
        return None
    depth: dict[tuple[int, ...], int] = {(): -1}
    for prefix in sorted(parent, key=len):
        depth[prefix] = depth[parent[prefix]] + 1
    prefixes = sorted(parent, key=lambda prefix: depth[prefix])
    index = {prefix: at for at, prefix in enumerate(prefixes)} | {(): -1}
    return PrefixSharing(
        tuple(prefixes), tuple(index[parent[one]] for one in prefixes), tuple(index[one] for one in prefix_of_row)
    )


class SharedPrompts:
    """The prompts of a batch with shared prefixes. `feed` runs each prefix once and fills `cache`, that of the rows."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        schedule: Schedule,
        sharing: PrefixSharing,
        allocate: Allocate,
        *,
        parts: Parts,
        copies: bool = False,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """`parts`: which rows are fed together. `copies`: prefixes are copied to all rows even if the back end could
        read them in place. `graphs`: what decode steps are captured by, whose memory prefixes that are read in place
        then lie in."""
        self.model, self.sharing, self._parts = model, sharing, parts
        self._before = sharing.lengths(sharing.prefix_of_row)
        moves_results = backend_on(model.device).prefix_group_rows is not None  # beside what is read
        pays = not moves_results or one_copy_is_smaller(sharing, list(map(len, prompts)))
        self.copies = copies or not (pays and model.supports_shared_prefix)
        self._prefix_cache = _allocate_prefix_cache(model, sharing, schedule, None if self.copies else graphs)
        if not self.copies and not model.supports_packed_prompts(self._prefix_cache.k[0]):  # a gradient is needed
            self.copies, self._prefix_cache = True, _allocate_prefix_cache(model, sharing, schedule, None)
        self._prefix_tokens = _padded(model, sharing.prefixes, self._prefix_cache.k[0].shape[2])
        own = prompts if self.copies else [p[n:] for p, n in zip(prompts, self._before, strict=True)]
        self.tokens = _padded(model, own)  # [B, P], or the rows' own parts
        num_pad_host = _paddings(own)
        self.cache = allocate(to_device(num_pad_host, model.device), self.tokens.shape[1], num_pad_host=num_pad_host)
        if not self.copies:
            prefixes = self._prefix_cache
            groups, columns = prefixes.k[0].shape[1:3]
            offsets = [
                0 if prefix < 0 else prefix * groups * columns + _paddings_of(prefixes)[prefix]
                for prefix in sharing.prefix_of_row
            ]
            places = list(zip(offsets, self._before, strict=True))
            where = prefixes.where if isinstance(prefixes, GraphedCache) else None
            self.cache.shared = SharedPrefixKV(prefixes.k, prefixes.v, prefixes.kv_owner, places, where, held=prefixes)

    def feed(self, plan: LayerPlan, *, return_argmax: bool = False) -> Tensor:
        """Feeds prefixes, then prompts; returns what `prefill.feed_prompts` does."""
        if not self.model.supports_packed_prompts(self._prefix_cache.k[0]):
            _clear_padding(self._prefix_cache)
        self._feed_prefixes(plan)
        if self.copies:
            _clear_padding(self.cache)
            _copy(self._prefix_cache, self.sharing.prefix_of_row, self.cache)
            del self._prefix_cache
        return self._feed(self.tokens, self.cache, self._before, plan, return_argmax=return_argmax)

    def _feed_prefixes(self, plan: LayerPlan) -> None:
        """Feeds prefixes without a parent, then those whose parents are in the cache, and so on."""
        for at in self.sharing.levels:
            level, parents = self._prefix_cache.slice_rows(at.start, at.stop), self.sharing.parents[at.start : at.stop]
            _copy(self._prefix_cache, parents, level)
            num_cached = self.sharing.lengths(parents)
            self._feed(self._prefix_tokens[at.start : at.stop], level, num_cached, plan, return_argmax=True)

    def _feed(
        self, tokens: Tensor, cache: KVCache, had: Sequence[int], plan: LayerPlan, *, return_argmax: bool
    ) -> Tensor:
        """Feeds the rest of prompts [B, P] whose first `had` [B] tokens are in `cache` or shared, some rows at a
        time."""
        (num_rows, columns), num_cached = tokens.shape, to_device(had, self.model.device)
        is_unpadded = self.model.supports_packed_prompts(cache.k[0])
        has_all = cache.shared is None  # shared prefixes are not in the rows' own columns
        cached = had if has_all else [0] * num_rows
        # [B] tokens to feed
        lengths = [columns - pad - n for pad, n in zip(_paddings_of(cache), cached, strict=True)]
        if is_unpadded:
            parts = list(self._parts.packed(lengths, had))
        else:
            rows = self._parts.rows_at_once(max(lengths), columns)
            parts = [slice(at, min(at + rows, num_rows)) for at in range(0, num_rows, rows)]
        made = []
        for part in parts:
            T = max(lengths[part])
            view = cache.slice_rows(part.start, part.stop)
            view.length = columns - T
            positions = torch.arange(columns - T, columns, device=self.model.device) - view.num_pad[:, None]
            if not has_all:
                positions = torch.where(positions >= 0, positions + num_cached[part, None], -1)
            elif is_unpadded:  # otherwise they are run again: a few tokens, so that all rows are fed the same number
                positions = torch.where(positions >= num_cached[part, None], positions, -1)
            fed, own = tokens[part, columns - T :], lengths[part] if is_unpadded else None
            how = {"return_argmax": return_argmax, "num_cached": had[part], "lengths": own}
            made.append(self.model(fed, positions.clamp(min=-1), view, plan, **how))
        cache.length = columns
        return torch.cat(made)


def one_copy_is_smaller(sharing: PrefixSharing, lengths: Sequence[int]) -> bool:
    """True if one copy of each prefix takes no more memory than one in each of the rows, whose prompts have these
    `lengths`, in whole KV_ALIGNMENTs. Fewer bytes are read then, too."""
    before = sharing.lengths(sharing.prefix_of_row)
    own = max(length - cached for length, cached in zip(lengths, before, strict=True))
    saved = (max(lengths) - own) // KV_ALIGNMENT * KV_ALIGNMENT
    return len(sharing.prefixes) * _aligned(max(map(len, sharing.prefixes))) <= len(lengths) * saved


def _aligned(columns: int) -> int:
    return -(-columns // KV_ALIGNMENT) * KV_ALIGNMENT


def _allocate_prefix_cache(
    model: Decoder, sharing: PrefixSharing, schedule: Schedule, graphs: CudaGraphs | None
) -> KVCache:
    columns, kv_owner = max(map(len, sharing.prefixes)), kv_owner_of_layers(schedule, model.config.kv_group_size)
    if graphs is not None:
        num_pad_host = _paddings(sharing.prefixes, _aligned(columns))
        num_pad = to_device(num_pad_host, model.device)
        return graphs.allocate_prefixes(num_pad, _aligned(columns), kv_owner, num_pad_host=num_pad_host)
    num_pad_host = _paddings(sharing.prefixes)
    return KVCache.allocate(
        model.config,
        num_pad=to_device(num_pad_host, model.device),
        num_pad_host=num_pad_host,
        capacities=[columns] * len(kv_owner),
        kv_owner=kv_owner,
        dtype=model.kv_dtype,
    )


def _copy(prefixes: KVCache, prefix_of_row: Sequence[int], cache: KVCache) -> None:
    """Copies the prefixes `prefix_of_row` [B] (-1: none) into the columns of `cache` where the rows' prompts begin."""
    columns, num_pad_host, device = prefixes.k[0].shape[2], _paddings_of(prefixes), prefixes.num_pad.device
    counts = [0 if prefix < 0 else columns - num_pad_host[prefix] for prefix in prefix_of_row]
    lengths, total = to_device(counts, device), sum(counts)
    rows = torch.arange(len(counts), device=device).repeat_interleave(lengths, output_size=total)  # [N]
    at = torch.arange(total, device=device) - (lengths.cumsum(0) - lengths)[rows]  # [N] columns of the prefixes
    source = to_device(prefix_of_row, device)[rows]
    first, to = prefixes.num_pad[source] + at, cache.num_pad[rows] + at
    for owner in set(cache.kv_owner):
        for own, held in ((cache.k[owner], prefixes.k[owner]), (cache.v[owner], prefixes.v[owner])):
            own, held = as_bytes(own), as_bytes(held)
            step = max(1, COPY_BYTES // (own.shape[1] * own.shape[3] * own.element_size()))
            for start in range(0, total, step):
                part = slice(start, min(start + step, total))
                own[rows[part], :, to[part]] = held[source[part], :, first[part]]  # [N, G, K]


def _clear_padding(cache: KVCache) -> None:
    """Sets padding columns to zero: attention with a mask reads them, though they are never fed."""
    most = max(_paddings_of(cache))
    for owner in set(cache.kv_owner):
        for memory in (cache.k[owner], cache.v[owner]):
            as_bytes(memory)[:, :, :most] = 0


def _paddings(lines: Sequence[Sequence[int]], columns: int | None = None) -> list[int]:
    """[B] columns of left padding of each line, to `columns` or the longest."""
    columns = columns or max(map(len, lines))
    return [columns - len(line) for line in lines]


def _paddings_of(cache: KVCache) -> Sequence[int]:
    assert cache.num_pad_host is not None, "the padding of shared prompts is known on the host"
    return cache.num_pad_host


def _padded(model: Decoder, lines: Sequence[Sequence[int]], columns: int | None = None) -> Tensor:
    """The lines left-padded to `columns` or the longest: [B, T] int64."""
    filler = model.config.filler_token_id
    padded = [[filler] * pad + list(line) for pad, line in zip(_paddings(lines, columns), lines, strict=True)]
    return to_device(padded, model.device)
