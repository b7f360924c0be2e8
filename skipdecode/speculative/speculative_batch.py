"""Speculative decoding at full depth: a few cheap drafts per row, verified by one pass for all rows.

A round drafts tokens, by n-gram matches and by passes that skip layers over the keys and values of full depth, and then
feeds each row's newest token and its drafts through all layers. What full depth makes after token i is the row's next
token as long as the drafts before it were what full depth made. Token k of a row is chosen by its random number k, in
a draft as in a verification, so the tokens are those of full depth, greedy or sampled, whatever was drafted.

Verification writes keys and values of every token that it feeds. Cache entries after a row's last accepted token are
stale until the next round overwrites them. Not here: how many tokens to draft (`controller`), passes and plain steps
(`ragged_batch`), and running a batch to its end (`generate_lossless`).
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row
from skipdecode.engine.static_batch import synchronized_time
from skipdecode.kv.slot_cache import TokensView
from skipdecode.model.decoder import Decoder
from skipdecode.model.sampler import argmax
from skipdecode.schedules.layer_ranges import layer_ends, ranges_by_age
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import Decision, SpeculationController
from skipdecode.speculative.draft import LAYERS, Draft, shares
from skipdecode.speculative.draft_vocab import DraftHead
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.ngram import NgramProposer
from skipdecode.speculative.ragged_batch import Draws, RaggedBatch

READ_EVERY = 8  # plain steps, of which one is read by the draft vocabulary: some of the text says enough


class SpeculativeBatch(RaggedBatch):
    """A `ContinuousBatch` at full depth whose steps are rounds: every row gets one token or several."""

    def __init__(
        self,
        model: Decoder,
        schedule: Lossless,
        *,
        decode_text: DecodeText | None = None,
        controller: SpeculationController | None = None,
        is_closed: bool = False,
    ) -> None:
        """`controller`: decides for this batch, and learns from it; None: one of its own, without a clock. `is_closed`
        as in `ContinuousBatch`."""
        super().__init__(model, schedule, decode_text=decode_text, is_closed=is_closed)
        self._lossless = schedule
        self._controller = controller or SpeculationController(schedule, LatencyModel.of(model))
        self._latency = self._controller.latency
        self._draft_ends = layer_ends(schedule.drafts, model.config.max_position_embeddings)
        self._proposer = NgramProposer()
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
        running = self._running()
        if not running:
            return
        steps = sorted(len(self._members[slot].row.tokens) - 1 for slot in running)
        num_rows = len(running)
        context = (sum(self._cache.prompts[slot] for slot in running) + sum(steps)) // num_rows + 1
        decision = self._controller.decide(num_rows, steps[num_rows // 2], context)
        if decision.has_drafts:
            num_tokens = self._drafted_round(running, decision, context)
        else:
            num_tokens = self._plain_round(running, context)
        took_s = synchronized_time(self._device) - begin
        self.row_steps += num_rows
        self.stats.decode_steps += 1
        self.stats.row_steps += num_rows
        self.stats.count_round(decision.outcome)
        self._controller.observe(decision, num_rows, context, num_tokens, took_s)

    def _changed(self) -> None:
        super()._changed()
        self._proposer.keep({member.row for member in self._members})

    def _plain_round(self, running: list[int], context: int) -> int:
        """A plain step of the rows in the slots `running`; how many tokens it made."""
        begin = synchronized_time(self._device)
        tokens = self._plain_step(running)
        if self._has_vocabulary and self.stats.decode_steps % READ_EVERY == 0:
            self._controller.vocabulary.wrote(tokens)
        took_s = synchronized_time(self._device) - begin
        predicted_s = self._latency.roofline_s(self._lossless.full_plan, len(running), len(running), context)
        self._latency.observe("plain", len(running), took_s, predicted_s)
        self.stats.verify_s += took_s
        self.stats.model_decode_s += predicted_s
        return len(tokens)

    def _drafted_round(self, running: Sequence[int], decision: Decision, context: int) -> int:
        """A round with drafts; how many tokens it made."""
        self._repeated_step = None
        begin = synchronized_time(self._device)
        drafts = [self._new_draft(slot, decision) for slot in running]
        if any(not draft.is_complete for draft in drafts):
            self._draft_by_layers(drafts, context)
        drafted = synchronized_time(self._device)
        made = self._verify(drafts, context)
        self.stats.draft_s += drafted - begin
        self.stats.verify_s += synchronized_time(self._device) - drafted
        return made

    def _new_draft(self, slot: int, decision: Decision) -> Draft:
        """A row's draft: by an n-gram that is as good as skipped layers, else with tokens that these are to add."""
        row = self._members[slot].row
        sampling = row.request.sampling
        draft = Draft(
            slot,
            step=len(row.tokens) - 1,
            tokens=[row.tokens[-1]],
            limit=sampling.max_new_tokens - 1 - len(row.tokens),
            eos=(*(() if sampling.ignore_eos else self.model.config.eos_token_ids), *sampling.stop_token_ids),
            wanted=decision.layer_tokens,
        )
        length, tokens = self._proposer.propose(row, decision.ngram_tokens, draft.limit)
        rates = self._controller.acceptance.rates
        if tokens and (not decision.layer_tokens or rates[length] >= rates[LAYERS]):
            draft.add(tokens, length)
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
            slots = [draft.slot for draft in rows]
            tokens, view = self._inputs(rows, [draft.num_drafted for draft in rows])
            steps = [draft.step + draft.num_drafted for draft in rows]
            if self._params is not None:
                most = max(draft.wanted - draft.num_drafted for draft in rows)
                draws = self._draws(slots, [step + 1 for step in steps], most)
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
            rows = [self._members[draft.slot].row for draft in drafts]
            logits = self._process(model.head(h), rows, [draft.tokens[1:] for draft in drafts])
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
        prompts = self._cache.prompts
        tokens = [draft.tokens[i] for draft, i in zip(drafts, offsets, strict=True)]
        positions = [prompts[draft.slot] + draft.step + i for draft, i in zip(drafts, offsets, strict=True)]
        slots = [draft.slot for draft in drafts]
        fed, at, where = to_device([tokens, positions, slots], self._device)
        return fed, self._view(where, at, max(Counter(slots).values()))

    def _verify(self, drafts: Sequence[Draft], context: int) -> int:
        """Feeds all drafts at full depth and gives the rows what was accepted, and one token more; how many tokens."""
        begin = synchronized_time(self._device)
        spread = [(draft, i) for draft in drafts for i in range(len(draft.tokens))]
        owners, offsets = [draft for draft, _ in spread], [i for _, i in spread]
        h = self._feed(*self._inputs(owners, offsets), self._full)
        slots = [draft.slot for draft in owners]
        draws = self._draws(slots, [draft.step + i + 1 for draft, i in spread])
        followed = [draft.tokens[1 : i + 1] for draft, i in spread] if self._is_processed else ()
        found, made = self._choose_at(h, slots, draws, followed)
        chosen, start, num_kept = made.tolist(), 0, 0
        fed: list[tuple[Row, int, int]] = []  # rows, their tokens that were fed, and how many new ones they keep
        for draft in drafts:
            row, own = self._members[draft.slot].row, chosen[start : start + len(draft.tokens)]
            accepted, before = draft.num_accepted(own), len(row.tokens)
            row.take(own[: accepted + 1], self.model.config.eos_token_ids, self._decode_text)
            kept = len(row.tokens) - before
            draft.layers += len(own) * self._depth
            draft.ffns += len(own) * self._depth
            row.layers += shares(draft.layers, kept)
            row.ffns += shares(draft.ffns, kept)
            fed.append((row, len(own), kept))
            start, num_kept = start + len(own), num_kept + kept
            self._controller.acceptance.observe(draft.sources, accepted)
            self.stats.count_drafts(draft.num_drafted, accepted)
            if self._has_vocabulary:
                self._controller.vocabulary.wrote(row.tokens[before:])
        if found:
            self._give_logprobs(fed, found)
        self.stats.layer_row_steps += sum(draft.layers for draft in drafts)
        predicted_s = self._latency.roofline_s(self._lossless.full_plan, len(drafts), len(spread), context)
        self._latency.observe("verify", len(drafts), synchronized_time(self._device) - begin, predicted_s)
        self.stats.model_decode_s += predicted_s
        return num_kept
