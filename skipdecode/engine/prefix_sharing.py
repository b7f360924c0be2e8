"""Prefixes that prompts of a batch share are run once: which they are, where their K/V are, how prompts are fed.
fed.

A shared prefix begins two or more prompts of the batch, or other prefixes. Where attention reads it in place, its keys
and values are stored once, beside the rows' own (`skipdecode.kv.static_cache`); elsewhere (torch's operators, CUDA
graphs, continuous batches) they are copied into every row's cache, and decode steps are those of any batch. The caller
chooses which prompts share what (`actors.batching.shared_prefixes`).

The last token of a prompt is never shared, since the first new token comes from it. Prefixes have an even number of
tokens: kernels add up bfloat16 values of two columns at a time, which keeps the order of an undivided prompt.

B rows, R prefixes, P columns of whole prompts, T of those fed, S of prefixes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.cost.roofline import SharedShape
from skipdecode.kv.static_cache import KVCache, SharedPrefixKV
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.plan import LayerPlan, Schedule, kv_sharing_map

PREFIX_STEP = 2  # tokens of a head come in these


class Allocate(Protocol):
    """Memory of the rows."""

    def __call__(self, num_pad: Tensor, columns: int, *, paddings: Sequence[int]) -> KVCache:
        """A cache for rows with that padding [B], which is given twice, and so many columns of prompts."""


@dataclass(frozen=True)
class PrefixSharing:
    """The heads of a batch, and who begins with them. Each comes behind the one that it begins with itself."""

    heads: tuple[tuple[int, ...], ...]
    """Their tokens."""
    parents: tuple[int, ...]
    """The head that a head begins with; -1: none."""
    of_row: tuple[int, ...]
    """The head that a row begins with; -1: none."""

    def lengths(self, heads: Sequence[int]) -> list[int]:
        """Tokens of each of these heads; 0 for -1."""
        return [0 if head < 0 else len(self.heads[head]) for head in heads]

    @property
    def tokens_saved(self) -> int:
        """Of the rows' prompts, those that are not fed."""
        own = sum(len(head) - length for head, length in zip(self.heads, self.lengths(self.parents), strict=True))
        return sum(self.lengths(self.of_row)) - own

    @property
    def levels(self) -> list[range]:
        """The heads that are run in one pass: those whose parents were run before."""
        found, start = [], 0
        while start < len(self.parents):
            end = start + 1
            while end < len(self.parents) and self.parents[end] < start:
                end += 1
            found.append(range(start, end))
            start = end
        return found

    def shape(self, prompts: Sequence[Sequence[int]], *, copies: bool) -> SharedShape:
        """For the cost model. `copies`: every row reads its own."""

        def one_pass(wholes: Sequence[int], heads: Sequence[int]) -> tuple[int, int, int]:
            count, seen = len(wholes), sum(wholes)
            return count, -(-(seen - sum(self.lengths(heads))) // count), -(-seen // count)

        lengths = [len(head) for head in self.heads]
        passes = [one_pass([lengths[at] for at in level], [self.parents[at] for at in level]) for level in self.levels]
        passes.append(one_pass([len(prompt) for prompt in prompts], self.of_row))
        used = set(self.of_row)
        once = sum(self.lengths(self.of_row)) - sum(lengths[head] for head in used if head >= 0)
        return SharedShape(tuple(passes), 0 if copies else once)


def share_prefixes(prompts: Sequence[Sequence[int]], marks: Sequence[Sequence[int]]) -> PrefixSharing | None:
    """The heads of these prompts that end at the `marks` of each (rising numbers of tokens), as far as two begin with
    them; None where there are none."""
    users: dict[tuple[int, ...], set[tuple[int, ...] | int]] = {}
    parent: dict[tuple[int, ...], tuple[int, ...]] = {}
    of_row: list[tuple[int, ...]] = []
    for row, (prompt, ends) in enumerate(zip(prompts, marks, strict=True)):
        above: tuple[int, ...] = ()
        for end in ends:
            assert len(above) < end < len(prompt), (ends, len(prompt))
            assert end % PREFIX_STEP == 0, end
            head = tuple(prompt[:end])
            users.setdefault(head, set())
            users.setdefault(above, set()).add(head)
            parent[head] = above
            above = head
        users.setdefault(above, set()).add(row)
        of_row.append(above)
    for head in sorted(parent, key=len, reverse=True):  # whom one alone begins with is no gain
        if len(users[head]) == 1:
            (user,) = users[head]
            if isinstance(user, int):
                of_row[user] = parent[head]
            else:
                parent[user] = parent[head]
            users[parent[head]].remove(head)
            users[parent[head]].add(user)
            del users[head], parent[head]
    if not parent:
        return None
    depth: dict[tuple[int, ...], int] = {(): -1}
    for head in sorted(parent, key=len):
        depth[head] = depth[parent[head]] + 1
    heads = sorted(parent, key=lambda head: depth[head])
    place = {head: at for at, head in enumerate(heads)} | {(): -1}
    return PrefixSharing(tuple(heads), tuple(place[parent[h]] for h in heads), tuple(place[h] for h in of_row))


class SharedPrompts:
    """Prompts of a batch, some of whose heads are fed once."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        schedule: Schedule,
        sharing: PrefixSharing,
        allocate: Allocate,
        *,
        rows_at_once: Callable[[int, int], int],
        copies: bool = False,
    ) -> None:
        """`allocate`: the rows' own memory. `rows_at_once`: how many rows are fed together, of so many columns fed and
        so many seen. `copies`: of heads to all rows, whatever kernels there are."""
        self.model, self.sharing, self._rows_at_once = model, sharing, rows_at_once
        self._heads = _cache_of_heads(model, sharing, schedule)
        self._head_tokens = _padded(model, sharing.heads)
        self._before = sharing.lengths(sharing.of_row)
        self.copies = copies or not (model.supports_shared_prefix and model.supports_packed_prompts(self._heads.k[0]))
        own = prompts if self.copies else [p[n:] for p, n in zip(prompts, self._before, strict=True)]
        self.tokens = _padded(model, own)  # [B, P], or the rows' own ends
        paddings = _paddings(own)
        self.cache = allocate(to_device(paddings, model.device), self.tokens.shape[1], paddings=paddings)
        if not self.copies:
            lengths = to_device([len(head) for head in sharing.heads], model.device)
            of_row = to_device(sharing.of_row, model.device)
            self.cache.shared = SharedPrefixKV(self._heads.k, self._heads.v, self._heads.sharing_map, lengths, of_row)

    def feed(self, plan: LayerPlan, *, return_argmax: bool = False) -> Tensor:
        """As `prompts.feed_prompts`, heads first."""
        if not self.model.supports_packed_prompts(self._heads.k[0]):
            _clear_padding(self._heads)
        self._feed_heads(plan)
        if self.copies:
            _clear_padding(self.cache)
            _copy(self._heads, self.sharing.of_row, self.cache)
            del self._heads
        return self._feed(self.tokens, self.cache, self._before, plan, return_argmax=return_argmax)

    def _feed_heads(self, plan: LayerPlan) -> None:
        """Those without a parent, then those whose parents are there, and so on."""
        for at in self.sharing.levels:
            level, parents = self._heads.view(at.start, at.stop), self.sharing.parents[at.start : at.stop]
            _copy(self._heads, parents, level)
            before = self.sharing.lengths(parents)
            self._feed(self._head_tokens[at.start : at.stop], level, before, plan, return_argmax=True)

    def _feed(
        self, tokens: Tensor, cache: KVCache, had: Sequence[int], plan: LayerPlan, *, return_argmax: bool
    ) -> Tensor:
        """What `cache` lacks of prompts [B, P] of which it has `had` [B] tokens each, or shares them; some rows at a
        time."""
        (whole, columns), before = tokens.shape, to_device(had, self.model.device)
        is_unpadded = self.model.supports_packed_prompts(cache.k[0])
        has_all = cache.shared is None  # what is shared is in no column
        in_place = had if has_all else [0] * whole
        lengths = [columns - pad - n for pad, n in zip(_known(cache), in_place, strict=True)]  # [B] tokens to feed
        rows = self._rows_at_once(max(lengths), columns)
        made = []
        for at in range(0, whole, rows):
            part = slice(at, min(at + rows, whole))
            T = max(lengths[part])
            view = cache.view(part.start, part.stop)
            view.length = columns - T
            positions = torch.arange(columns - T, columns, device=self.model.device) - view.num_pad[:, None]
            if not has_all:
                positions = torch.where(positions >= 0, positions + before[part, None], -1)
            elif is_unpadded:  # others run them again: a few tokens, and all rows are fed as many
                positions = torch.where(positions >= before[part, None], positions, -1)
            fed, ends = tokens[part, columns - T :], before[part].contiguous()
            made.append(self.model(fed, positions.clamp(min=-1), view, plan, return_argmax=return_argmax, before=ends))
        cache.length = columns
        return torch.cat(made)


def _cache_of_heads(model: Decoder, sharing: PrefixSharing, schedule: Schedule) -> KVCache:
    columns, sharing_map = max(map(len, sharing.heads)), kv_sharing_map(schedule, model.config.kv_group_size)
    paddings = _paddings(sharing.heads)
    return KVCache.allocate(
        model.config,
        num_pad=to_device(paddings, model.device),
        paddings=paddings,
        capacities=[columns] * len(sharing_map),
        sharing_map=sharing_map,
        dtype=model.dtype,
    )


def _copy(heads: KVCache, of_row: Sequence[int], cache: KVCache) -> None:
    """The heads `of_row` [B] (-1: none) into the columns of `cache` in which the rows' prompts begin."""
    columns, paddings, device = heads.k[0].shape[2], _known(heads), heads.num_pad.device
    counts = [0 if head < 0 else columns - paddings[head] for head in of_row]
    lengths, total = to_device(counts, device), sum(counts)
    rows = torch.arange(len(counts), device=device).repeat_interleave(lengths, output_size=total)  # [N]
    at = torch.arange(total, device=device) - (lengths.cumsum(0) - lengths)[rows]  # [N] columns of the heads
    source = to_device(of_row, device)[rows]
    first, to = heads.num_pad[source] + at, cache.num_pad[rows] + at
    for owner in set(cache.sharing_map):
        for own, held in ((cache.k[owner], heads.k[owner]), (cache.v[owner], heads.v[owner])):
            own[rows, :, to] = held[source, :, first]  # [N, G, K]


def _clear_padding(cache: KVCache) -> None:
    """Zeros where attention behind a mask reads what was never fed."""
    most = max(_known(cache))
    for owner in set(cache.sharing_map):
        for memory in (cache.k[owner], cache.v[owner]):
            memory[:, :, :most] = 0


def _paddings(lines: Sequence[Sequence[int]]) -> list[int]:
    """[B] columns of left padding of each."""
    columns = max(map(len, lines))
    return [columns - len(line) for line in lines]


def _known(cache: KVCache) -> Sequence[int]:
    assert cache.paddings is not None, "whoever shares prompts knows their lengths"
    return cache.paddings


def _padded(model: Decoder, lines: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] int64: left-padded."""
    columns, filler = max(map(len, lines)), model.config.filler_token_id
    padded = [[filler] * (columns - len(line)) + list(line) for line in lines]
    return to_device(padded, model.device)
