"""Drafts by n-gram matches (prompt lookup): what followed a row's last tokens where they stood before.

They run no layer at all, and are right where outputs quote inputs: summaries, edits, templates. No torch.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skipdecode.engine.request import Row
from skipdecode.speculative.answer_index import ANSWERS, CONTEXT_TOKENS, AnswerIndex

if TYPE_CHECKING:
    from skipdecode.speculative.draft import Source

SHORTEST, LONGEST = 2, 4  # tokens that must match; longer matches are preferred
COUNT_EVERY = 16  # rows without drafts, of which one is counted: some of the text says enough, and counting takes time
_BYTES = array("i").itemsize


class TokenIndex:
    """The tokens of one row as they lie in memory, which `rfind` searches faster than a table could be kept."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = bytearray(array("i", tokens).tobytes())

    def __len__(self) -> int:
        return len(self._text) // _BYTES

    def add(self, tokens: Sequence[int]) -> None:
        self._text += array("i", tokens).tobytes()

    def find(self, count: int, shortest: int = SHORTEST) -> tuple[int, list[int]]:
        """The length of the longest n-gram at the end that stood before, LONGEST at most, and `count` tokens as they
        went on after its last occurrence; 0 and none if even `shortest` tokens did not. A continuation that reaches the
        end starts over: a loop has a period."""
        for length in range(min(LONGEST, len(self) - 1), shortest - 1, -1):
            at = self._last(length)
            if at is not None:
                after = array("i", bytes(self._text[(at + length) * _BYTES :])[: count * _BYTES]).tolist()
                return length, [after[i % len(after)] for i in range(count)] if count else []
        return 0, []

    def _last(self, length: int) -> int | None:
        """Where the last `length` tokens stood the last time before."""
        tail, end = bytes(self._text[-length * _BYTES :]), len(self._text) - _BYTES
        while (at := self._text.rfind(tail, 0, end)) >= 0:
            if at % _BYTES == 0:
                return at // _BYTES
            end = at + len(tail) - 1
        return None


class NgramProposer:
    """Proposes drafts for the rows of a batch: each from its prompt and its text, and from the answers of all."""

    def __init__(self, answers: AnswerIndex) -> None:
        self._answers = answers
        self._indexes: dict[Row, TokenIndex] = {}
        self._num_counted: dict[Row, int] = {}
        """Of each row, the tokens that `answers` has counted."""
        self._num_uncounted = 0
        """Rows that have ended without a draft from `answers`."""

    def propose(
        self, row: Row, num_tokens: "Mapping[Source, int]", limit: int, rates: "Mapping[Source, float]"
    ) -> "tuple[Source, list[int]]":
        """The source of the most promising draft, and its tokens: as many as `num_tokens` has for that source, `limit`
        at most; none without a match. `rates`: the acceptance by source."""
        if not num_tokens or limit <= 0:
            return 0, []
        length, tokens = 0, list[int]()
        if counts := {source: count for source, count in num_tokens.items() if isinstance(source, int)}:
            length, tokens = self._index(row).find(min(max(counts.values()), limit), min(counts))
            tokens = tokens[: counts.get(length, 0)]
        if ANSWERS in num_tokens and not (tokens and rates[length] >= rates[ANSWERS]):
            self._count(row)
            if found := self._answers.propose(_before(row, len(row.tokens)), min(num_tokens[ANSWERS], limit)):
                return ANSWERS, found
        return length, tokens

    def forget(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left the batch, once what they have written is counted. Of rows for which `answers`
        was never asked, one in COUNT_EVERY is."""
        for row in rows:
            counted = self._num_counted.pop(row, 0)
            if counted or self._num_uncounted % COUNT_EVERY == 0:
                self._count_from(row, counted)
            self._num_uncounted += not counted
            self._indexes.pop(row, None)

    def _count(self, row: Row) -> None:
        self._count_from(row, self._num_counted.get(row, 0))
        self._num_counted[row] = len(row.tokens)

    def _count_from(self, row: Row, counted: int) -> None:
        before = _before(row, counted)
        self._answers.add([*before, *row.tokens[counted:]], len(before))

    def _index(self, row: Row) -> TokenIndex:
        prompt = row.request.prompt_tokens
        index = self._indexes.get(row)
        if index is None:
            index = self._indexes[row] = TokenIndex(prompt)
        index.add(row.tokens[len(index) - len(prompt) :])
        return index


def _before(row: Row, at: int) -> list[int]:
    """The context of token `at` of a row's answer."""
    begin = at - CONTEXT_TOKENS
    return row.tokens[begin:at] if begin >= 0 else [*row.request.prompt_tokens[begin:], *row.tokens[:at]]
