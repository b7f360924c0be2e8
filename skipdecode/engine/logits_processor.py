"""Logits processors: what rows change in the model's logits before a token is chosen from them.

In this order, in float32: `logit_bias`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`,
`min_new_tokens`. Definitions and order are those of transformers' processors, and OpenAI's for presence and frequency.
Structured outputs then leave the tokens that the row's grammar allows.
`min_p` looks at what temperature, top_k and top_p leave, so for rows that have it these are applied here too, and
`skipdecode.model.sampler` has nothing left to cut.

A row's logits depend on its own tokens alone, drafted ones included, so a draft and its verification see the same ones.
Rows that ask for nothing keep the model's. What grammars allow is a bit for each token, which the fused argmax of the
LM head takes as it is (`Decoder.argmax`), so that greedy batches with structures write no logits either.

B rows, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.torch_sampling import mask_unlikely
from skipdecode.checkpoint.grammar import GrammarMatcher, fill_all
from skipdecode.engine.request import Row
from skipdecode.model.sampler import limits, mask

_NOTHING: list[int] = []


class TokenCounts:
    """The different tokens of a row's prompt and text, and how often each occurs in the text."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._place = {token: at for at, token in enumerate(dict.fromkeys(row.request.prompt_tokens))}
        self._num_prompt = len(self._place)
        self._tokens = np.fromiter(self._place, np.int64, self._num_prompt)
        self._counts = np.zeros(self._num_prompt, np.float32)
        self._num_read = 0  # of the row's tokens
        self._drafted: list[int] = []

    def move_to(self, drafted: list[int]) -> None:
        """Counts the row's tokens and `drafted` after them, and nothing else."""
        new, counted = self._row.tokens[self._num_read :], self._drafted
        if new or counted != drafted[: len(counted)]:
            self._add(counted, -1)
            counted = []
        self._add(new, 1)
        self._add(drafted[len(counted) :], 1)
        self._num_read, self._drafted = self._num_read + len(new), list(drafted)

    def seen(self) -> np.ndarray:
        """The tokens of the prompt and the text, int64."""
        count = len(self._place)
        is_seen = self._counts[:count] > 0
        is_seen[: self._num_prompt] = True
        return self._tokens[:count][is_seen]

    def made(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the text, int64, and how often each occurs, float32."""
        at = np.flatnonzero(self._counts[: len(self._place)])
        return self._tokens[at], self._counts[at]

    def _add(self, tokens: Sequence[int], times: int) -> None:
        for token in tokens:
            at = self._place.setdefault(token, len(self._place))
            if at == len(self._tokens):
                room = np.zeros(at + 64, np.int64)
                self._tokens = np.concatenate([self._tokens, room])
                self._counts = np.concatenate([self._counts, room.astype(np.float32)])
            self._tokens[at] = token
            self._counts[at] += times


class GrammarState:
    """The matcher of a row with structured outputs."""

    def __init__(self, row: Row) -> None:
        grammar = row.request.grammar
        assert grammar is not None, f"row {row.request.id!r}: structured outputs are not compiled"
        self._row, self.matcher = row, grammar.matcher(row.request.id)
        self._num_read = 0  # of the row's tokens
        self._drafted: list[int] = []

    def move_to(self, drafted: list[int]) -> bool:
        """Moves behind the row's tokens and `drafted`; False if the grammar forbids these, and no token may follow."""
        new, kept = self._row.tokens[self._num_read :], self._drafted
        if new or kept != drafted[: len(kept)]:
            self.matcher.rollback(len(kept))
            kept = []
        accepted = self.matcher.accept(new)
        assert accepted == len(new), f"row {self._row.request.id!r}: its grammar forbids a token that was chosen"
        self._num_read += len(new)
        more = drafted[len(kept) :]
        accepted = self.matcher.accept(more)
        self._drafted = [*kept, *more[:accepted]]
        return accepted == len(more)


class _Change(NamedTuple):
    """One kind of change: a row of the batch, a token and a value for each logit that it concerns."""

    at: list[np.ndarray]
    tokens: list[np.ndarray]
    values: list[np.ndarray]

    @classmethod
    def none(cls) -> "_Change":
        return cls([], [], [])

    def add(self, at: int, tokens: np.ndarray, values: np.ndarray | float) -> None:
        self.at.append(np.full(len(tokens), at))
        self.tokens.append(tokens)
        self.values.append(np.broadcast_to(np.asarray(values, np.float32), len(tokens)))

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The index of the logits, and the values."""
        at, tokens, values = (np.concatenate(parts) for parts in self)
        return (to_device(at, device), to_device(tokens, device)), to_device(values, device)


class LogitsProcessor:
    """The processor of a batch; it holds what it has counted of each row."""

    def __init__(self, eos_token_ids: Collection[int], vocab_size: int, device: torch.device) -> None:
        """`device`: of the logits."""
        self._eos, self._vocab_size, self._device = tuple(eos_token_ids), vocab_size, device
        self._counts: dict[Row, TokenCounts] = {}
        self._grammars: dict[Row, GrammarState] = {}

    def keep(self, rows: Collection[Row]) -> None:
        """Forgets all other rows."""
        self._counts = {row: counts for row, counts in self._counts.items() if row in rows}
        self._grammars = {row: state for row, state in self._grammars.items() if row in rows}

    def num_allowed(self, row: Row, tokens: list[int]) -> int:
        """How many of the tokens, as drafts of the row, its grammar allows."""
        if row.request.grammar is None:
            return len(tokens)
        state = self._state(row)
        state.move_to([])
        return state.matcher.num_allowed(tokens)

    def _state(self, row: Row) -> GrammarState:
        return self._grammars.get(row) or self._grammars.setdefault(row, GrammarState(row))

    def __call__(self, logits: Tensor, rows: Sequence[Row], drafted: Sequence[list[int]] = ()) -> Tensor:
        """The logits [B, V] to choose from, float32 where more changes than the mask; `logits` are left as they are.

        `rows`: the row of each, of which the batch may have fewer; `drafted`: tokens after the row's own that each one
        follows.
        """
        asking = [at for at, row in enumerate(rows) if row.is_running and row.request.sampling.changes_logits]
        allowed = self.allowed(rows, drafted, len(logits))
        if not asking and allowed is None:
            return logits
        made = logits.to(torch.float32 if asking else logits.dtype, copy=True)
        self._change(made, asking, rows, drafted)
        if allowed is not None:
            mask(made, allowed)
        limited = [at for at in asking if rows[at].request.sampling.has_min_p]
        if limited:
            where = to_device(limited, made.device)
            made[where] = mask_unlikely(
                made[where], *limits([rows[at].request.sampling for at in limited], made.device)
            )
        return made

    def allowed(
        self, rows: Sequence[Row], drafted: Sequence[list[int]] = (), num_rows: int | None = None
    ) -> Tensor | None:
        """Which tokens the grammars of rows allow: [B, ceil(V / 32)] int32, a bit for each; None if all rows may have
        all. `rows` and `drafted` as for logits; `num_rows`: B, if it is not the number of `rows`."""
        asking = [at for at, row in enumerate(rows) if row.is_running and row.request.grammar is not None]
        if not asking:
            return None
        bits = np.full((num_rows or len(rows), -(-self._vocab_size // 32)), -1, np.int32)
        matchers: dict[int, GrammarMatcher] = {}
        for at in asking:
            state = self._state(rows[at])
            if not state.move_to(drafted[at] if drafted else _NOTHING):
                continue  # a draft before it will be refused
            if drafted:  # the matcher moves on to the row's next position
                state.matcher.fill(bits[at])
            else:
                matchers[at] = state.matcher
        if matchers:
            fill_all(matchers, bits, torch.get_num_threads())
        return to_device(bits, self._device)

    def _change(self, logits: Tensor, asking: Sequence[int], rows: Sequence[Row], drafted: Sequence[list[int]]) -> None:
        """Changes single logits of the rows `asking`, in place."""
        bias, repetition, presence, frequency, banned = (_Change.none() for _ in range(5))
        for at in asking:
            row, after = rows[at], drafted[at] if drafted else _NOTHING
            sampling = row.request.sampling
            if sampling.logit_bias:
                tokens, biases = zip(*sampling.logit_bias, strict=True)
                bias.add(at, np.array(tokens, np.int64), np.array(biases, np.float32))
            if sampling.penalizes:
                counts = self._counts.get(row) or self._counts.setdefault(row, TokenCounts(row))
                counts.move_to(after)
                if sampling.repetition_penalty != 1:
                    repetition.add(at, counts.seen(), sampling.repetition_penalty)
                made, times = counts.made()
                if sampling.presence_penalty:
                    presence.add(at, made, sampling.presence_penalty)
                if sampling.frequency_penalty:
                    frequency.add(at, made, times * np.float32(sampling.frequency_penalty))
            if len(row.tokens) + len(after) < sampling.min_new_tokens:
                ends = (*(() if sampling.ignore_eos else self._eos), *sampling.stop_token_ids)
                banned.add(at, np.array(ends, np.int64), np.inf)
        if bias.at:
            index, values = bias.on(logits.device)
            logits[index] += values
        if repetition.at:
            index, values = repetition.on(logits.device)
            own = logits[index]
            logits[index] = torch.where(own < 0, own * values, own / values)
        for change in (presence, frequency, banned):
            if change.at:
                index, values = change.on(logits.device)
                logits[index] -= values
