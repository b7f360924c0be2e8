"""Decoding at full depth with drafts: a few cheap guesses per row, verified by one pass for all rows, which advance by
what they got.

A round drafts (tokens that repeat, and passes that skip layers, over keys and values of full depth), then feeds each
row's newest token and its drafts through all layers as columns of their own. What full depth makes of column i is the
row's next token as long as the drafts before it were what full depth made. Greedy or drawn: token k of a row comes from
number k of the row, in a draft as in a verification. So the tokens are those of full depth, whatever was drafted; rows
differ in how far they come, not in what they say.

Verification writes keys and values of every column that it feeds, those of drafts included. Columns behind a row's last
accepted one are rubbish until the next round writes them. Rows that have ended cost nothing where kernels take places
(`skipdecode.kv.slot_cache`), and little elsewhere, until enough of them are dropped.

Not here: how many tokens to draft, if any (`draft_length`), drafts by repetition (`repeat_drafts`), a row's drafts
(`chain`), passes, and rounds without drafts (`uneven`), a batch run to its end (`generate`).
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row
from skipdecode.engine.static_batch import now
from skipdecode.kv.slot_cache import TokensView
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.layer_ranges import layer_ends, ranges_by_age
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import HOLDS, Decision, Hold
from skipdecode.speculative.draft import Chain, shares
from skipdecode.speculative.draft_length import SKIPPED, DraftLength
from skipdecode.speculative.draft_vocab import DraftHead
from skipdecode.speculative.latency_model import Prices, size_of
from skipdecode.speculative.ngram_proposer import RepeatDrafts
from skipdecode.speculative.ragged_batch import Draws, UnevenBatch


class SpeculativeBatch(UnevenBatch):
    """A `ContinuousBatch` at full depth whose steps are rounds: every row gets one token or several."""

    def __init__(
        self,
        model: Decoder,
        schedule: Lossless,
        *,
        decode_text: DecodeText | None = None,
        length: DraftLength | None = None,
        is_closed: bool = False,
    ) -> None:
        """`length`: decides for this batch, and learns from it; None: one of its own, without a clock. `is_closed` as
        in `ContinuousBatch`."""
        super().__init__(model, schedule, decode_text, is_closed=is_closed)
        self._lossless = schedule
        self._length = length or DraftLength(schedule, Prices.of(model))
        self._draft_ends = layer_ends(schedule.drafts, model.config.max_position_embeddings)
        self._repeats = RepeatDrafts(self._length.acceptance, decides=schedule.draft_tokens is None)
        self._hold: Hold | None = None  # what was decided, and for how long
        self._is_anew = True  # rows have come or gone
        self._priced_s = 0.0  # of this round, by its passes
        self._lists = schedule.drafts_by_skipping and model.has_head_rows  # else a list would be learnt in vain

    def join(self, requests: Sequence[Request], sharing: PrefixSharing | None = None) -> list[Row]:
        rows = super().join(requests, sharing)
        if self._lists:
            for request in requests:
                self._length.vocabulary.read(request.prompt_tokens)
        return rows

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        begin = now(self._device)
        running = self._running()
        if not running:
            return
        hold = self._holding(running)
        if hold.decision.has_drafts:
            made = self._draft(running, hold.decision, begin)
        else:
            made = self._without_drafts(running, hold)
        self.row_steps += len(running)
        self.stats.decode_steps += 1
        self.stats.row_steps += len(running)
        took_s, step_s = now(self._device) - begin, self._length.step_s(len(running), hold.context)
        if not hold.decision.has_drafts:
            self._saw_rest(len(running), took_s, step_s)
        hold.add(len(running), made, took_s, step_s)
        self._is_anew = False
        if self.is_done:  # what it came to is for the batches behind it
            self._length.saw(hold)
            self._hold = None

    def _changed(self) -> None:
        super()._changed()
        self._is_anew = True
        self._repeats.keep({member.row for member in self._members})

    def _short_head(self) -> DraftHead | None:
        """What drafts of skipped passes choose by; None: by the head of the model."""
        head = self._length.vocabulary.head(self.model) if self._lists else None
        self._length.listed = None if head is None else len(head.tokens)
        return head

    # --- how many

    def _holding(self, running: Sequence[int]) -> Hold:
        """The decision for this round: the last one, as long as it holds and the batch is about as large."""
        hold, rows = self._hold, len(running)
        goes_on = hold is not None and hold.num_rounds < hold.decision.rounds and size_of(hold.rows) == size_of(rows)
        if hold is not None and goes_on and not hold.decision.has_drafts:
            return hold
        ages = sorted(len(self._members[at].row.tokens) - 1 for at in running)
        context = (sum(self._cache.prompts[at] for at in running) + sum(ages)) // rows + 1
        if hold is not None and goes_on:
            self._length.again(hold, rows, ages[rows // 2], context)
            return hold
        if hold is not None:
            self._length.saw(hold)
        self._short_head()  # drafts of few tokens are cheaper
        self._hold = self._length.hold(rows, ages[rows // 2], context, is_anew=self._is_anew)
        return self._hold

    def _without_drafts(self, running: list[int], hold: Hold) -> int:
        """The tokens made."""
        tokens = self._rest(running)
        if self._lists and hold.num_rounds % HOLDS == 0:  # some of the text says enough, and counting takes time
            self._length.vocabulary.wrote(tokens)
        return len(tokens)

    def _saw_rest(self, rows: int, took_s: float, step_s: float) -> None:
        self.stats.verify_s += took_s
        self.stats.model_decode_s += step_s
        self._length.prices.saw("full", self._lossless.prefill(), rows, rows, 0, took_s, step_s)

    # --- drafts

    def _draft(self, running: Sequence[int], decision: Decision, begin: float) -> int:
        """A round with drafts; the tokens made."""
        self._priced_s, self._rested, start = 0.0, None, now(self._device)
        chains = [
            Chain(at, len(row.tokens) - 1, [row.tokens[-1]], row.request.sampling.max_new_tokens - 1 - len(row.tokens))
            for at, row in ((at, self._members[at].row) for at in running)
        ]
        short = self._short_head()
        for chain in chains:
            self._repeats.draft(chain, self._members[chain.at].row, decision, self._eos(chain))
        has_skipped = self._skip(chains, short)
        if decision.continued:
            for chain in chains:
                self._repeats.go_on(chain, self._members[chain.at].row, decision, self._eos(chain))
        drafted = now(self._device)
        made = self._verify(chains, drafted)
        self.stats.draft_s += drafted - start
        if has_skipped:  # others have far less to do
            self._length.prices.saw_round(len(chains), now(self._device) - begin - self._priced_s)
        return made

    def _context(self, chains: Sequence[Chain]) -> int:
        """Columns that a row sees in the mean."""
        return sum(self._cache.prompts[chain.at] + chain.k for chain in chains) // len(chains) + 1

    def _eos(self, chain: Chain) -> Sequence[int]:
        sampling = self._members[chain.at].row.request.sampling
        return () if sampling.ignore_eos else tuple(self.model.config.eos_token_ids)

    def _skip(self, chains: Sequence[Chain], short: DraftHead | None) -> bool:
        """Drafts by skipped passes, one column of all rows that want one at a time, of the tokens of `short`. The rows
        that run a layer are the youngest ones, as in the batch below. Whether there was such a pass."""
        has_skipped = False
        rows, draws = sorted((c for c in chains if c.wanted > 0 and c.room > 0), key=lambda c: -c.k), None
        while rows := [chain for chain in rows if chain.num_drafts < min(chain.wanted, chain.room)]:
            has_skipped, start, places = True, now(self._device), [chain.at for chain in rows]
            tokens, view = self._fed(rows, [chain.num_drafts for chain in rows])
            if self._params is not None:
                most = max(chain.wanted - chain.num_drafts for chain in rows)
                draws = self._draws(places, [chain.k + chain.num_drafts + 1 for chain in rows], most)
            ages, ends = [chain.k + chain.num_drafts for chain in rows], list[float]()
            while not ends or all(chain.num_drafts < min(chain.wanted, chain.room) for chain in rows):
                if ends:  # the same rows, a column on
                    view.advance()
                tokens = self._skip_once(rows, ages, tokens, view, draws, len(ends), short)
                ages = [age + 1 for age in ages]
                ends.append(now(self._device))
            self._price_drafts(len(rows), ages[len(ages) // 2] - 1, self._context(chains), start, ends)
        return has_skipped

    def _price_drafts(self, rows: int, age: int, context: int, start: float, ends: Sequence[float]) -> None:
        """What skipped passes took, the last at that age. The first finds nothing in the caches: what that takes is
        the round's."""
        plan, prices, listed = self._lossless.drafts.step(age), self._length.prices, self._length.listed
        model_s = prices.model_s(plan, rows, rows, context, listed, "draft")
        first_s, known_s = ends[0] - start, prices.seconds("draft", plan, rows, rows, context, listed)
        took_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else min(first_s, known_s)
        if len(ends) > 1 or first_s < known_s:
            prices.saw("draft", plan, rows, rows, context, took_s, model_s)
        self.stats.model_decode_s += len(ends) * model_s
        self._priced_s += len(ends) * took_s

    def _skip_once(
        self,
        rows: Sequence[Chain],
        ages: Sequence[int],
        tokens: Tensor,
        view: TokensView,
        draws: Draws | None,
        number: int,
        short: DraftHead | None,
    ) -> Tensor:
        """One skipped pass, by that `number` of the `draws`: the drafts that it makes [n], which the rows have then."""
        model, drafts = self.model, self._lossless.drafts
        h = self._feed(tokens, view, ranges_by_age(ages, *self._draft_ends))[:, -1]
        if draws is None:
            made = model.argmax(h) if short is None else short.argmax(model.head_states(h))
        else:
            logits = model.head(h) if short is None else short.logits(model.head_states(h))
            made = self._drawn(logits, draws.number(number))
            made = made if short is None else short.tokens[made]
        made = self._drafted(rows, made)
        for chain, token, age in zip(rows, made.tolist(), ages, strict=True):
            plan = drafts.step(age)
            chain.layers += plan.num_layers_run
            chain.ffns += sum(plan.ffn)
            chain.add([token], SKIPPED, self._eos(chain))
        return made

    def _drafted(self, chains: Sequence[Chain], made: Tensor) -> Tensor:
        """The drafts of a skipped pass, from what it made of each chain [n]. A measurement may script them."""
        return made

    def _fed(self, chains: Sequence[Chain], offsets: Sequence[int]) -> tuple[Tensor, TokensView]:
        """Token `offsets[i]` of `chains[i]`, which lie side by side: these [N], and their view."""
        prompts = self._cache.prompts
        tokens = [chain.tokens[i] for chain, i in zip(chains, offsets, strict=True)]
        columns = [prompts[chain.at] + chain.k + i for chain, i in zip(chains, offsets, strict=True)]
        places = [chain.at for chain in chains]
        fed, at, where = to_device([tokens, columns, places], self._device)
        return fed, self._view(where, at, max(Counter(places).values()))

    def _verify(self, chains: Sequence[Chain], start: float) -> int:
        """Feeds all chains at full depth, and gives the rows what they got: so many tokens."""
        spread = [(chain, i) for chain in chains for i in range(len(chain.tokens))]
        of, offsets = [chain for chain, _ in spread], [i for _, i in spread]
        h = self._feed(*self._fed(of, offsets), self._full)
        places = [chain.at for chain in of]
        found, made = self._choose_at(h, places, self._draws(places, [chain.k + i + 1 for chain, i in spread]))
        chosen, begin = made.tolist(), 0
        context = self._context(chains)
        taken: list[tuple[Row, int, int]] = []  # rows, their columns, how many tokens of these are theirs
        for chain in chains:
            row, own = self._members[chain.at].row, chosen[begin : begin + len(chain.tokens)]
            accepted = chain.num_equal(own)
            before = len(row.tokens)
            row.take(own[: accepted + 1], self.model.config.eos_token_ids, self._decode_text)
            kept = len(row.tokens) - before
            chain.layers += len(own) * self._depth
            chain.ffns += len(own) * self._depth
            row.layers += shares(chain.layers, kept)
            row.ffns += shares(chain.ffns, kept)
            taken.append((row, len(own), kept))
            begin += len(own)
            self._length.acceptance.see(chain.sources, accepted)
            self.stats.count(chain.num_drafts, accepted)
        if self._lists:
            self._length.vocabulary.wrote(
                [token for row, _, kept in taken for token in row.tokens[len(row.tokens) - kept :]]
            )
        if found:
            self._give_logprobs(taken, found)
        self.stats.layer_row_steps += sum(chain.layers for chain in chains)
        took_s = now(self._device) - start
        self.stats.verify_s += took_s
        self._priced_s += took_s  # with the host's work: for few rows of a small model that is most of it
        sizes = len(chains), len(spread), context
        model_s = self._length.prices.model_s(self._lossless.prefill(), *sizes, kind="verify")
        self.stats.model_decode_s += model_s
        self._length.prices.saw("verify", self._lossless.prefill(), *sizes, took_s, model_s)
        return sum(kept for _, _, kept in taken)
