"""A batch at full depth whose rows advance unevenly: a pass feeds tokens, each at a place and a column of its own.

A row is fed its newest token, and drafts behind it where there are any (`skipdecode.speculative`). Here are the passes
themselves, and the round without drafts, which is measured by a step of a batch that never drafts: it does as little
beside the model as that.

B rows, N tokens of a pass, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.batch_stats import LosslessStats
from skipdecode.continuous import ContinuousBatch
from skipdecode.decoder import Decoder
from skipdecode.extents import Extents
from skipdecode.kv.tokens import TokensView
from skipdecode.layer_loop import Layered, run_layers
from skipdecode.logprobs import listed, top_logprobs
from skipdecode.plan import FullDepth
from skipdecode.request import DecodeText, Row, TokenLogprobs
from skipdecode.sampler import cuts, likeliest, pick

# Ended rows keep their memory up to this share of the batch: where nothing is computed for them, to copy the others is
# dearer than to carry them.
CARRY_ENDED = {True: 7 / 8, False: 1 / 2}
FEW = 64  # columns that are chosen at a time at least: each time reads the head
Params: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Temperature, top_k, top_p [N, 1]."""


class UnevenBatch(ContinuousBatch):
    """Rows of any age, of which each pass takes those that run."""

    def __init__(self, model: Decoder, schedule: FullDepth, decode_text: DecodeText | None, *, is_closed: bool) -> None:
        # looks_behind: the next round stands on what this one makes
        super().__init__(model, schedule, decode_text=decode_text, looks_behind=0, is_closed=is_closed)
        self._full = Extents.of_plan(schedule.prefill())
        self._depth = schedule.prefill().num_layers_run
        self._device = model.device
        self._carry = CARRY_ENDED[backend_on(self._device).takes_places]
        self._has_cuts = False
        self._rested: tuple[list[int], Tensor] | None = None  # the rows of the last round, if it was one without drafts
        self._next_column = torch.tensor([[1], [0]], device=self._device)
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
        prompts, members = self._arena.prompts, self._members
        self._arena.reach([p + len(m.row.tokens) - 1 for p, m in zip(prompts, members, strict=True)])
        super()._drop_ended(carry)

    def _changed(self) -> None:
        super()._changed()
        self._num_running, self._rested = None, None
        self._has_cuts = any(cuts(member.row.request.sampling) for member in self._members)

    def _feed(
        self,
        tokens: Tensor,
        places: Tensor,
        columns: Tensor,
        extents: Extents,
        most: int = 1,
        by: Layered | None = None,
    ) -> Tensor:
        """The states [N, 1, D] of tokens [N] behind their layers; `places`, `columns`, `most` as in `TokensView`. `by`:
        whose layers; None: the model's."""
        view = TokensView(self._arena, places, columns, self.model.rotations, most)
        return run_layers(by or self.model, self.model.embed(tokens[:, None], columns[:, None]), view, extents)[0]

    def _choose_at(self, h: Tensor, places: Sequence[int], steps: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """What `top_logprobs` gives of the columns whose rows ask, and of each column the token y_k of the row at
        `places[i]`, k = `steps[i]`: [N]."""
        params, asks = self._params, self._logprobs.is_asked
        if params is None and not asks:
            return [], self.model.likeliest(h.select(1, -1))
        uniforms, members = None, self._members
        if params is not None:
            numbers = [members[place].uniform(k) for place, k in zip(places, steps, strict=True)]
            uniforms = torch.tensor(numbers, dtype=torch.float32, device=h.device).unsqueeze(1)
            if len(places) != len(members) or any(at != place for at, place in enumerate(places)):
                at = torch.tensor(places, device=h.device)
                params = params[0][at], params[1][at], params[2][at]
        states, most = h.select(1, -1), max(len(members), FEW)
        if len(h) <= most:
            return self._choose(states, places, params, uniforms)
        made, found = list[Tensor](), list[list[Tensor]]()
        for begin in range(0, len(h), most):  # at a time: logits of all columns may take more memory than the cache
            part = slice(begin, begin + most)
            own = None if params is None else (params[0][part], params[1][part], params[2][part])
            numbers_of = None if uniforms is None else uniforms[part]
            seen, chosen = self._choose(states[part], places[part], own, numbers_of)
            made.append(chosen)
            if seen:
                found.append(seen)
        return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.cat(made)

    def _choose(
        self, states: Tensor, places: Sequence[int], params: Params | None, uniforms: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """The same of states [N, D] whose logits are held at once; `params` and `uniforms` [N, 1] each, None where all
        are greedy."""
        logits = self.model.head(states)
        if params is None or uniforms is None:
            made = likeliest(logits)
        else:
            made = pick(logits, *params, uniforms, cuts=self._has_cuts)
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
        fed = self._columns_of(running, rows)
        at, places = fed
        is_whole = len(running) == len(self._members)
        h = self._feed(self._newest if is_whole else self._newest[places], places, at, self._full)
        found, made = self._choose_at(h, running, [len(row.tokens) for row in rows])
        self._newest = made if is_whole else self._newest.index_copy(0, places, made)
        tokens, eos, depth = made.tolist(), self.model.config.eos_token_ids, self._depth
        for row, token in zip(rows, tokens, strict=True):
            row.take([token], eos, self._decode_text)
            row.layers.append(depth)
            row.ffns.append(depth)
        self._rested = running, fed  # now that they have their tokens
        if found:
            self._give_logprobs([(row, 1, 1) for row in rows], found)
        self.stats.layer_row_steps += depth * len(rows)
        return tokens

    def _columns_of(self, running: list[int], rows: Sequence[Row]) -> Tensor:
        """Columns and places [2, R] of the newest tokens; those of the last round and one more, where it fed the same
        rows and no drafts."""
        if self._rested is not None and self._rested[0] == running:
            found = self._rested[1] + self._next_column
        else:
            prompts = self._arena.prompts
            columns = [prompts[at] + len(row.tokens) - 1 for at, row in zip(running, rows, strict=True)]
            found = torch.tensor([columns, running], device=self._device)
        return found

    def _give_logprobs(self, fed: Sequence[tuple[Row, int, int]], found: Sequence[Tensor]) -> None:
        """To the rows that ask, of the tokens that are theirs. `fed`: rows with their columns, and how many of these
        they keep."""
        one_by_one = iter(listed(*found))
        for row, columns, kept in fed:
            if row.request.top_logprobs is None:
                continue
            for one in [next(one_by_one) for _ in range(columns)][:kept]:
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))
