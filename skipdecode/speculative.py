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

Not here: how many tokens to draft (`draft_length`), where repeats are found (`repeats`), a row's drafts (`chain`), a
batch run to its end (`generate`).

B rows, N tokens of all rows in a pass, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.batch_stats import LosslessStats
from skipdecode.chain import Chain
from skipdecode.cohort import now
from skipdecode.continuous import ContinuousBatch
from skipdecode.decoder import Decoder
from skipdecode.draft_length import SKIPPED, Decision, DraftLength, Prices
from skipdecode.extents import Extents, extents_of, layer_ends
from skipdecode.kv.tokens import TokensView
from skipdecode.layer_loop import run_layers
from skipdecode.logprobs import listed, top_logprobs
from skipdecode.lossless import Lossless
from skipdecode.plan import LayerPlan
from skipdecode.prefix import Sharing
from skipdecode.repeats import Repeats
from skipdecode.request import DecodeText, Request, Row, TokenLogprobs
from skipdecode.sampler import cuts, likeliest, pick
from skipdecode.short_head import ShortHead

# Ended rows keep their memory up to this share of the batch: where nothing is computed for them, to copy the others is
# dearer than to carry them.
CARRY_ENDED = {True: 7 / 8, False: 1 / 2}
SURE = 3  # tokens that repeat from which on a repeat comes before a skipped pass, where nobody decides


class SpeculativeBatch(ContinuousBatch):
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
        # looks_behind: drafts stand on what was made
        super().__init__(model, schedule, decode_text=decode_text, looks_behind=0, is_closed=is_closed)
        prices = Prices(model.config, model.dtype.itemsize, model.weight_itemsize)
        self._lossless = schedule
        self._length = length or DraftLength(schedule, prices)
        self._draft_ends = layer_ends(schedule.drafts, model.config.max_position_embeddings)
        self._full = Extents.of_plan(schedule.prefill())
        self._repeats: dict[Row, Repeats] = {}  # of rows of the batch
        self._held: tuple[int, int, Decision] | None = None  # rounds left, rows, what was decided
        self._carry = CARRY_ENDED[backend_on(model.device).takes_places]
        self._priced_s = 0.0  # of this round, by its passes
        self._lists = schedule.drafts_by_skipping and model.has_head_rows  # else a list would be learnt in vain
        self.stats = LosslessStats()

    def join(self, requests: Sequence[Request], sharing: Sharing | None = None) -> list[Row]:
        rows = super().join(requests, sharing)
        if self._lists:
            for request in requests:
                self._length.shortlist.read(request.prompt_tokens)
        return rows

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        begin, self._priced_s = now(self.model.device), 0.0
        self._drop_ended(carry=self._carry)
        chains = [
            Chain(at, len(row.tokens) - 1, [row.tokens[-1]], row.request.sampling.max_new_tokens - 1 - len(row.tokens))
            for at, row in enumerate(member.row for member in self._members)
            if row.is_running
        ]
        if not chains:
            return
        start = now(self.model.device)
        short = self._short_head()
        decision = self._decide(chains)
        for chain in chains:
            self._repeat(chain, decision)
        self._skip(chains, short)
        if decision.repeated and decision.skipped:
            for chain in chains:
                self._continue(chain, decision)
        drafted = now(self.model.device)
        self._verify(chains, drafted)
        self.stats.draft_s += drafted - start
        self._length.prices.saw_round(len(chains), now(self.model.device) - begin - self._priced_s)

    def _changed(self) -> None:
        super()._changed()
        rows = {member.row for member in self._members}
        self._repeats = {row: index for row, index in self._repeats.items() if row in rows}

    def _short_head(self) -> ShortHead | None:
        """What drafts of skipped passes choose by; None: by the head of the model."""
        listed = self._length.shortlist.tokens() if self._lists and self._params is None else None
        head = None if listed is None else self.model.short_head(listed)
        self._length.listed = None if head is None else len(head.tokens)
        return head

    # --- how many

    def _decide(self, chains: Sequence[Chain]) -> Decision:
        if self._held is None or self._held[0] == 0 or self._held[1] != len(chains):
            middle = sorted(chain.k for chain in chains)[len(chains) // 2]
            decision = self._length.decide(len(chains), middle, self._context(chains))
            self._held = (decision.rounds, len(chains), decision)
        left, rows, decision = self._held
        self._held = (left - 1, rows, decision)
        return decision

    def _context(self, chains: Sequence[Chain]) -> int:
        """Columns that a row sees in the mean."""
        return sum(self._arena.prompts[chain.at] + chain.k for chain in chains) // len(chains) + 1

    # --- drafts

    def _eos(self, chain: Chain) -> Sequence[int]:
        sampling = self._members[chain.at].row.request.sampling
        return () if sampling.ignore_eos else tuple(self.model.config.eos_token_ids)

    def _repeat(self, chain: Chain, decision: Decision) -> None:
        """Drafts what the row repeats, or leaves it to skipped passes."""
        chain.wanted = decision.skipped
        if not decision.repeated or chain.room <= 0:
            return
        found, tokens = self._index(chain).find(
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
        if not drafts or room <= 0 or chain.sources[0][0] != SKIPPED or self._lossless.draft_tokens is not None:
            return
        index = self._index(chain)
        index.add(drafts)
        found, tokens = index.find(min(max(decision.repeated.values()), room), SURE)
        index.drop(len(drafts))
        chain.add(tokens[: decision.repeated.get(found, 0)], found or SURE, self._eos(chain))

    def _index(self, chain: Chain) -> Repeats:
        """Of the row, with all its tokens."""
        row = self._members[chain.at].row
        if row not in self._repeats:
            self._repeats[row] = Repeats(row.request.prompt_tokens)
        index, made = self._repeats[row], len(row.request.prompt_tokens)
        index.add(row.tokens[len(index) - made :])
        return index

    def _skip(self, chains: Sequence[Chain], short: ShortHead | None) -> None:
        """Drafts by skipped passes, one column of all rows that want one at a time, of the tokens of `short`. The rows
        that run a layer are the youngest ones, as in the batch below."""
        rows = sorted((c for c in chains if c.wanted > 0 and c.room > 0), key=lambda c: -c.k)
        drafts = self._lossless.drafts
        while rows := [chain for chain in rows if chain.num_drafts < min(chain.wanted, chain.room)]:
            ages = [chain.k + chain.num_drafts for chain in rows]
            start = now(self.model.device)
            h = self._feed(rows, [chain.num_drafts for chain in rows], extents_of(ages, *self._draft_ends))
            places = [chain.at for chain in rows]
            _, made = self._choose_at(h, places, [age + 1 for age in ages], short)
            for chain, token, age in zip(rows, self._drafted(rows, made), ages, strict=True):
                plan = drafts.step(age)
                chain.layers += plan.num_layers_run
                chain.ffns += sum(plan.ffn)
                chain.add([token], SKIPPED, self._eos(chain))
            took_s, context = now(self.model.device) - start, self._context(chains)
            self._price("draft", drafts.step(ages[len(ages) // 2]), len(rows), len(rows), context, took_s)

    def _drafted(self, chains: Sequence[Chain], made: Tensor) -> list[int]:
        """The drafts of a skipped pass, from what it made of each chain [n]. A measurement may script them."""
        return list(made.tolist())

    # --- passes

    def _feed(self, chains: Sequence[Chain], offsets: Sequence[int], extents: Extents) -> Tensor:
        """The states [N, 1, D] behind the layers of token `offsets[i]` of `chains[i]`."""
        device, prompts = self.model.device, self._arena.prompts
        tokens = [chain.tokens[i] for chain, i in zip(chains, offsets, strict=True)]
        columns = [prompts[chain.at] + chain.k + i for chain, i in zip(chains, offsets, strict=True)]
        fed, at, places = torch.tensor([tokens, columns, [chain.at for chain in chains]], device=device)
        view = TokensView(self._arena, places, at, self.model.rotations)
        return run_layers(self.model, self.model.embed(fed[:, None], at[:, None]), view, extents)[0]

    def _choose_at(
        self, h: Tensor, places: Sequence[int], steps: Sequence[int], short: ShortHead | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Logits [N, V] where somebody wants them, and token y_k of the row at `places[i]`, k = `steps[i]`: [N]. By
        `short` for greedy drafts, whose logits nobody wants."""
        if self._params is None and (short is not None or not self._logprobs.is_asked):
            return None, self.model.likeliest(h[:, -1], short)
        logits = self.model.head(h[:, -1])
        if self._params is None:
            return logits, likeliest(logits)
        at = torch.tensor(places, device=logits.device)
        numbers = [[self._members[place].uniform(k)] for place, k in zip(places, steps, strict=True)]
        uniforms = torch.tensor(numbers, dtype=torch.float32, device=logits.device)
        temperature, top_k, top_p = self._params
        has_cuts = any(cuts(member.row.request.sampling) for member in self._members)
        return logits, pick(logits, temperature[at], top_k[at], top_p[at], uniforms, cuts=has_cuts)

    def _verify(self, chains: Sequence[Chain], start: float) -> None:
        """Feeds all chains at full depth, and gives the rows what they got."""
        spread = [(chain, i) for chain in chains for i in range(len(chain.tokens))]
        of, offsets = [chain for chain, _ in spread], [i for _, i in spread]
        h = self._feed(of, offsets, self._full)
        logits, made = self._choose_at(h, [c.at for c in of], [c.k + i + 1 for c, i in spread])
        chosen, begin = made.tolist(), 0
        full, context = self._lossless.prefill(), self._context(chains)
        newest = [0] * len(self._members)
        taken: list[tuple[Row, int, int]] = []  # rows, where their tokens begin, how many are theirs
        for chain in chains:
            row, own = self._members[chain.at].row, chosen[begin : begin + len(chain.tokens)]
            accepted = chain.num_equal(own)
            before = len(row.tokens)
            row.take(own[: accepted + 1], self.model.config.eos_token_ids, self._decode_text)
            kept = len(row.tokens) - before
            chain.layers += len(own) * full.num_layers_run
            chain.ffns += len(own) * full.num_layers_run
            row.layers += _spread(chain.layers, kept)
            row.ffns += _spread(chain.ffns, kept)
            newest[chain.at] = row.tokens[-1]
            taken.append((row, begin, kept))
            begin += len(own)
            self._length.acceptance.see(chain.sources, accepted)
            self.stats.count(chain.num_drafts, accepted)
        if self._lists:
            self._length.shortlist.wrote(
                [token for row, _, kept in taken for token in row.tokens[len(row.tokens) - kept :]]
            )
        if logits is not None:
            self._give_logprobs(taken, logits, made)
        self._newest = torch.tensor(newest, device=self.model.device)
        self._arena.reach([p + len(m.row.tokens) - 1 for p, m in zip(self._arena.prompts, self._members, strict=True)])
        self.row_steps += len(chains)
        self.stats.decode_steps += 1
        self.stats.row_steps += len(chains)
        self.stats.layer_row_steps += sum(chain.layers for chain in chains)
        took_s = now(self.model.device) - start
        self.stats.verify_s += took_s
        self._price("verify", full, len(chains), len(spread), context, took_s)

    def _price(self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, took_s: float) -> None:
        """What a pass took, the host's work with it: for few rows of a small model that is most of it."""
        listed = self._length.listed if kind == "draft" else None
        model_s = self._length.prices.model_s(plan, rows, tokens, context, listed)
        self.stats.model_decode_s += model_s
        self._length.prices.saw(kind, plan, rows, tokens, context, took_s, model_s)
        self._priced_s += took_s

    def _give_logprobs(self, taken: Sequence[tuple[Row, int, int]], logits: Tensor, made: Tensor) -> None:
        """To the rows that ask for them, of the tokens that are theirs."""
        asking = [(row, begin, kept) for row, begin, kept in taken if row.request.top_logprobs is not None]
        if not asking:
            return
        at = torch.tensor([begin + i for _, begin, kept in asking for i in range(kept)], device=logits.device)
        most = max(1, *(row.request.top_logprobs or 0 for row, _, _ in asking))
        found = iter(listed(*top_logprobs(logits[at], made[at], most)))
        for row, _, kept in asking:
            for _ in range(kept):
                one = next(found)
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))


def _spread(total: int, count: int) -> list[int]:
    """`total` over `count` tokens, the first ones getting what is left over."""
    return [total // count + (i < total % count) for i in range(count)]
