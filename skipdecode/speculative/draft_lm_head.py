"""The head of a model for some of its tokens alone, which is what drafts choose among
(`skipdecode.speculative.draft_vocab`).

B rows, n tokens, E width of the head's states.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import Packed
from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.model import Quantization
from skipdecode.model.linear import pack
from skipdecode.model.sampler import argmax


@dataclass(frozen=True)
class ShortHead:
    tokens: Tensor
    """[n] int64, rising: so that ties go as they go among all."""
    weight: Tensor | Packed
    """[n, E]: their rows."""

    @classmethod
    def of(cls, tokens: Iterable[int], weight: Tensor, quantization: Quantization | None) -> "ShortHead":
        """Copies rows of `weight` [V, E], in half of their bytes where there are such weights."""
        ids = to_device(sorted(tokens), weight.device)
        rows = weight.detach()[ids]
        packed = pack(rows, quantization)
        if packed is None:
            return cls(ids, rows)
        return cls(ids, backend_on(weight.device).narrowed(packed) or packed)

    def logits(self, x: Tensor) -> Tensor:
        """[B, E] -> [B, n]."""
        return F.linear(x, self.weight) if isinstance(self.weight, Tensor) else self.weight(x, None)

    def argmax(self, x: Tensor) -> Tensor:
        """[B, E] -> [B] int64, of the vocabulary; the lower one of equals."""
        if isinstance(self.weight, Tensor):
            return self.tokens[argmax(self.logits(x))]
        return self.tokens[self.weight.argmax(x)]
