"""Drafts from other answers: what followed a row's last tokens most often in the texts that the worker has written.

They run no layer, and are right where answers resemble each other: templates, classifications, several samples of one
prompt. Answers of rows that still run count as far as they have come. Prompts do not, since a model writes little of
the prompts of others, and its own is searched by `skipdecode.speculative.ngram`. No torch.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

ANSWERS: Final = "answers"
"""The source of such drafts."""
CONTEXT_TOKENS = 3  # tokens that must match
NUM_SLOTS = 1 << 20  # 14 MB, of which the system gives what has been written to
MIN_COUNT = 2  # what was seen once is refused too often
MAX_COUNT = 255


class AnswerIndex:
    """The most frequent next token of each context: a hash table of fixed size, where a majority vote chooses the
    context and the token that a slot holds. A slot that contexts share may give a wrong draft, never a wrong token."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        """`num_slots`: a power of two."""
        self._mask = num_slots - 1
        self._contexts = np.zeros(num_slots, np.int64).data  # hashes; a view, whose items are Python's numbers
        self._tokens = np.zeros(num_slots, np.int32).data
        self._counts = np.zeros(num_slots, np.uint8).data

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Counts `tokens[start:]`, each after the tokens before it."""
        contexts, votes, counts, mask = self._contexts, self._tokens, self._counts, self._mask
        begin = max(start, CONTEXT_TOKENS)
        columns = (tokens[begin - back :] for back in range(CONTEXT_TOKENS, -1, -1))
        for *before, token in zip(*columns, strict=False):
            context = hash(tuple(before))
            slot = context & mask
            count = counts[slot]
            if count and votes[slot] == token and contexts[slot] == context:
                counts[slot] = min(count + 1, MAX_COUNT)
            elif count > 1:
                counts[slot] = count - 1
            else:
                contexts[slot], votes[slot], counts[slot] = context, token, 1

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """How `tokens` are most likely to go on: up to `count` tokens, fewer where a context is not known well."""
        text = list(tokens[-CONTEXT_TOKENS:])
        while len(text) < CONTEXT_TOKENS + count:
            context = hash(tuple(text[-CONTEXT_TOKENS:]))
            slot = context & self._mask
            if self._counts[slot] < MIN_COUNT or self._contexts[slot] != context:
                break
            text.append(self._tokens[slot])
        return text[CONTEXT_TOKENS:]
