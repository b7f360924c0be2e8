"""The head of a model for some of its tokens alone, which is what drafts choose among (`skipdecode.shortlist`).

B rows, n tokens, E width of the head's states.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import Packed
from skipdecode.linear import pack
from skipdecode.sampler import likeliest
from skipdecode.uploads import uploaded


@dataclass(frozen=True)
class ShortHead:
    tokens: Tensor
    """[n] int64, rising: so ties and draws go as they go among all."""
    weight: Tensor | Packed
    """[n, E]: their rows."""
    states: Callable[[Tensor], Tensor]
    """What the rows are compared with, of the states behind the last layer."""

    @classmethod
    def of(cls, tokens: Iterable[int], weight: Tensor, states: Callable[[Tensor], Tensor]) -> "ShortHead":
        """Copies rows of `weight` [V, E]."""
        ids = uploaded(sorted(tokens), weight.device)
        rows = weight.detach()[ids]
        return cls(ids, pack(rows) or rows, states)

    def logits(self, h: Tensor) -> Tensor:
        """[B, D] -> [B, n]"""
        x = self.states(h)
        return F.linear(x, self.weight) if isinstance(self.weight, Tensor) else self.weight(x, None)

    def likeliest(self, h: Tensor) -> Tensor:
        """[B, D] -> [B] int64, of the vocabulary; the lower one of equals."""
        if isinstance(self.weight, Tensor):
            return self.tokens[likeliest(self.logits(h))]
        return self.tokens[self.weight.likeliest(self.states(h))]
