"""Decoding at full depth with drafts: a few cheap guesses per row, verified by one pass for all rows, which advance by
what they got.

A round drafts (tokens that repeat, and passes that skip layers, over keys and values of full depth), then feeds each
row's newest token and its drafts through all layers as columns of their own. What full depth makes of column i is the
row's next token as long as the drafts before it were what full depth made. Greedy or drawn: token k of a row comes from
number k of the row, in a draft as in a verification. So the tokens are those of full depth, whatever was drafted; rows
differ in how far they come, not in what they say.

Verification writes keys and values of every column that it feeds, those of drafts included. Columns behind a row's last
accepted one are rubbish until the next round writes them. Rows that have ended cost nothing where kernels take places
(`skipdecode.kv.tokens`), and little elsewhere, until enough of them are dropped.

Not here: how many tokens to draft, if any (`draft_length`), where repeats are found (`repeats`), a row's drafts
(`chain`), passes, and rounds without drafts (`uneven`), a batch run to its end (`generate`).
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.chain import Chain
from skipdecode.cohort import now
from skipdecode.decoder import Decoder
from skipdecode.draft_length import SKIPPED, DraftLength
from skipdecode.extents import Extents, extents_of, layer_ends
from skipdecode.layer_loop import Layered
from skipdecode.lossless import Lossless
from skipdecode.pace import HOLDS, Decision, Hold
from skipdecode.plan import LayerPlan
from skipdecode.prefix import Sharing
from skipdecode.prices import Prices, size_of
from skipdecode.repeats import RepeatsOfRows
from skipdecode.request import DecodeText, Request, Row
from skipdecode.short_head import ShortHead
from skipdecode.uneven import UnevenBatch

SURE = 3  # tokens that repeat from which on a repeat comes before a skipped pass, where nobody decides


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
        self._draft_layers = [i for i, ends in enumerate(zip(*self._draft_ends, strict=True)) if any(ends)]
        self._repeats = RepeatsOfRows()
        self._hold: Hold | None = None  # what was decided, and for how long
        self._priced_s = 0.0  # of this round, by its passes
        self._lists = schedule.drafts_by_skipping and model.has_head_rows  # else a list would be learnt in vain

    def join(self, requests: Sequence[Request], sharing: Sharing | None = None) -> list[Row]:
        rows = super().join(requests, sharing)
        if self._lists:
            for request in requests:
                self._length.shortlist.read(request.prompt_tokens)
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
            if hold.decision.skipped and self._prepare():
                begin = now(self._device)  # once for a model: it says nothing about rounds
            made = self._draft(running, hold.decision, begin)
        else:
            made = self._without_drafts(running, hold, begin)
        self.row_steps += len(running)
        self.stats.decode_steps += 1
        self.stats.row_steps += len(running)
        step_s = self._length.step_s(len(running), hold.context)
        hold.add(len(running), made, now(self._device) - begin, step_s)
        if self.is_done:  # what it came to is for the batches behind it
            self._length.saw(hold)
            self._hold = None

    def _changed(self) -> None:
        super()._changed()
        self._repeats.keep({member.row for member in self._members})

    def _prepare(self) -> bool:
        """The weights of drafts, once; whether there was anything to do."""
        chooses_among_all = not self._lists and self._params is None
        return self.model.drafter.prepare(self._draft_layers, with_head=chooses_among_all)

    def _short_head(self) -> ShortHead | None:
        """What drafts of skipped passes choose by; None: by the head of the model."""
        listed = self._length.shortlist.tokens() if self._lists and self._params is None else None
        head = None if listed is None else self.model.short_head(listed)
        among_all = self.model.drafter.num_outputs if self._params is None else None
        self._length.listed = among_all if head is None else len(head.tokens)
        return head

    # --- how many

    def _holding(self, running: Sequence[int]) -> Hold:
        """The decision for this round: the last one, as long as it holds and the batch is about as large."""
        hold, rows = self._hold, len(running)
        goes_on = hold is not None and hold.num_rounds < hold.decision.rounds and size_of(hold.rows) == size_of(rows)
        if hold is not None and goes_on and not hold.decision.has_drafts:
            return hold
        ages = sorted(len(self._members[at].row.tokens) - 1 for at in running)
        context = (sum(self._arena.prompts[at] for at in running) + sum(ages)) // rows + 1
        if hold is not None and goes_on:
            self._length.again(hold, rows, ages[rows // 2], context)
            return hold
        if hold is not None:
            self._length.saw(hold)
        self._short_head()  # drafts of few tokens are cheaper
        self._hold = self._length.hold(rows, ages[rows // 2], context)
        return self._hold

    def _without_drafts(self, running: list[int], hold: Hold, begin: float) -> int:
        """The tokens made."""
        tokens, rows = self._rest(running), len(running)
        if self._lists and hold.num_rounds % HOLDS == 0:  # some of the text says enough, and counting takes time
            self._length.shortlist.wrote(tokens)
        took_s, model_s = now(self._device) - begin, self._length.step_s(rows, hold.context)
        self.stats.verify_s += took_s
        self.stats.model_decode_s += model_s
        self._length.prices.saw("full", self._lossless.prefill(), rows, rows, 0, took_s, model_s)
        return rows

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
            self._repeat(chain, decision)
        self._skip(chains, short)
        if decision.continued:
            for chain in chains:
                self._continue(chain, decision)
        drafted = now(self._device)
        made = self._verify(chains, drafted)
        self.stats.draft_s += drafted - start
        self._length.prices.saw_round(len(chains), now(self._device) - begin - self._priced_s)
        return made

    def _context(self, chains: Sequence[Chain]) -> int:
        """Columns that a row sees in the mean."""
        return sum(self._arena.prompts[chain.at] + chain.k for chain in chains) // len(chains) + 1

    def _eos(self, chain: Chain) -> Sequence[int]:
        sampling = self._members[chain.at].row.request.sampling
        return () if sampling.ignore_eos else tuple(self.model.config.eos_token_ids)

    def _repeat(self, chain: Chain, decision: Decision) -> None:
        """Drafts what the row repeats, or leaves it to skipped passes."""
        chain.wanted = decision.skipped
        if not decision.repeated or chain.room <= 0:
            return
        found, tokens = self._repeats.of(self._members[chain.at].row).find(
            min(max(decision.repeated.values()), chain.room), min(decision.repeated)
        )
        count = decision.repeated.get(found, 0)
        if count and (not decision.skipped or self._is_better(found)):
            chain.add(tokens[:count], found, self._eos(chain))
            chain.wanted = 0

    def _is_better(self, found: int) -> bool:
        """Whether a repeat of so many tokens is as good as a skipped pass."""
        rate = self._length.acceptance.rate
        return rate(found, 0) >= rate(SKIPPED, 0) if self._lossless.draft_tokens is None else found >= SURE

    def _continue(self, chain: Chain, decision: Decision) -> None:
        """Behind drafts of skipped passes: what follows on them elsewhere."""
        room, drafts = chain.room - chain.num_drafts, chain.tokens[1:]
        if not drafts or room <= 0 or chain.sources[0][0] != SKIPPED:
            return
        index = self._repeats.of(self._members[chain.at].row)
        index.add(drafts)
        found, tokens = index.find(min(max(decision.continued.values()), room), min(decision.continued))
        index.drop(len(drafts))
        chain.add(tokens[: decision.continued.get(found, 0)], found, self._eos(chain))

    def _skip(self, chains: Sequence[Chain], short: ShortHead | None) -> None:
        """Drafts by skipped passes, one column of all rows that want one at a time, of the tokens of `short`. The rows
        that run a layer are the youngest ones, as in the batch below."""
        rows = sorted((c for c in chains if c.wanted > 0 and c.room > 0), key=lambda c: -c.k)
        drafts = self._lossless.drafts
        while rows := [chain for chain in rows if chain.num_drafts < min(chain.wanted, chain.room)]:
            ages = [chain.k + chain.num_drafts for chain in rows]
            start = now(self._device)
            extents = extents_of(ages, *self._draft_ends)
            h = self._feed_chains(rows, [chain.num_drafts for chain in rows], extents, self.model.drafter)
            if self._params is None:
                made = self.model.drafter.likeliest(h[:, -1], short)
            else:
                _, made = self._choose_at(h, [chain.at for chain in rows], [age + 1 for age in ages])
            for chain, token, age in zip(rows, self._drafted(rows, made), ages, strict=True):
                plan = drafts.step(age)
                chain.layers += plan.num_layers_run
                chain.ffns += sum(plan.ffn)
                chain.add([token], SKIPPED, self._eos(chain))
            took_s, context = now(self._device) - start, self._context(chains)
            self._price("draft", drafts.step(ages[len(ages) // 2]), len(rows), len(rows), context, took_s)

    def _drafted(self, chains: Sequence[Chain], made: Tensor) -> list[int]:
        """The drafts of a skipped pass, from what it made of each chain [n]. A measurement may script them."""
        return list(made.tolist())

    def _feed_chains(
        self, chains: Sequence[Chain], offsets: Sequence[int], extents: Extents, by: Layered | None = None
    ) -> Tensor:
        """The states [N, 1, D] of token `offsets[i]` of `chains[i]`, which lie side by side, behind the layers of
        `by`."""
        prompts = self._arena.prompts
        tokens = [chain.tokens[i] for chain, i in zip(chains, offsets, strict=True)]
        columns = [prompts[chain.at] + chain.k + i for chain, i in zip(chains, offsets, strict=True)]
        places = [chain.at for chain in chains]
        fed, at, where = torch.tensor([tokens, columns, places], device=self._device)
        return self._feed(fed, where, at, extents, max(Counter(places).values()), by)

    def _verify(self, chains: Sequence[Chain], start: float) -> int:
        """Feeds all chains at full depth, and gives the rows what they got: so many tokens."""
        spread = [(chain, i) for chain in chains for i in range(len(chain.tokens))]
        of, offsets = [chain for chain, _ in spread], [i for _, i in spread]
        h = self._feed_chains(of, offsets, self._full)
        found, made = self._choose_at(h, [c.at for c in of], [c.k + i + 1 for c, i in spread])
        chosen, begin = made.tolist(), 0
        context = self._context(chains)
        newest = [0] * len(self._members)
        taken: list[tuple[Row, int, int]] = []  # rows, their columns, how many tokens of these are theirs
        for chain in chains:
            row, own = self._members[chain.at].row, chosen[begin : begin + len(chain.tokens)]
            accepted = chain.num_equal(own)
            before = len(row.tokens)
            row.take(own[: accepted + 1], self.model.config.eos_token_ids, self._decode_text)
            kept = len(row.tokens) - before
            chain.layers += len(own) * self._depth
            chain.ffns += len(own) * self._depth
            row.layers += _spread(chain.layers, kept)
            row.ffns += _spread(chain.ffns, kept)
            newest[chain.at] = row.tokens[-1]
            taken.append((row, len(own), kept))
            begin += len(own)
            self._length.acceptance.see(chain.sources, accepted)
            self.stats.count(chain.num_drafts, accepted)
        if self._lists:
            self._length.shortlist.wrote(
                [token for row, _, kept in taken for token in row.tokens[len(row.tokens) - kept :]]
            )
        if found:
            self._give_logprobs(taken, found)
        self._newest = torch.tensor(newest, device=self._device)
        self.stats.layer_row_steps += sum(chain.layers for chain in chains)
        took_s = now(self._device) - start
        self.stats.verify_s += took_s
        self._price("verify", self._lossless.prefill(), len(chains), len(spread), context, took_s)
        return sum(kept for _, _, kept in taken)

    def _price(self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, took_s: float) -> None:
        """What a pass took, the host's work with it: for few rows of a small model that is most of it."""
        listed = self._length.listed if kind == "draft" else None
        model_s = self._length.prices.model_s(plan, rows, tokens, context, listed, kind)
        self.stats.model_decode_s += model_s
        self._length.prices.saw(kind, plan, rows, tokens, context, took_s, model_s)
        self._priced_s += took_s


def _spread(total: int, count: int) -> list[int]:
    """`total` over `count` tokens, the first ones getting what is left over."""
    return [total // count + (i < total % count) for i in range(count)]
