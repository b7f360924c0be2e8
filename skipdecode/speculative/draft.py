"""What one row drafts in a round of lossless decoding (`skipdecode.speculative.speculative_batch`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from skipdecode.engine.continuous_batch import Member

Source = Literal["layers", "answers"] | int
"""What drafted a token: passes that skip layers, other answers, or an n-gram match in the row, given by its length."""
LAYERS: Final = "layers"


@dataclass
class Draft:
    """The newest token of a row and the tokens drafted after it, which one pass at full depth verifies."""

    member: Member
    """The row in its batch."""
    step: int
    """The decode step that feeds its newest token."""
    tokens: list[int]
    """The newest token, and the drafted ones."""
    limit: int
    """The most tokens to draft: the last new token of a row is not fed."""
    eos: Sequence[int] = ()
    """Tokens that end the row."""
    sources: list[Source] = field(default_factory=list)
    """What drafted each token."""
    wanted: int = 0
    """Tokens to draft by skipped layers."""
    layers: int = 0
    """Layers run for the row in this round."""
    ffns: int = 0
    """Feed-forward blocks, likewise."""

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - 1

    @property
    def is_complete(self) -> bool:
        """True if no pass with skipped layers is to add a token."""
        return self.num_drafted >= min(self.wanted, self.limit)

    def add(self, tokens: Sequence[int], source: Source) -> None:
        """Appends drafted tokens, up to one that would end the row."""
        for token in tokens[: self.limit - self.num_drafted]:
            self.tokens.append(token)
            self.sources.append(source)
            if token in self.eos:
                self.limit = self.num_drafted
                break

    def num_accepted(self, verified: Sequence[int]) -> int:
        """Drafted tokens up to the first that differs from what full depth made at its position."""
        for i, token in enumerate(self.tokens[1:]):
            if token != verified[i]:
                return i
        return self.num_drafted


def shares(total: int, count: int) -> list[int]:
    """`total` spread evenly over `count` tokens, the first ones getting the remainder."""
    return [total // count + (i < total % count) for i in range(count)]
