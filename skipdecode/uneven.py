"""A batch at full depth whose rows advance unevenly: a pass feeds tokens, each at a place and a column of its own.

A row is fed its newest token, and drafts behind it where there are any (`skipdecode.speculative`). Here are the passes
themselves, and the round without drafts, which is measured by a step of a batch that never drafts: it does as little
beside the model as that.

B rows, N tokens of a pass, D width, V vocabulary.
"""

from collections.abc import Sequence

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


class UnevenBatch(ContinuousBatch):
    """Rows of any age, of which each pass takes those that run."""

    def __init__(self, model: Decoder, schedule: FullDepth, decode_text: DecodeText | None, *, is_closed: bool) -> None:
        # looks_behind: the next round stands on what this one makes
        super().__init__(model, schedule, decode_text=decode_text, looks_behind=0, is_closed=is_closed)
        self._full = Extents.of_plan(schedule.prefill())
        self._depth = schedule.prefill().num_layers_run
        self._device = model.device
        self._carry = CARRY_ENDED[backend_on(self._device).takes_places]
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
        self._num_running = None

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
        if self._params is None and not self._logprobs.is_asked:
            return [], self.model.likeliest(h[:, -1])
        at = torch.tensor(places, device=h.device)
        numbers = [[self._members[place].uniform(k)] for place, k in zip(places, steps, strict=True)]
        uniforms = torch.tensor(numbers, dtype=torch.float32, device=h.device)
        has_cuts = any(cuts(member.row.request.sampling) for member in self._members)
        made, found, most = list[Tensor](), list[tuple[Tensor, ...]](), max(len(self._members), FEW)
        for begin in range(0, len(h), most):  # at a time: logits of all columns may take more memory than the cache
            part = slice(begin, begin + most)
            logits = self.model.head(h[part, -1])
            if self._params is None:
                made.append(likeliest(logits))
            else:
                temperature, top_k, top_p = (one[at[part]] for one in self._params)
                made.append(pick(logits, temperature, top_k, top_p, uniforms[part], cuts=has_cuts))
            if own := [i for i, place in enumerate(places[part]) if self._asks(place)]:
                found.append(top_logprobs(logits[own], made[-1][own], self._logprobs.num_top))
        return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.cat(made)

    def _asks(self, place: int) -> bool:
        return self._members[place].row.request.top_logprobs is not None

    def _rest(self, running: Sequence[int]) -> list[int]:
        """A round without drafts: the tokens it makes, one for each of the rows `running`."""
        rows, prompts, device = [self._members[at].row for at in running], self._arena.prompts, self._device
        columns = [prompts[at] + len(row.tokens) - 1 for at, row in zip(running, rows, strict=True)]
        at, places = torch.tensor([columns, running], device=device)
        is_whole = len(running) == len(self._members)
        h = self._feed(self._newest if is_whole else self._newest[places], places, at, self._full)
        found, made = self._choose_at(h, running, [len(row.tokens) for row in rows])
        self._newest = made if is_whole else self._newest.index_copy(0, places, made)
        tokens, eos, depth = made.tolist(), self.model.config.eos_token_ids, self._depth
        for row, token in zip(rows, tokens, strict=True):
            row.take([token], eos, self._decode_text)
            row.layers.append(depth)
            row.ffns.append(depth)
        if found:
            self._give_logprobs([(row, 1, 1) for row in rows], found)
        self.stats.layer_row_steps += depth * len(rows)
        return tokens

    def _give_logprobs(self, fed: Sequence[tuple[Row, int, int]], found: Sequence[Tensor]) -> None:
        """To the rows that ask, of the tokens that are theirs. `fed`: rows with their columns, and how many of these
        they keep."""
        one_by_one = iter(listed(*found))
        for row, columns, kept in fed:
            if row.request.top_logprobs is None:
                continue
            for one in [next(one_by_one) for _ in range(columns)][:kept]:
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))
