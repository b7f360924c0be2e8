"""A continuous batch: rows of different ages decode in one step, and may join and leave at any step.

A row has a slot of the cache for as long as it lives, and a decode step of its own, from which its depth follows. Rows
are ordered by that step, the furthest first. Since layer sets are nested over the steps, the rows that run a layer are
the last ones, so layer `l` runs on a contiguous slice `h[a_l:]` of the batch. A row's tokens are those that it would
have alone or in a static batch.

Newcomers come last; a row that ends leaves the batch at once, and nothing is moved. Feed-forward blocks decided per row
(FFN-SkipLLM `row`) and fixed batch shapes are not supported here; static batches have both. Who joins when is the
caller's choice (`skipdecode.engine.generate`, `actors.serving`).

The host never waits for the step that it has just launched: on a GPU it reads tokens one step late (`async_output`),
while the next step runs. Until then a row that has ended generates one more token, which is discarded. The number of
tokens that a row may generate is known in advance, so no row is fed too many or writes past its memory.

B rows, N tokens, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skipdecode.backends.backend import prefix_groups
from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.async_output import AsyncOutput
from skipdecode.engine.logits_processor import LogitsProcessor
from skipdecode.engine.logprobs import LogprobRecorder, assign
from skipdecode.engine.prefill import (
    allocate_cache,
    feed_in_place,
    feed_prompts,
    pad_prompts,
    rounded_columns,
    shared_prompts,
)
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row, refuse_too_long
from skipdecode.engine.results import BatchStats
from skipdecode.engine.static_batch import MAX_PENDING
from skipdecode.engine.stored_prefixes import StoredPrefix, StoredPrefixes
from skipdecode.kv.slot_cache import Slot, SlotCache, TokensView, token_index
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.random_numbers import row_uniforms
from skipdecode.model.sampler import argmax, cuts, parameters, pick
from skipdecode.schedules.layer_ranges import NEVER, LayerRanges, layer_ends, ranges_by_age
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers


class Member:
    """A row in the batch: its place, the step at which it joined, and its random numbers."""

    slot: Slot
    """Its columns, those of a shared prefix excluded."""
    prefix: StoredPrefix | None = None
    """What lies before them."""

    def __init__(self, row: Row, joined_at: int) -> None:
        """`joined_at`: the steps of the batch before; fewer once drafts have taken the row further than one step."""
        self.row, self.joined_at = row, joined_at
        sampling = row.request.sampling
        self.is_greedy = sampling.temperature == 0
        self.is_processed, self.has_changes = sampling.processes_logits, sampling.changes_logits
        self.uniforms = (
            [0.0] if self.is_greedy else row_uniforms(sampling.seed, row.request.id, sampling.max_new_tokens).tolist()
        )

    def uniform(self, k: int) -> float:
        return self.uniforms[min(k, len(self.uniforms) - 1)]  # only ended rows get that far

    def uniforms_from(self, k: int, count: int) -> list[float]:
        """The numbers for tokens k to k + count - 1; 0 beyond the row's limit."""
        own = self.uniforms[k : k + count]
        return own + [0.0] * (count - len(own))


class ContinuousBatch:
    """Rows under one schedule: call `join` and `step` in any order. `rows` are the running ones, oldest first."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        schedule: Schedule,
        *,
        decode_text: DecodeText | None = None,
        max_pending: int | None = None,
    ) -> None:
        """`max_pending`: outputs of steps or prompts that the host may leave unread; None for the device's default."""
        check_continuous(schedule)
        self.model, self.schedule = model, schedule
        self._decode_text = decode_text
        self._attn_ends, self._ffn_ends = layer_ends(schedule, model.config.max_position_embeddings)
        self._swiftkv_from = schedule.step(0).swiftkv_from
        kv_owner = kv_owner_of_layers(schedule, model.config.kv_group_size)
        # with SwiftKV a layer's K/V are written for rows that do not run it
        ends = self._attn_ends if self._swiftkv_from is None else [NEVER] * len(kv_owner)
        self._cache = SlotCache(model.config, kv_owner, ends, dtype=model.kv_dtype, device=model.device)
        self._cache.must_be_finite = not self._feeds_in_place  # layers that are no kernels may have attention of theirs
        self._prefixes = StoredPrefixes(model, schedule)
        self._tokens_shared = 0  # prompt tokens that a row has read from a prefix
        self._members: list[Member] = []
        self._rows: list[Row] = []  # includes rows whose last tokens are still pending, which are no longer members
        self._newest = torch.empty(0, dtype=torch.int64, device=model.device)
        self._num_steps = 0
        self._view: TokensView | None = None  # of the last step, which the next one of the same rows goes on with
        self._params: tuple[Tensor, Tensor, Tensor] | None = None
        self._logprobs = LogprobRecorder([], model.device)
        self._output: AsyncOutput[tuple[list[Member], list[Row]]] = AsyncOutput(
            model.device
        )  # with the members, and the rows that want log-probabilities
        self._max_pending = MAX_PENDING[model.device.type] if max_pending is None else max_pending
        self._process = LogitsProcessor(model.config.eos_token_ids, model.config.vocab_size, model.device)
        self._is_processed = False  # whether logits of any member are processed
        self._has_changes = False  # whether that is more than a mask for any member
        self._depths = list[int]()  # layers run at step 0, 1, ..., as far as a row has come
        self.stats = BatchStats()
        """The sums over steps so far; what depends on the rows' ends is left to the caller."""

    @property
    def rows(self) -> list[Row]:
        return [row for row in self._rows if row.is_running]

    @property
    def is_done(self) -> bool:
        return not any(row.is_running for row in self._rows)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes + self._prefixes.nbytes

    @torch.inference_mode()
    def bytes_with(self, num_rows: int, prompt: int, limit: int) -> int:
        """Bytes held while `num_rows` rows of up to `prompt` tokens and `limit` new ones join: the memory of the batch
        before and after, and the cache of the prompts where these are copied."""
        held = self._cache.bytes_with([prompt] * num_rows, [limit] * num_rows) + self._prefixes.nbytes
        if self._reads_prefixes:
            return held
        return held + 2 * num_rows * rounded_columns(prompt) * len(self._attn_ends) * (
            self.model.config.kv_dim * self.model.kv_itemsize
        )

    @torch.inference_mode()
    def reserve(self, num_rows: int, requests: Sequence[Request], sharing: PrefixSharing | None = None) -> None:
        """Memory for `num_rows` rows at a time of these, in a batch that is empty, instead of memory that grows."""
        self._cache.reserve(num_rows, self._own_lengths(requests, sharing), _limits(requests))

    @torch.inference_mode()
    def join(self, requests: Sequence[Request], sharing: PrefixSharing | None = None) -> list[Row]:
        """Feeds the prompts and generates y_0 of each; returns the rows in the order of the requests. If output is read
        late, rows have y_0 after the next step. `sharing`: prefixes of the prompts that are run once.

        If this raises, the rows of the batch are unchanged.
        """
        refuse_too_long(requests, self.model.config.max_position_embeddings)
        rows = [Row(request) for request in requests]
        members = [Member(row, self._num_steps) for row in rows]
        self._drop_ended()
        params, recorder = _params(members, self.model.device), LogprobRecorder(rows, self.model.device)
        self._place(members, sharing)
        try:
            is_processed = any(request.sampling.processes_logits for request in requests)
            is_plain = params is None and not recorder.is_asked and not is_processed  # wants the likeliest token alone
            made = self._feed_prompts(members, sharing, return_argmax=is_plain)
            first = made if is_plain else _choose(self._process(made, rows), members, params, [0] * len(members))
            if recorder.is_asked:
                recorder.record(made, first)
            self._set([*self._members, *members], torch.cat([self._newest, first]))
        except BaseException:
            self._leave(members)
            raise
        self._send(first, members, recorder)
        if self._max_pending == 0:
            self._read_output()
        self._drop_ended()  # who ends with the first token
        self._rows = self.rows + rows
        return rows

    @torch.inference_mode()
    def remove(self, row: Row) -> None:
        """Cancels a row, whose slot is free at once."""
        row.cancel()
        self._drop_ended()

    def _place(self, members: Sequence[Member], sharing: PrefixSharing | None) -> None:
        """Takes slots for newcomers, and the prefixes that they share. Nothing has changed if memory runs out."""
        requests = [member.row.request for member in members]
        self._view = None  # if memory grows, rows get other slots
        for member in self._members:
            member.slot.length = self._columns_written(member)
        slots = self._cache.take(self._own_lengths(requests, sharing), _limits(requests))
        for member, slot in zip(members, slots, strict=True):
            member.slot = slot
        if sharing is None or not self._reads_prefixes:
            return
        try:
            found = self._prefixes.take(sharing)
        except BaseException:
            self._cache.release(slots)
            raise
        for member, prefix in zip(members, found, strict=True):
            member.prefix = prefix

    def _leave(self, members: Sequence[Member]) -> None:
        """Frees the slots of these rows."""
        self._cache.release([member.slot for member in members])
        self._prefixes.release([member.prefix for member in members if member.prefix is not None])

    @property
    def _feeds_in_place(self) -> bool:
        """True if prompts are fed where the rows are decoded, not copied there."""
        return self.model.supports_packed_prompts(self._cache.memory_of(0)[0])

    @property
    def _reads_prefixes(self) -> bool:
        """True if a prefix that rows share is read where it is stored once, not copied to each of them."""
        return self._feeds_in_place and self.model.supports_shared_prefix

    def _own_lengths(self, requests: Sequence[Request], sharing: PrefixSharing | None) -> list[int]:
        """The tokens of each prompt that lie in the row's own slot."""
        lengths = [len(request.prompt_tokens) for request in requests]
        if sharing is None or not self._reads_prefixes:
            return lengths
        return [n - before for n, before in zip(lengths, sharing.lengths(sharing.prefix_of_row), strict=True)]

    def _feed_prompts(self, members: Sequence[Member], sharing: PrefixSharing | None, *, return_argmax: bool) -> Tensor:
        """Fills the slots of newcomers; returns what `feed_prompts` does."""
        model, plan = self.model, self.schedule.prefill()
        requests, slots = [member.row.request for member in members], [member.slot for member in members]
        if self._feeds_in_place and (sharing is None or self._reads_prefixes):
            prefixes = [member.prefix for member in members]
            own = [request.prompt_tokens[len(request.prompt_tokens) - slot.prompt :]
                   for request, slot in zip(requests, slots, strict=True)]  # fmt: skip
            shared = None if sharing is None else self._prefixes.shared_by(prefixes)
            num_cached = [0 if prefix is None else prefix.length for prefix in prefixes]
            self._tokens_shared += sum(num_cached)
            self.stats.prefix_tokens_saved = self._tokens_shared - self._prefixes.num_fed
            return feed_in_place(model, own, self._cache, slots, plan, num_cached, shared, return_argmax=return_argmax)
        if sharing is not None:
            allocate = partial(allocate_cache, model, schedule=self.schedule, num_new=1)
            prompts = shared_prompts(model, requests, self.schedule, sharing, allocate, copies=True)
            made, cache = prompts.feed(plan, return_argmax=return_argmax), prompts.cache
            self.stats.prefix_tokens_saved += sharing.tokens_saved
        else:
            made, cache = self._feed_beside(requests, return_argmax=return_argmax)
        if not self._feeds_in_place:
            self.stats.prompt_padding += sum(cache.num_pad_host or ())
        self._cache.copy(cache, slots)
        return made

    def _feed_beside(self, requests: Sequence[Request], *, return_argmax: bool) -> tuple[Tensor, KVCache]:
        """Feeds padded prompts into a cache of their own."""
        model = self.model
        longest = max(len(r.prompt_tokens) for r in requests)
        tokens, num_pad, num_pad_host = pad_prompts(model, requests, rounded_columns(longest), None)
        cache = allocate_cache(model, num_pad, tokens.shape[1], self.schedule, 1, num_pad_host=num_pad_host)
        return feed_prompts(model, tokens, cache, self.schedule.prefill(), return_argmax=return_argmax), cache

    @torch.inference_mode()
    def step(self) -> None:
        """Feeds the newest token of every row and generates the next one; reads output that is due."""
        while self._is_processed and self._output.num_pending:  # the next logits depend on the newest tokens
            self._read_output()
        self._drop_ended()
        if self._members:
            self._feed_newest()
        is_last = not any(map(self._is_fed, self._members))  # no step will overlap with the copy
        while self._output.num_pending > (0 if is_last else self._max_pending):
            self._read_output()

    def _feed_newest(self) -> None:
        members = self._members
        steps = [self._step_of(member) for member in members]  # falling, unless all run all layers
        view, self._view = self._view, None  # a step that fails must not be continued
        if view is None:
            view = self._view_of(members, [self._columns_written(member) for member in members])
        else:
            view.advance()
        ranges = ranges_by_age(steps, self._attn_ends, self._ffn_ends, swiftkv_from=self._swiftkv_from)
        h = self._feed(self._newest, view, ranges)
        rows = [member.row for member in members]
        if self._wants_argmax:
            newest = self.model.argmax(h[:, -1], self._process.allowed(rows))
        else:
            logits = self.model.head(h[:, -1])
            processed = self._process(logits, rows)
            newest = _choose(processed, members, self._params, [k + 1 for k in steps])
            self._logprobs.record(logits, newest)
        self._newest, self._view, self._num_steps = newest, view, self._num_steps + 1
        self._count(steps)
        self._send(newest, members, self._logprobs)

    def _feed(self, tokens: Tensor, view: TokensView, ranges: LayerRanges) -> Tensor:
        """The states [N, 1, D] of tokens [N] after their layers."""
        return run_layers(self.model, self.model.embed(tokens[:, None], view.positions), view, ranges)[0]

    def _view_of(
        self, members: Sequence[Member], columns: Sequence[int], queries: Sequence[tuple[int, int]] | None = None
    ) -> TokensView:
        """The view of a pass over one token of each of `members`, which write these columns of their slots. A row may
        be there several times, side by side; `queries` as in `token_index`."""
        prefixes = groups = None
        if any(member.prefix is not None for member in members):
            prefixes = [self._prefixes.place(member.prefix) for member in members]
            if (most_rows := self._cache.backend.prefix_group_rows) is not None:
                groups = to_device(prefix_groups(prefixes, most_rows), self.model.device)
        index = token_index(columns, [member.slot.index for member in members], prefixes, queries=queries)
        most = 1 if queries is None else max(count for _, count in queries)
        return TokensView(
            self._cache,
            to_device(index, self.model.device),
            self.model.rotary_tables,
            most=most,
            num_columns=max(columns) + 1,
            prefixes=None if prefixes is None else self._prefixes.cache,
            groups=groups,
        )

    def _step_of(self, member: Member) -> int:
        """k of the decode step that feeds the row's newest token, read or not."""
        return self._num_steps - member.joined_at

    def _is_fed(self, member: Member) -> bool:
        """True if the newest token is to be fed, which the last one that the row may generate is not, read or not."""
        return member.row.is_running and self._step_of(member) + 1 < member.row.request.sampling.max_new_tokens

    def _columns_written(self, member: Member) -> int:
        return member.slot.prompt + self._step_of(member)

    def _count(self, steps: Sequence[int]) -> None:
        """Counts a step of rows at these decode steps."""
        while len(self._depths) <= max(steps):
            self._depths.append(self.schedule.step(len(self._depths)).num_layers_run)
        self.stats.decode_steps += 1
        self.stats.row_steps += len(steps)
        self.stats.layer_row_steps += sum(self._depths[k] for k in steps)
        self.stats.batch_rows.append(len(steps))

    def _send(self, newest: Tensor, members: Sequence[Member], recorder: LogprobRecorder) -> None:
        """Starts copying the tokens [B] of `members` and recorded log-probabilities to the host."""
        asking, seen = recorder.take()
        self._output.send([newest, *seen], (list(members), asking))

    def _read_output(self) -> None:
        """Gives the oldest pending tokens to their rows."""
        (newest, *seen), (members, asking) = self._output.take()
        assign(asking, seen)
        for member, token in zip(members, newest.tolist(), strict=True):
            if member.row.is_running:
                member.row.take([token], self.model.config.eos_token_ids, self._decode_text)

    def _drop_ended(self) -> None:
        """Drops rows that are not fed any more."""
        keep = [at for at, member in enumerate(self._members) if self._is_fed(member)]
        if len(keep) == len(self._members):
            return
        gone = [member for member in self._members if not self._is_fed(member)]
        newest = self._newest[to_device(keep, self.model.device, torch.int64)]
        self._set([self._members[at] for at in keep], newest)
        self._leave(gone)

    def _set(self, members: list[Member], newest: Tensor) -> None:
        """Makes these the rows of the batch, with their newest tokens [B]."""
        params = _params(members, self.model.device)
        self._members, self._newest, self._params, self._view = members, newest, params, None
        self._changed()

    def _changed(self) -> None:
        """Called after rows have joined or left."""
        rows = [member.row for member in self._members]
        self._logprobs.keep(rows)
        self._process.keep(set(rows))
        self._is_processed = any(member.is_processed for member in self._members)
        self._has_changes = any(member.has_changes for member in self._members)

    @property
    def _wants_argmax(self) -> bool:
        """True if of the logits only the largest is wanted, of the tokens that a row may have."""
        return self._params is None and not self._logprobs.is_asked and not self._has_changes


def check_continuous(schedule: Schedule) -> None:
    """Raises ValueError if rows of different ages cannot share a step under `schedule`."""
    if not schedule.is_static:
        raise ValueError(
            "decode.ffn_skip.mode: the continuous scheduler runs modes calibrated and fixed, where the blocks left out "
            "are known in advance; use one of them, or scheduler cohort"
        )


def _limits(requests: Sequence[Request]) -> list[int]:
    """The most new tokens of each."""
    return [request.sampling.max_new_tokens for request in requests]


def _params(members: Sequence[Member], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Temperature, top_k and top_p [B, 1] of the rows; None if all are greedy."""
    if all(member.is_greedy for member in members):
        return None
    return parameters([member.row.request.sampling for member in members], device)


def _choose(
    logits: Tensor, members: Sequence[Member], params: tuple[Tensor, Tensor, Tensor] | None, numbers: Sequence[int]
) -> Tensor:
    """The next token of every row from logits [B, V]: y_k, where k is the row's of `numbers`."""
    if params is None:
        return argmax(logits)
    uniforms = [[member.uniform(k)] for member, k in zip(members, numbers, strict=True)]
    uniform = to_device(uniforms, logits.device, torch.float32)
    return pick(logits, *params, uniform, cuts=any(cuts(member.row.request.sampling) for member in members))
