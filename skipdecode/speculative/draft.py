"""The drafts of a row in a round of lossless decoding (`skipdecode.speculative.speculative_batch`). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from skipdecode.speculative.draft_length import Source


@dataclass
class Chain:
    """A row in a round: its newest token, and what is drafted behind it."""

    at: int
    """The row of the batch."""
    k: int
    """Of its newest token."""
    tokens: list[int]
    """That token, and the drafts."""
    room: int
    """Drafts at most: the last new token of a row is not fed."""
    sources: list[Source] = field(default_factory=list)
    wanted: int = 0
    """Drafts by skipped passes."""
    layers: int = 0
    """Run for it in this round."""
    ffns: int = 0

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - 1

    def num_equal(self, made: Sequence[int]) -> int:
        """Drafts up to the first that is not what full depth made, by column."""
        for i, draft in enumerate(self.tokens[1:]):
            if draft != made[i]:
                return i
        return self.num_drafts

    def add(self, tokens: Sequence[int], kind: int, eos: Sequence[int]) -> None:
        """Drafts, up to one that would end the row."""
        before = sum(1 for _ in takewhile(lambda source: source[0] == kind, reversed(self.sources)))
        for place, token in enumerate(tokens[: self.room - self.num_drafts], start=before):
            self.tokens.append(token)
            self.sources.append((kind, place))
            if token in eos:
                self.room = self.num_drafts
                break


def shares(total: int, count: int) -> list[int]:
    """`total` over `count` tokens, the first ones getting what is left over."""
    return [total // count + (i < total % count) for i in range(count)]
