"""A continuous batch: rows of different ages decode in one step, and may join and leave at any step.

A row's depth follows from its own decode step. Rows are ordered by that step, the furthest first. Since layer sets are
nested over the steps, the rows that run a layer are the last ones, so layer `l` runs on a contiguous slice `h[a_l:]` of
the batch and of its cache. A row's tokens are those that it would have alone or in a static batch.

New rows are appended; ended rows at either end are dropped at once, and those in between once there are enough of them
to be worth moving the others. Feed-forward blocks decided per row (FFN-SkipLLM `row`) and fixed batch shapes are not
supported here; static batches have both.

The host never waits for the step that it has just launched: on a GPU it reads tokens one step late (`async_output`),
while the next step runs. Until then a row that has ended generates one more token, which is discarded. The number of
tokens that a row may generate is known in advance, so no row is fed too many or writes past its memory.

B rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.async_output import AsyncOutput
from skipdecode.engine.logits_processor import LogitsProcessor
from skipdecode.engine.logprobs import LogprobRecorder, assign
from skipdecode.engine.prefill import allocate_cache, feed_prompts, pad_prompts, rounded_columns, shared_prompts
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row, refuse_too_long
from skipdecode.engine.static_batch import MAX_PENDING
from skipdecode.kv.slot_cache import SlotCache
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.random_numbers import row_uniforms
from skipdecode.model.sampler import argmax, cuts, parameters, pick
from skipdecode.schedules.layer_ranges import NEVER, layer_ends, ranges_by_age
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers

CARRY = 1 / 8  # ended rows between running ones stay up to this share of the batch


class _Member:
    """A row in the batch: the step at which it joined, and its random numbers."""

    def __init__(self, row: Row, joined_at: int) -> None:
        self.row, self.joined_at = row, joined_at
        sampling = row.request.sampling
        self.is_greedy = sampling.temperature == 0
        self.uniforms = (
            [0.0] if self.is_greedy else row_uniforms(sampling.seed, row.request.id, sampling.max_new_tokens).tolist()
        )

    def uniform(self, k: int) -> float:
        return self.uniforms[min(k, len(self.uniforms) - 1)]  # only ended rows get that far

    def uniforms_from(self, k: int, count: int) -> list[float]:
        """The numbers for tokens k to k + count - 1; 0 beyond the row's limit."""
        own = self.uniforms[k : k + count]
        return own + [0.0] * (count - len(own))

    def is_fed(self, num_steps: int) -> bool:
        """True if the newest token is to be fed, which the last one that the row may generate is not, read or not."""
        return self.row.is_running and num_steps - self.joined_at + 1 < self.row.request.sampling.max_new_tokens


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
        is_closed: bool = False,
    ) -> None:
        """`max_pending`: outputs of steps or prompts that the host may leave unread; None for the device's default.
        `is_closed`: all rows join at once."""
        check_continuous(schedule)
        self.model, self.schedule = model, schedule
        self._decode_text = decode_text
        self._attn_ends, self._ffn_ends = layer_ends(schedule, model.config.max_position_embeddings)
        self._swiftkv_from = schedule.step(0).swiftkv_from
        kv_owner = kv_owner_of_layers(schedule, model.config.kv_group_size)
        # with SwiftKV a layer's K/V are written for rows that do not run it
        ends = self._attn_ends if self._swiftkv_from is None else [NEVER] * len(kv_owner)
        self._cache = SlotCache(
            model.config, kv_owner, ends, dtype=model.dtype, device=model.device, is_closed=is_closed
        )
        self._is_closed = is_closed
        self._members: list[_Member] = []
        self._rows: list[Row] = []  # includes rows whose last tokens are still pending, which are no longer members
        self._newest = torch.empty(0, dtype=torch.int64, device=model.device)
        self._num_steps = 0
        self._params: tuple[Tensor, Tensor, Tensor] | None = None
        self._logprobs = LogprobRecorder([], model.device)
        self._output: AsyncOutput[tuple[list[_Member], list[Row]]] = AsyncOutput(
            model.device
        )  # with the members, and the rows that want log-probabilities
        self._max_pending = MAX_PENDING[model.device.type] if max_pending is None else max_pending
        self._process = LogitsProcessor(model.config.eos_token_ids)
        self._is_processed = False  # whether logits of any member are processed
        self.row_steps = 0
        """Rows in the batch, summed over steps, including ended ones."""

    @property
    def rows(self) -> list[Row]:
        return [row for row in self._rows if row.is_running]

    @property
    def is_done(self) -> bool:
        return not self.rows

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def bytes_with(self, num_rows: int, prompt: int, limit: int) -> int:
        """Bytes held while `num_rows` rows of up to `prompt` tokens and `limit` new ones join
        (`SlotCache.bytes_with`)."""
        return self._cache.bytes_with(num_rows, prompt, limit, prompt_columns=rounded_columns(prompt))

    @torch.inference_mode()
    def join(self, requests: Sequence[Request], sharing: PrefixSharing | None = None) -> list[Row]:
        """Feeds the prompts and generates y_0 of each; returns the rows in the order of the requests. If output is read
        late, rows have y_0 after the next step. `sharing`: prefixes that are run once and copied to every row.

        If this raises, the batch is unchanged.
        """
        refuse_too_long(requests, self.model.config.max_position_embeddings)
        rows = [Row(request) for request in requests]
        members = [_Member(row, self._num_steps) for row in rows]
        params, recorder = _params(members, self.model.device), LogprobRecorder(rows, self.model.device)
        is_processed = any(request.sampling.processes_logits for request in requests)
        is_plain = params is None and not recorder.is_asked and not is_processed  # wants the most likely token alone
        made, cache = self._feed_prompts(requests, sharing, return_argmax=is_plain)
        first = made if is_plain else _choose(self._process(made, rows), members, params, self._num_steps)
        if recorder.is_asked:
            recorder.record(made, first)
        self._send(first, members, recorder)
        if self._max_pending == 0:
            self._read_output()
        stay = [at for at, member in enumerate(members) if member.is_fed(self._num_steps)]
        if cache is None and not stay:
            self._cache.fill([], [], [])  # releases the memory
        if stay:
            if cache is not None:
                self._drop_ended(carry=0.0)
            keep = to_device(stay, self.model.device)
            newest = torch.cat([self._newest, first[keep]])
            together = [*self._members, *(members[at] for at in stay)]
            params = _params(together, self.model.device)
            if cache is None:
                self._cache.fill(stay, *_lengths(requests))
            else:
                self._cache.add(cache, keep, *_lengths([requests[at] for at in stay]))
            self._members, self._newest, self._params = together, newest, params
            self._changed()
        self._rows = self.rows + rows
        return rows

    def _feed_prompts(
        self, requests: Sequence[Request], sharing: PrefixSharing | None, *, return_argmax: bool
    ) -> tuple[Tensor, KVCache | None]:
        """What `feed_prompts` returns, and the cache with the prompts; None if they are in the batch's own cache."""
        model, plan = self.model, self.schedule.prefill()
        if sharing is not None:
            allocate = partial(allocate_cache, model, schedule=self.schedule, num_new=1)
            shared = shared_prompts(model, requests, self.schedule, sharing, allocate, copies=True)
            return shared.feed(plan, return_argmax=return_argmax), shared.cache
        longest = max(len(r.prompt_tokens) for r in requests)
        tokens, num_pad, num_pad_host = pad_prompts(model, requests, rounded_columns(longest), None)
        if self._is_closed and model.supports_packed_prompts(self._cache.memory_of(0)[0]):
            assert not self._members, "all rows of a closed batch join at once"
            cache = self._cache.open(*_lengths(requests))
            return feed_prompts(model, tokens, cache, plan, num_pad=num_pad, return_argmax=return_argmax), None
        cache = allocate_cache(model, num_pad, tokens.shape[1], self.schedule, 1, num_pad_host=num_pad_host)
        return feed_prompts(model, tokens, cache, plan, return_argmax=return_argmax), cache

    @torch.inference_mode()
    def step(self) -> None:
        """Feeds the newest token of every row and generates the next one; reads output that is due."""
        while self._is_processed and self._output.num_pending:  # the next logits depend on the newest tokens
            self._read_output()
        self._drop_ended(carry=CARRY)
        if self._members:
            self._feed_newest()
        is_last = not any(
            member.is_fed(self._num_steps) for member in self._members
        )  # no step will overlap with the copy
        while self._output.num_pending > (0 if is_last else self._max_pending):
            self._read_output()

    def _feed_newest(self) -> None:
        members = self._members
        ages = [self._num_steps - member.joined_at for member in members]  # k of each row, falling
        positions = [p + k if m.is_fed(self._num_steps) else 0
                     for p, k, m in zip(self._cache.prompts, ages, members, strict=True)]  # fmt: skip
        self._cache.begin(positions)
        embedded = self.model.embed(self._newest[:, None], self._cache.columns_at(0, len(members))[:, None])
        ranges = ranges_by_age(ages, self._attn_ends, self._ffn_ends, swiftkv_from=self._swiftkv_from)
        h, _ = run_layers(self.model, embedded, self._cache.view(self.model.rotary_table), ranges)
        self._num_steps += 1
        self.row_steps += len(members)
        if self._params is None and not self._logprobs.is_asked and not self._is_processed:
            self._newest = self.model.argmax(h[:, -1])
        else:
            logits = self.model.head(h[:, -1])
            processed = self._process(logits, [member.row for member in members])
            self._newest = _choose(processed, members, self._params, self._num_steps)
            self._logprobs.record(logits, self._newest)
        self._send(self._newest, members, self._logprobs)

    def _send(self, newest: Tensor, members: Sequence[_Member], recorder: LogprobRecorder) -> None:
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

    def _drop_ended(self, carry: float) -> None:
        """Drops rows that are not fed any more: at both ends always, in between once they are more than `carry` of the
        batch."""
        live = [at for at, member in enumerate(self._members) if member.is_fed(self._num_steps)]
        num_rows = len(self._members)
        if len(live) == num_rows:
            return
        if not live:
            keep: list[int] = []
        elif len(live) < (1 - carry) * (live[-1] + 1 - live[0]):
            keep = live
        else:
            keep = list(range(live[0], live[-1] + 1))
        if len(keep) == num_rows:
            return
        newest = self._newest[to_device(keep, self.model.device, torch.int64)]
        together = [self._members[at] for at in keep]
        params = _params(together, self.model.device)
        self._cache.keep(keep)
        self._members, self._newest, self._params = together, newest, params
        self._changed()

    def _changed(self) -> None:
        """Called after rows have joined or left."""
        rows = [member.row for member in self._members]
        self._logprobs.keep(rows)
        self._process.keep(set(rows))
        self._is_processed = any(row.request.sampling.processes_logits for row in rows)


def check_continuous(schedule: Schedule) -> None:
    """Raises ValueError if rows of different ages cannot share a step under `schedule`."""
    if not schedule.is_static:
        raise ValueError(
            "decode.ffn_skip.mode: the continuous scheduler runs modes calibrated and fixed, where the blocks left out "
            "are known in advance; use one of them, or scheduler cohort"
        )


def _lengths(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """The numbers of prompt tokens, and of new tokens at most."""
    return [len(r.prompt_tokens) for r in requests], [r.sampling.max_new_tokens for r in requests]


def _params(members: Sequence[_Member], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Temperature, top_k and top_p [B, 1] of the rows; None if all are greedy."""
    if all(member.is_greedy for member in members):
        return None
    return parameters([member.row.request.sampling for member in members], device)


def _choose(
    logits: Tensor, members: Sequence[_Member], params: tuple[Tensor, Tensor, Tensor] | None, num_steps: int
) -> Tensor:
    """The next token of every row from logits [B, V]: y_k, where k is the number of steps since it joined."""
    if params is None:
        return argmax(logits)
    uniforms = [[member.uniform(num_steps - member.joined_at)] for member in members]
    uniform = to_device(uniforms, logits.device, torch.float32)
    return pick(logits, *params, uniform, cuts=any(cuts(member.row.request.sampling) for member in members))
