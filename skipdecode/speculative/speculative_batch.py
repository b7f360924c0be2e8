"""Speculative decoding at full depth: a few cheap drafts per row, verified by one pass for all rows.

A round drafts tokens, by n-gram matches in the row and in other answers and by passes that skip layers over the keys
and values of full depth, and then feeds each row's newest token and its drafts through all layers. What full depth
makes after token i is the row's next token as long as the drafts before it were what full depth made. Token k of a row
is chosen by its random number k, in a draft as in a verification, so the tokens are those of full depth, greedy or
sampled, whatever was drafted.

Verification writes keys and values of every token that it feeds. Cache entries after a row's last accepted token are
stale until the next round overwrites them. A round without drafts is a step of `ContinuousBatch`, so that what drafts
gain is measured against a batch that never drafts. Not here: how many tokens to draft (`controller`), and running a
batch to its end (`skipdecode.engine.generate`).

N tokens of a pass, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.continuous_batch import ContinuousBatch, Member
from skipdecode.engine.logprobs import listed, top_logprobs
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row
from skipdecode.engine.results import DraftKind, LosslessStats, TokenLogprobs
from skipdecode.engine.static_batch import synchronized_time
from skipdecode.kv.slot_cache import TokensView
from skipdecode.model.decoder import Decoder
from skipdecode.model.sampler import argmax, cuts, pick
from skipdecode.schedules.layer_ranges import LayerRanges, layer_ends, ranges_by_age
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import Decision, SpeculationController
from skipdecode.speculative.draft import LAYERS, Draft, Source, shares
from skipdecode.speculative.draft_vocab import DraftHead
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.ngram import NgramProposer

FEW = 64  # tokens that are chosen at a time at least: each time reads the head
READ_EVERY = 16  # plain steps, of which one is read by the draft vocabulary: some of the text says enough


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
class PlainRounds:
    """Rounds without drafts that follow one decision, of about as many rows."""

    decision: Decision
    first_rows: int
    """Rows of the first one."""
    context: int
    """Their mean context length."""
    num_rounds: int = 0
    row_rounds: int = 0
    """The sum of rows over the rounds."""
    took_s: float = 0.0

    def holds_for(self, num_rows: int) -> bool:
        return num_rows.bit_length() == self.first_rows.bit_length()


class SpeculativeBatch(ContinuousBatch):
    """A `ContinuousBatch` at full depth whose steps are rounds: every row gets one token or several."""

    def __init__(
        self,
        model: Decoder,
        schedule: Lossless,
        *,
        decode_text: DecodeText | None = None,
        controller: SpeculationController | None = None,
    ) -> None:
        """`controller`: decides for this batch, and learns from it; None: one of its own, without a clock."""
        # max_pending: the next round depends on what this one makes
        super().__init__(model, schedule, decode_text=decode_text, max_pending=0)
        self._full = LayerRanges.of_plan(schedule.full_plan)
        self._depth = schedule.full_plan.num_layers_run
        self._device = model.device
        self._has_cuts = False
        self._plain: PlainRounds | None = None
        self.stats: LosslessStats = LosslessStats()
        self._lossless = schedule
        self._controller = controller or SpeculationController(schedule, LatencyModel.of(model))
        self._latency = self._controller.latency
        self._draft_ends = layer_ends(schedule.drafts, model.config.max_position_embeddings)
        self._proposer = NgramProposer(self._controller.answers)
        self._has_vocabulary = schedule.drafts_by_skipping and model.has_unpacked_head

    def join(self, requests: Sequence[Request], sharing: PrefixSharing | None = None) -> list[Row]:
        rows = super().join(requests, sharing)
        if self._has_vocabulary:
            for request in requests:
                self._controller.vocabulary.read(request.prompt_tokens)
        return rows

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        begin = synchronized_time(self._device)
        self._drop_ended()
        if not self._members:
            return
        self._round(begin)
        if self.is_done:
            self._drop_ended()  # their answers help the next batch

    def _round(self, begin: float) -> None:
        """`begin`: when it began."""
        if self._plain is None:
            num_rows = len(self._members)
            steps = sorted(len(member.row.tokens) - 1 for member in self._members)
            prompts = [len(member.row.request.prompt_tokens) for member in self._members]
            context = (sum(prompts) + sum(steps)) // num_rows + 1
            decision = self._controller.decide(num_rows, steps[num_rows // 2], context)
            if decision.has_drafts:
                num_tokens = self._drafted_round(decision, context)
                took_s = synchronized_time(self._device) - begin
                self.stats.count_round(decision.outcome)
                self._controller.observe(decision, num_rows, context, num_tokens, took_s)
                return
            self._plain = PlainRounds(decision, num_rows, context)
        self._plain_round(self._plain)
        self._plain.took_s += synchronized_time(self._device) - begin
        if self._plain.num_rounds == self._plain.decision.num_rounds or self.is_done:
            self._end_plain_rounds()

    def _changed(self) -> None:
        if self._plain is not None and not self._plain.holds_for(len(self._members)):
            self._end_plain_rounds()
        self._has_cuts = self._params is not None and any(cuts(member.row.request.sampling) for member in self._members)
        super()._changed()

    def _leave(self, members: Sequence[Member]) -> None:
        self._proposer.forget([member.row for member in members])
        super()._leave(members)

    def _plain_round(self, plain: PlainRounds) -> None:
        self._feed_newest()
        self._read_output()
        if self._has_vocabulary and self.stats.decode_steps % READ_EVERY == 0:
            self._controller.vocabulary.wrote([member.row.tokens[-1] for member in self._members])
        self.stats.count_round(plain.decision.outcome)
        plain.num_rounds += 1
        plain.row_rounds += len(self._members)

    def _end_plain_rounds(self) -> None:
        """Counts the plain rounds that followed one decision, and lets the controller learn from them."""
        plain, self._plain = self._plain, None
        if plain is None or not plain.num_rounds:
            return
        num_rounds, context = plain.num_rounds, plain.context + plain.num_rounds // 2
        num_rows = round(plain.row_rounds / num_rounds)
        predicted_s = num_rounds * self._latency.roofline_s(self._lossless.full_plan, num_rows, num_rows, context)
        self._latency.observe("plain", num_rows, plain.took_s, predicted_s)
        self.stats.verify_s += plain.took_s
        self.stats.model_decode_s += predicted_s
        self._controller.observe(plain.decision, num_rows, context, num_rows * num_rounds, plain.took_s, num_rounds)

    def _drafted_round(self, decision: Decision, context: int) -> int:
        """A round with drafts; how many tokens it made."""
        begin = synchronized_time(self._device)
        drafts = [self._new_draft(member, decision) for member in self._members]
        if any(not draft.is_complete for draft in drafts):
            self._draft_by_layers(drafts, context)
        drafted = synchronized_time(self._device)
        made = self._verify(drafts, context)
        self._view = None  # rows have moved on by different numbers of tokens
        self._newest = to_device([member.row.tokens[-1] for member in self._members], self._device, torch.int64)
        self._num_steps += 1
        self.stats.decode_steps += 1
        self.stats.row_steps += len(drafts)
        self.stats.draft_s += drafted - begin
        self.stats.verify_s += synchronized_time(self._device) - drafted
        return made

    def _new_draft(self, member: Member, decision: Decision) -> Draft:
        """A row's draft: by an n-gram match, else with tokens that skipped layers are to add."""
        row = member.row
        sampling = row.request.sampling
        draft = Draft(
            member,
            step=len(row.tokens) - 1,
            tokens=[row.tokens[-1]],
            limit=sampling.max_new_tokens - 1 - len(row.tokens),
            eos=(*(() if sampling.ignore_eos else self.model.config.eos_token_ids), *sampling.stop_token_ids),
            wanted=decision.layer_tokens,
        )
        rates = self._controller.acceptance.rates
        source, tokens = self._proposer.propose(row, decision.ngram_tokens, draft.limit, rates)
        if self._is_processed:
            tokens = tokens[: self._process.num_allowed(row, tokens)]
        if tokens:
            draft.add(tokens, source)
            draft.wanted = 0
        return draft

    def _draft_by_layers(self, drafts: Sequence[Draft], context: int) -> None:
        """Adds drafts by passes that skip layers, each of which makes one token of every row that wants one. As in
        `ContinuousBatch`, rows at earlier steps run more layers, and come last."""
        # processed logits are those of all tokens
        has_list = self._has_vocabulary and not self._is_processed
        head = self._controller.vocabulary.head(self.model) if has_list else None
        self._controller.num_draft_outputs = None if head is None else len(head.tokens)
        begin, predicted_s, largest = synchronized_time(self._device), 0.0, 0
        rows, draws = sorted(drafts, key=lambda draft: -draft.step), None
        while rows := [draft for draft in rows if not draft.is_complete]:
            members = [draft.member for draft in rows]
            tokens, view = self._inputs(rows, [draft.num_drafted for draft in rows])
            steps = [draft.step + draft.num_drafted for draft in rows]
            if self._params is not None:
                most = max(draft.wanted - draft.num_drafted for draft in rows)
                draws = self._draws(members, [step + 1 for step in steps], most)
            largest, number = max(largest, len(rows)), 0
            while not number or not any(draft.is_complete for draft in rows):
                if number:  # the same rows, one position on
                    view.advance()
                own = None if draws is None else draws.number(number)
                made = self._draft_once(rows, steps, tokens, view, own, head)
                tokens = self._scripted(rows, made)
                for draft, token, step in zip(rows, tokens.tolist(), steps, strict=True):
                    plan = self._lossless.drafts.step(step)
                    draft.layers += plan.num_layers_run
                    draft.ffns += sum(plan.ffn)
                    draft.add([token], LAYERS)
                plan = self._lossless.drafts.step(steps[len(steps) // 2])
                outputs = self._controller.num_draft_outputs
                predicted_s += self._latency.roofline_s(plan, len(rows), len(rows), context, outputs)
                steps, number = [step + 1 for step in steps], number + 1
        self._latency.observe("draft", largest, synchronized_time(self._device) - begin, predicted_s)
        self.stats.model_decode_s += predicted_s

    def _draft_once(
        self,
        drafts: Sequence[Draft],
        steps: Sequence[int],
        tokens: Tensor,
        view: TokensView,
        draws: Draws | None,
        head: DraftHead | None,
    ) -> Tensor:
        """One pass that skips layers over `tokens` [n], the newest of `drafts`, fed at decode steps `steps`: the next
        tokens [n]."""
        model = self.model
        h = self._feed(tokens, view, ranges_by_age(steps, *self._draft_ends))[:, -1]
        if self._is_processed:
            rows, drafted = [draft.member.row for draft in drafts], [draft.tokens[1:] for draft in drafts]
            if self._wants_argmax:
                return model.argmax(h, self._process.allowed(rows, drafted))
            logits = self._process(model.head(h), rows, drafted)
            return argmax(logits) if draws is None else self._drawn(logits, draws)
        if draws is None:
            return model.argmax(h) if head is None else head.argmax(model.head_states(h))
        if head is None:
            return self._drawn(model.head(h), draws)
        return head.tokens[self._drawn(head.logits(model.head_states(h)), draws)]

    def _scripted(self, drafts: Sequence[Draft], made: Tensor) -> Tensor:
        """The drafted tokens, given those that a pass made of each draft [n]. Benchmarks may script them."""
        return made

    def _inputs(self, drafts: Sequence[Draft], offsets: Sequence[int]) -> tuple[Tensor, TokensView]:
        """Token `offsets[i]` of `drafts[i]`, those of a draft side by side: the tokens [N], and their view."""
        tokens = [draft.tokens[i] for draft, i in zip(drafts, offsets, strict=True)]
        columns = [draft.member.slot.prompt + draft.step + i for draft, i in zip(drafts, offsets, strict=True)]
        members = [draft.member for draft in drafts]
        queries = [(i, count) for count in map(len, _runs(members)) for i in range(count)]
        view = self._view_of(members, columns, None if len(queries) == len(set(members)) else queries)
        return to_device(tokens, self._device, torch.int64), view

    def _verify(self, drafts: Sequence[Draft], context: int) -> int:
        """Feeds all drafts at full depth and gives the rows what was accepted, and one token more; how many tokens."""
        begin = synchronized_time(self._device)
        spread = [(draft, i) for draft in drafts for i in range(len(draft.tokens))]
        owners, offsets = [draft for draft, _ in spread], [i for _, i in spread]
        h = self._feed(*self._inputs(owners, offsets), self._full)
        members = [draft.member for draft in owners]
        draws = self._draws(members, [draft.step + i + 1 for draft, i in spread])
        followed = [draft.tokens[1 : i + 1] for draft, i in spread] if self._is_processed else ()
        found, made = self._choose_at(h, members, draws, followed)
        chosen, start, num_kept = made.tolist(), 0, 0
        fed: list[tuple[Row, int, int]] = []  # rows, their tokens that were fed, and how many new ones they keep
        for draft in drafts:
            row, own = draft.member.row, chosen[start : start + len(draft.tokens)]
            accepted, before = draft.num_accepted(own), len(row.tokens)
            row.take(own[: accepted + 1], self.model.config.eos_token_ids, self._decode_text)
            kept = len(row.tokens) - before
            draft.member.joined_at -= kept - 1  # so many decode steps in one
            draft.layers += len(own) * self._depth
            draft.ffns += len(own) * self._depth
            for counts, ran in ((row.layers, draft.layers), (row.ffns, draft.ffns)):
                counts += [self._depth] * (before - 1 - len(counts))  # of plain rounds since the last draft
                counts += shares(ran, kept)
            fed.append((row, len(own), kept))
            start, num_kept = start + len(own), num_kept + kept
            self._controller.acceptance.observe(draft.sources, accepted)
            self.stats.count_drafts([_kind(source) for source in draft.sources], accepted)
            if self._has_vocabulary:
                self._controller.vocabulary.wrote(row.tokens[before:])
        if found:
            self._give_logprobs(fed, found)
        self.stats.layer_row_steps += sum(draft.layers for draft in drafts)
        predicted_s = self._latency.roofline_s(self._lossless.full_plan, len(drafts), len(spread), context)
        self._latency.observe("verify", len(drafts), synchronized_time(self._device) - begin, predicted_s)
        self.stats.model_decode_s += predicted_s
        return num_kept

    def _draws(self, members: Sequence[Member], steps: Sequence[int], count: int = 1) -> Draws | None:
        """For `count` tokens from y_k on, k = `steps[i]`, of `members[i]`; None if all rows are greedy."""
        params = self._params_of(members)
        if params is None:
            return None
        numbers = [member.uniforms_from(k, count) for member, k in zip(members, steps, strict=True)]
        return Draws(params, to_device(np.array(numbers, dtype=np.float32), self._device))

    def _params_of(self, members: Sequence[Member]) -> Params | None:
        params = self._params
        if params is None or list(members) == self._members:
            return params
        number = {member: at for at, member in enumerate(self._members)}
        at = to_device([number[member] for member in members], self._device)
        return params[0][at], params[1][at], params[2][at]

    def _drawn(self, logits: Tensor, draws: Draws) -> Tensor:
        """Samples one token of each row: [N, V] -> [N]."""
        return pick(logits, *draws.params, draws.uniforms, cuts=self._has_cuts)

    def _choose_at(
        self, h: Tensor, members: Sequence[Member], draws: Draws | None, drafted: Sequence[list[int]] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """The next token after each position, of `members[i]` and by its `draws` [N]; before it, what
        `top_logprobs` gives for the positions whose rows ask for log-probabilities. `drafted` as for
        `LogitsProcessor`."""
        if self._wants_argmax:
            allowed = self._process.allowed([member.row for member in members], drafted)
            return [], self.model.argmax(h.select(1, -1), allowed)
        states, most = h.select(1, -1), max(len(self._members), FEW)
        if len(h) <= most:
            return self._choose_among(states, members, draws, drafted)
        made, found = list[Tensor](), list[list[Tensor]]()
        for begin in range(0, len(h), most):  # the logits of all at once may take more memory than the cache
            part = slice(begin, begin + most)
            own = None if draws is None else draws.of(part)
            seen, chosen = self._choose_among(states[part], members[part], own, drafted[part])
            made.append(chosen)
            if seen:
                found.append(seen)
        return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.cat(made)

    def _choose_among(
        self, states: Tensor, members: Sequence[Member], draws: Draws | None, drafted: Sequence[list[int]]
    ) -> tuple[list[Tensor], Tensor]:
        """`_choose_at` for states [N, D] whose logits are held at once."""
        logits = self.model.head(states)
        processed = self._process(logits, [member.row for member in members], drafted)
        made = argmax(processed) if draws is None else self._drawn(processed, draws)
        if not self._logprobs.is_asked:
            return [], made
        own = [i for i, member in enumerate(members) if member.row.request.top_logprobs is not None]
        if len(own) == len(members):
            return list(top_logprobs(logits, made, self._logprobs.num_top)), made
        return list(top_logprobs(logits[own], made[own], self._logprobs.num_top)) if own else [], made

    def _give_logprobs(self, fed: Sequence[tuple[Row, int, int]], found: Sequence[Tensor]) -> None:
        """Hands log-probabilities to the rows that ask. `fed`: rows, how many of their tokens were fed, and how many of
        the new ones they keep."""
        one_by_one = iter(listed(*found))
        for row, num_fed, kept in fed:
            if row.request.top_logprobs is None:
                continue
            for one in [next(one_by_one) for _ in range(num_fed)][:kept]:
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))


def _kind(source: Source) -> DraftKind:
    return "row" if isinstance(source, int) else source


def _runs(members: Sequence[Member]) -> list[list[Member]]:
    """The members, with those that stand side by side in a list of their own."""
    return [list(run) for _, run in groupby(members)]
