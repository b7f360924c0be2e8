"""Drafts by repetition: what followed the last few tokens of a row where they stood before, in its prompt or its text.

Costs no layer at all, and pays where outputs quote inputs: summaries, edits, templates. No torch.
"""

from array import array
from collections.abc import Collection, Sequence

from skipdecode.engine.request import Row

SHORTEST, LONGEST = 2, 4  # tokens that must repeat; longer repeats are looked for first
_BYTES = array("i").itemsize


class Repeats:
    """The index of one row: its tokens as they lie in memory, which C searches faster than a table would be kept."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = bytearray(array("i", tokens).tobytes())

    def __len__(self) -> int:
        return len(self._text) // _BYTES

    def add(self, tokens: Sequence[int]) -> None:
        self._text += array("i", tokens).tobytes()

    def drop(self, count: int) -> None:
        """Takes the last `count` tokens away."""
        if count:
            del self._text[-count * _BYTES :]

    def find(self, count: int, shortest: int = SHORTEST) -> tuple[int, list[int]]:
        """How many of the last tokens stood before, at most LONGEST, and `count` tokens as they went on there last; 0
        and none where fewer than `shortest` did. What runs into the end goes round again: a loop has a period."""
        for length in range(min(LONGEST, len(self) - 1), shortest - 1, -1):
            at = self._last(length)
            if at is not None:
                behind = array("i", bytes(self._text[(at + length) * _BYTES :])[: count * _BYTES]).tolist()
                return length, [behind[i % len(behind)] for i in range(count)] if count else []
        return 0, []

    def _last(self, length: int) -> int | None:
        """Where the last `length` tokens stood the last time before."""
        tail, end = bytes(self._text[-length * _BYTES :]), len(self._text) - _BYTES
        while (at := self._text.rfind(tail, 0, end)) >= 0:
            if at % _BYTES == 0:
                return at // _BYTES
            end = at + len(tail) - 1
        return None


class RepeatsOfRows:
    """The indexes of the rows of a batch, made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[Row, Repeats] = {}

    def of(self, row: Row) -> Repeats:
        """With all tokens that the row has by now."""
        prompt = row.request.prompt_tokens
        index = self._made.get(row)
        if index is None:
            index = self._made[row] = Repeats(prompt)
        index.add(row.tokens[len(index) - len(prompt) :])
        return index

    def keep(self, rows: Collection[Row]) -> None:
        """Forgets all others."""
        self._made = {row: index for row, index in self._made.items() if row in rows}
