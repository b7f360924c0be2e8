"""A batch at full depth whose rows advance by different numbers of tokens: a pass feeds tokens, each with a cache slot
and a position of its own.

A row is fed its newest token, and drafts after it where there are any (`skipdecode.speculative.speculative_batch`).
Here are the passes themselves and the plain step, which does as little beside the model as a batch that never drafts:
what drafts gain is measured against it.

B rows, N tokens of a pass, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.logprobs import listed, top_logprobs
from skipdecode.engine.request import DecodeText, Row
from skipdecode.engine.results import LosslessStats, TokenLogprobs
from skipdecode.kv.slot_cache import TokensView
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.sampler import argmax, cuts, pick
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.schedule import FullDepth

# Ended rows keep their slots up to this share of the batch. Where the kernels take slots, an ended row costs nothing,
# and copying the others would cost more than to carry it.
CARRY_ENDED = {True: 7 / 8, False: 1 / 2}
FEW = 64  # tokens that are chosen at a time at least: each time reads the head
AHEAD = 32  # random numbers of a row that plain steps look up at a time

Params: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Temperature, top_k, top_p [N, 1]."""


class Draws(NamedTuple):
    """Sampling parameters of N rows, and the random numbers of their next n tokens."""

    params: Params
    uniforms: Tensor
    """[N, n]."""

    def of(self, rows: slice) -> "Draws":
        temperature, top_k, top_p = self.params
        return Draws((temperature[rows], top_k[rows], top_p[rows]), self.uniforms[rows])

    def number(self, i: int) -> "Draws":
        """For token i of each row."""
        return Draws(self.params, self.uniforms[:, i : i + 1])


@dataclass
class _PlainStep:
    """The inputs of a plain step, which the next one of the same rows goes on with."""

    running: list[int]
    """The slots of its rows."""
    newest: Tensor
    """Their newest tokens [R]."""
    view: TokensView
    ahead: Draws | None
    """For AHEAD tokens of each row; None: all are greedy."""
    number: int = 0
    """Which of these is next."""

    @property
    def draws(self) -> Draws | None:
        return None if self.ahead is None else self.ahead.number(self.number)


class RaggedBatch(ContinuousBatch):
    """Rows of any age, of which each pass takes those that have not ended."""

    def __init__(self, model: Decoder, schedule: FullDepth, decode_text: DecodeText | None, *, is_closed: bool) -> None:
        # max_pending: the next round depends on what this one makes
        super().__init__(model, schedule, decode_text=decode_text, max_pending=0, is_closed=is_closed)
        self._full = LayerRanges.of_plan(schedule.full_plan)
        self._depth = schedule.full_plan.num_layers_run
        self._device = model.device
        self._carry = CARRY_ENDED[backend_on(self._device).supports_multi_token_rows]
        self._has_cuts = False
        self._repeated_step: _PlainStep | None = None  # the last round, where it was a plain step
        self._num_running: int | None = None  # when ended rows were last dropped
        self.stats = LosslessStats()

    def _running(self) -> list[int]:
        """The slots of the rows that have not ended; drops ended rows first, if there are enough of them."""
        running = [at for at, member in enumerate(self._members) if member.row.finish_reason is None]
        if len(running) == self._num_running:
            return running
        self._drop_ended(carry=self._carry)
        running = [at for at, member in enumerate(self._members) if member.row.finish_reason is None]
        self._num_running = len(running)
        return running

    def _drop_ended(self, carry: float) -> None:
        prompts, members = self._cache.prompts, self._members
        self._cache.reach([p + len(m.row.tokens) - 1 for p, m in zip(prompts, members, strict=True)])
        super()._drop_ended(carry)

    def _changed(self) -> None:
        self._num_running, self._repeated_step = None, None
        self._has_cuts = any(cuts(member.row.request.sampling) for member in self._members)
        super()._changed()

    def _view(self, slots: Tensor, positions: Tensor, most: int = 1) -> TokensView:
        """The view of a pass over tokens [N]; `most` as in `TokensView`."""
        return TokensView(self._cache, slots, positions, self.model.rotary_table, most)

    def _feed(self, tokens: Tensor, view: TokensView, ranges: LayerRanges) -> Tensor:
        """The states [N, 1, D] of tokens [N] after their layers."""
        return run_layers(self.model, self.model.embed(tokens[:, None], view.positions), view, ranges)[0]

    def _draws(self, slots: Sequence[int], steps: Sequence[int], count: int = 1) -> Draws | None:
        """For `count` tokens from y_k on, k = `steps[i]`, of the row in `slots[i]`; None if all rows are greedy."""
        members, params = self._members, self._params_at(slots)
        if params is None:
            return None
        numbers = [members[slot].uniforms_from(k, count) for slot, k in zip(slots, steps, strict=True)]
        return Draws(params, to_device(np.array(numbers, dtype=np.float32), self._device))

    def _params_at(self, slots: Sequence[int]) -> Params | None:
        params = self._params
        if params is None or list(slots) == list(range(len(self._members))):
            return params
        at = to_device(slots, self._device)
        return params[0][at], params[1][at], params[2][at]

    def _drawn(self, logits: Tensor, draws: Draws) -> Tensor:
        """Samples one token of each row: [N, V] -> [N]."""
        return pick(logits, *draws.params, draws.uniforms, cuts=self._has_cuts)

    def _choose_at(
        self, h: Tensor, slots: Sequence[int], draws: Draws | None, drafted: Sequence[list[int]] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """The next token after each position, of the row in `slots[i]` and by its `draws` [N]; before it, what
        `top_logprobs` gives for the positions whose rows ask for log-probabilities. `drafted` as for
        `LogitsProcessor`."""
        if self._params is None and not self._logprobs.is_asked and not self._is_processed:
            return [], self.model.argmax(h.select(1, -1))
        states, most = h.select(1, -1), max(len(self._members), FEW)
        if len(h) <= most:
            return self._choose(states, slots, draws, drafted)
        made, found = list[Tensor](), list[list[Tensor]]()
        for begin in range(0, len(h), most):  # the logits of all at once may take more memory than the cache
            part = slice(begin, begin + most)
            own = None if draws is None else draws.of(part)
            seen, chosen = self._choose(states[part], slots[part], own, drafted[part])
            made.append(chosen)
            if seen:
                found.append(seen)
        return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.cat(made)

    def _choose(
        self, states: Tensor, slots: Sequence[int], draws: Draws | None, drafted: Sequence[list[int]]
    ) -> tuple[list[Tensor], Tensor]:
        """`_choose_at` for states [N, D] whose logits are held at once."""
        logits = self.model.head(states)
        processed = self._process(logits, [self._members[slot].row for slot in slots], drafted)
        made = argmax(processed) if draws is None else self._drawn(processed, draws)
        if not self._logprobs.is_asked:
            return [], made
        own = [i for i, slot in enumerate(slots) if self._members[slot].row.request.top_logprobs is not None]
        if len(own) == len(slots):
            return list(top_logprobs(logits, made, self._logprobs.num_top)), made
        return list(top_logprobs(logits[own], made[own], self._logprobs.num_top)) if own else [], made

    def _plain_step(self, running: list[int]) -> list[int]:
        """One token for each of the rows in the slots `running`: those tokens."""
        rows = [self._members[slot].row for slot in running]
        step = self._step_inputs(running, rows)
        h = self._feed(step.newest, step.view, self._full)
        found, made = self._choose_at(h, running, step.draws)
        tokens, eos, depth = made.tolist(), self.model.config.eos_token_ids, self._depth
        for row, token in zip(rows, tokens, strict=True):
            row.take([token], eos, self._decode_text)
            row.layers.append(depth)
            row.ffns.append(depth)
        step.newest, self._repeated_step = made, step  # now that the rows have their tokens
        if found:
            self._give_logprobs([(row, 1, 1) for row in rows], found)
        self.stats.layer_row_steps += depth * len(rows)
        return tokens

    def _step_inputs(self, running: list[int], rows: Sequence[Row]) -> _PlainStep:
        """The newest tokens of the rows; if the last round was a plain step of the same rows, its inputs one position
        on."""
        last, self._repeated_step = self._repeated_step, None  # a step that fails must not be continued
        steps = [len(row.tokens) for row in rows]
        if last is None or last.running != running:
            prompts = self._cache.prompts
            positions = [prompts[slot] + k - 1 for slot, k in zip(running, steps, strict=True)]
            newest, slots, at = to_device([[row.tokens[-1] for row in rows], running, positions], self._device)
            return _PlainStep(running, newest, self._view(slots, at), self._draws(running, steps, AHEAD))
        last.view.advance()
        last.number += 1
        if last.number == AHEAD and last.ahead is not None:
            last.number, last.ahead = 0, self._draws(running, steps, AHEAD)
        return last

    def _give_logprobs(self, fed: Sequence[tuple[Row, int, int]], found: Sequence[Tensor]) -> None:
        """Hands log-probabilities to the rows that ask. `fed`: rows, how many of their tokens were fed, and how many of
        the new ones they keep."""
        one_by_one = iter(listed(*found))
        for row, num_fed, kept in fed:
            if row.request.top_logprobs is None:
                continue
            for one in [next(one_by_one) for _ in range(num_fed)][:kept]:
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))
