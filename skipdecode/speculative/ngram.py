"""Drafts by n-gram matches (prompt lookup): what followed a row's last tokens where they stood before.

They run no layer at all, and are right where outputs quote inputs: summaries, edits, templates. No torch.
"""

from array import array
from collections.abc import Collection, Sequence

from skipdecode.engine.request import Row

SHORTEST, LONGEST = 2, 4  # tokens that must match; longer matches are preferred
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
    """Proposes drafts for the rows of a batch, each from an index of its prompt and its text."""

    def __init__(self) -> None:
        self._indexes: dict[Row, TokenIndex] = {}

    def propose(self, row: Row, num_tokens: dict[int, int], limit: int) -> tuple[int, list[int]]:
        """The length of the n-gram and the drafted tokens, as many as `num_tokens` has for that length; 0 and none
        without a match."""
        if not num_tokens or limit <= 0:
            return 0, []
        length, tokens = self._index(row).find(min(max(num_tokens.values()), limit), min(num_tokens))
        return length, tokens[: num_tokens.get(length, 0)]

    def keep(self, rows: Collection[Row]) -> None:
        """Forgets all other rows."""
        self._indexes = {row: index for row, index in self._indexes.items() if row in rows}

    def _index(self, row: Row) -> TokenIndex:
        prompt = row.request.prompt_tokens
        index = self._indexes.get(row)
        if index is None:
            index = self._indexes[row] = TokenIndex(prompt)
        index.add(row.tokens[len(index) - len(prompt) :])
        return index
