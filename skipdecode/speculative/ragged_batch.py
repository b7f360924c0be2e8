"""A batch at full depth whose rows advance unevenly: a pass feeds tokens, each at a place and a column of its own.

A row is fed its newest token, and drafts behind it where there are any (`skipdecode.speculative.speculative_batch`).
Here are the passes
themselves, and the round without drafts, which is measured by a step of a batch that never drafts: it does as little
beside the model as that.

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
from skipdecode.schedules.plan import FullDepth

# Ended rows keep their memory up to this share of the batch: where nothing is computed for them, to copy the others is
# dearer than to carry them.
CARRY_ENDED = {True: 7 / 8, False: 1 / 2}
FEW = 64  # columns that are chosen at a time at least: each time reads the head
AHEAD = 32  # random numbers of a row that rounds without drafts look up at a time


Params: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Temperature, top_k, top_p [N, 1]."""


class Draws(NamedTuple):
    """How tokens of N rows are drawn, n of each one after the other."""

    params: Params
    uniforms: Tensor
    """[N, n]."""

    def of(self, rows: slice) -> "Draws":
        temperature, top_k, top_p = self.params
        return Draws((temperature[rows], top_k[rows], top_p[rows]), self.uniforms[rows])

    def number(self, i: int) -> "Draws":
        """Of each row's token i."""
        return Draws(self.params, self.uniforms[:, i : i + 1])


@dataclass
class _Rested:
    """A round without drafts, and what the next one begins with."""

    running: list[int]
    """Places of its rows."""
    newest: Tensor
    """Their newest tokens [R]."""
    view: TokensView
    """Of these."""
    ahead: Draws | None
    """Of AHEAD tokens of each row; None: all are greedy."""
    number: int = 0
    """Of these the one that comes."""

    @property
    def draws(self) -> Draws | None:
        return None if self.ahead is None else self.ahead.number(self.number)


class UnevenBatch(ContinuousBatch):
    """Rows of any age, of which each pass takes those that run."""

    def __init__(self, model: Decoder, schedule: FullDepth, decode_text: DecodeText | None, *, is_closed: bool) -> None:
        # looks_behind: the next round stands on what this one makes
        super().__init__(model, schedule, decode_text=decode_text, max_pending=0, is_closed=is_closed)
        self._full = LayerRanges.of_plan(schedule.prefill())
        self._depth = schedule.prefill().num_layers_run
        self._device = model.device
        self._carry = CARRY_ENDED[backend_on(self._device).supports_multi_token_rows]
        self._has_cuts = False
        # the last round, where it was one without drafts
        self._rested: _Rested | None = None
        self._num_running: int | None = None  # when it was last seen to that ended rows are dropped
        self.stats = LosslessStats()

    def _running(self) -> list[int]:
        """The rows of the batch that are to be fed; enough ended ones are dropped before."""
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
        self._num_running, self._rested = None, None
        self._has_cuts = any(cuts(member.row.request.sampling) for member in self._members)
        super()._changed()

    def _view(self, places: Tensor, columns: Tensor, most: int = 1) -> TokensView:
        """For tokens [N]; `most` as in `TokensView`."""
        return TokensView(self._cache, places, columns, self.model.rotary_table, most)

    def _feed(self, tokens: Tensor, view: TokensView, ranges: LayerRanges) -> Tensor:
        """The states [N, 1, D] of tokens [N] behind their layers."""
        return run_layers(self.model, self.model.embed(tokens[:, None], view.positions), view, ranges)[0]

    def _draws(self, places: Sequence[int], steps: Sequence[int], count: int = 1) -> Draws | None:
        """Of `count` tokens from y_k on, k = `steps[i]`, of the row at `places[i]`; None where all are greedy."""
        members, params = self._members, self._params_at(places)
        if params is None:
            return None
        numbers = [members[place].uniforms_from(k, count) for place, k in zip(places, steps, strict=True)]
        return Draws(params, to_device(np.array(numbers, dtype=np.float32), self._device))

    def _params_at(self, places: Sequence[int]) -> Params | None:
        params = self._params
        if params is None or list(places) == list(range(len(self._members))):
            return params
        at = to_device(places, self._device)
        return params[0][at], params[1][at], params[2][at]

    def _drawn(self, logits: Tensor, draws: Draws) -> Tensor:
        """[N, V] -> [N], by one draw of each row."""
        return pick(logits, *draws.params, draws.uniforms, cuts=self._has_cuts)

    def _choose_at(self, h: Tensor, places: Sequence[int], draws: Draws | None) -> tuple[list[Tensor], Tensor]:
        """What `top_logprobs` gives of the columns whose rows ask, and of each column a token of the row at
        `places[i]`, by its `draws`: [N]."""
        if self._params is None and not self._logprobs.is_asked:
            return [], self.model.argmax(h.select(1, -1))
        states, most = h.select(1, -1), max(len(self._members), FEW)
        if len(h) <= most:
            return self._choose(states, places, draws)
        made, found = list[Tensor](), list[list[Tensor]]()
        for begin in range(0, len(h), most):  # at a time: logits of all columns may take more memory than the cache
            part = slice(begin, begin + most)
            seen, chosen = self._choose(states[part], places[part], None if draws is None else draws.of(part))
            made.append(chosen)
            if seen:
                found.append(seen)
        return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.cat(made)

    def _choose(self, states: Tensor, places: Sequence[int], draws: Draws | None) -> tuple[list[Tensor], Tensor]:
        """The same of states [N, D] whose logits are held at once; `draws`: None where all are greedy."""
        logits = self.model.head(states)
        made = argmax(logits) if draws is None else self._drawn(logits, draws)
        if not self._logprobs.is_asked:
            return [], made
        own = [i for i, place in enumerate(places) if self._asks(place)]
        if len(own) == len(places):
            return list(top_logprobs(logits, made, self._logprobs.num_top)), made
        return list(top_logprobs(logits[own], made[own], self._logprobs.num_top)) if own else [], made

    def _asks(self, place: int) -> bool:
        return self._members[place].row.request.top_logprobs is not None

    def _rest(self, running: list[int]) -> list[int]:
        """A round without drafts: the tokens it makes, one for each of the rows `running`."""
        rows = [self._members[at].row for at in running]
        rested = self._to_rest(running, rows)
        h = self._feed(rested.newest, rested.view, self._full)
        found, made = self._choose_at(h, running, rested.draws)
        tokens, eos, depth = made.tolist(), self.model.config.eos_token_ids, self._depth
        for row, token in zip(rows, tokens, strict=True):
            row.take([token], eos, self._decode_text)
            row.layers.append(depth)
            row.ffns.append(depth)
        rested.newest, self._rested = made, rested  # now that they have their tokens
        if found:
            self._give_logprobs([(row, 1, 1) for row in rows], found)
        self.stats.layer_row_steps += depth * len(rows)
        return tokens

    def _to_rest(self, running: list[int], rows: Sequence[Row]) -> "_Rested":
        """The newest tokens; those of the last round a column on, where it fed the same rows and no drafts."""
        rested, self._rested = self._rested, None  # what fails on the way is not to be gone on from
        steps = [len(row.tokens) for row in rows]
        if rested is None or rested.running != running:
            prompts = self._cache.prompts
            columns = [prompts[at] + k - 1 for at, k in zip(running, steps, strict=True)]
            newest, places, at = to_device([[row.tokens[-1] for row in rows], running, columns], self._device)
            return _Rested(running, newest, self._view(places, at), self._draws(running, steps, AHEAD))
        rested.view.advance()
        rested.number += 1
        if rested.number == AHEAD and rested.ahead is not None:
            rested.number, rested.ahead = 0, self._draws(running, steps, AHEAD)
        return rested

    def _give_logprobs(self, fed: Sequence[tuple[Row, int, int]], found: Sequence[Tensor]) -> None:
        """To the rows that ask, of the tokens that are theirs. `fed`: rows with their columns, and how many of these
        they keep."""
        one_by_one = iter(listed(*found))
        for row, columns, kept in fed:
            if row.request.top_logprobs is None:
                continue
            for one in [next(one_by_one) for _ in range(columns)][:kept]:
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))
