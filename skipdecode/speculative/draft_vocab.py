"""The draft vocabulary: the tokens that drafts may choose, once it covers nearly all tokens that are generated.

The head is a product with a row for every token of the vocabulary: a fifth of the weights of a small model with 49,000
tokens, and a larger share of a draft, which runs few layers. A draft needs only the tokens that are likely here, since
full depth verifies it with all of them. Lexical shortlists of machine translation (arXiv 1412.2007) and FR-Spec (arXiv
2502.14856) take theirs from a corpus beforehand; this one learns from the texts at hand. A draw by the same random
number may land on another token where some are left out, but only as far as these have any probability together.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import PackedWeight
from skipdecode.backends.pinned_copy import to_device
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import pack_head
from skipdecode.model.sampler import argmax

SHARE = 1 / 4  # of the vocabulary at most: with more of it there is little to gain
RARE = 1 / 4  # of a full list is for recent tokens, however rare
# The list is used once it covers so many of the tokens that come, since a draft of any other is refused, and given up
# when it covers fewer than the second.
ENOUGH, TOO_FEW = 0.95, 0.92
SEEN = 256  # tokens before the first list, and before its coverage is judged
KEEP = 0.996  # the weight of older tokens in the coverage, at each new one
NEW = 1 / 16  # of the list's length: unlisted tokens until it is made anew, which copies rows of the head
HALVED_EVERY = 1 << 16  # tokens, after which all counts are halved


@dataclass(frozen=True)
class DraftHead:
    """The rows of a model's head that belong to some of its tokens."""

    tokens: Tensor
    """[n] int64, ascending, so that ties resolve as they do among all tokens."""
    weight: Tensor | PackedWeight
    """[n, E] their rows."""

    @classmethod
    def of(cls, tokens: Iterable[int], model: Decoder) -> "DraftHead":
        """Copies the rows of a model that `has_unpacked_head`."""
        ids = to_device(sorted(tokens), model.device)
        rows = model.head_weight.detach()[ids]
        packed = pack_head(rows, model.quantization)
        return cls(ids, rows if packed is None else packed)

    def logits(self, x: Tensor) -> Tensor:
        """[B, E] -> [B, n]."""
        return F.linear(x, self.weight) if isinstance(self.weight, Tensor) else self.weight(x, None)

    def argmax(self, x: Tensor) -> Tensor:
        """[B, E] -> [B] int64, of the vocabulary; the lower one of equals."""
        if isinstance(self.weight, Tensor):
            return self.tokens[argmax(self.logits(x))]
        return self.tokens[self.weight.argmax(x)]


class DraftVocabulary:
    """The draft vocabulary of a model, learned from all texts that pass through it."""

    def __init__(self, vocab_size: int, tokens: Iterable[int] = (), *, learns: bool = True) -> None:
        """Without `learns` the list stays `tokens`; without these too, there is none."""
        self._most = int(SHARE * vocab_size)
        self._listed, self._learns, self._is_used = frozenset(tokens), learns, not learns
        self._counts: Counter[int] = Counter()
        self._num_counted = 0
        self._tried = self._found = 0.0
        self._missed: dict[int, None] = {}  # unlisted tokens, the latest last
        self._num_missed = 0
        self._head: tuple[frozenset[int], DraftHead] | None = None

    def head(self, model: Decoder) -> DraftHead | None:
        """The head for the listed tokens, kept as long as the list is unchanged; None: that of the model."""
        listed = self.tokens() if model.has_unpacked_head else None
        if listed is None:
            return None
        if self._head is None or self._head[0] is not listed:
            self._head = listed, DraftHead.of(listed, model)
        return self._head[1]

    def read(self, tokens: Iterable[int]) -> None:
        """Counts the tokens of a prompt, which the text after it repeats, rare ones too."""
        own = dict.fromkeys(tokens)
        self._counts.update(own.keys())
        self._miss(own)

    def wrote(self, tokens: Sequence[int]) -> None:
        """Counts tokens that full depth made."""
        if self._listed:
            for token in tokens:
                self._tried = KEEP * self._tried + 1.0
                self._found = KEEP * self._found + (token in self._listed)
        self._counts.update(tokens)
        self._miss(tokens)
        self._num_counted += len(tokens)
        if self._num_counted >= HALVED_EVERY:
            self._counts = Counter({token: count // 2 for token, count in self._counts.items() if count > 1})
            self._num_counted = 0

    @property
    def coverage(self) -> float:
        """The share of recent tokens that were listed when they came; 0 before enough have come."""
        return self._found / self._tried if self._tried >= SEEN / 2 else 0.0

    def tokens(self) -> frozenset[int] | None:
        """The list, the same object as long as it is unchanged; None if drafts may choose any token."""
        if self._learns:
            if self._num_missed > NEW * len(self._listed) and (self._listed or self._num_counted >= SEEN):
                self._list()
            self._is_used = self.coverage >= (TOO_FEW if self._is_used else ENOUGH)
        return self._listed if self._is_used and self._listed else None

    def _miss(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token not in self._listed:
                self._missed.pop(token, None)  # moves it to the end
                self._missed[token] = None
                self._num_missed += 1

    def _list(self) -> None:
        """Lists the latest unlisted tokens, up to RARE of the room, and the most frequent ones."""
        latest = list(self._missed)[-int(RARE * self._most) :]
        often = (token for token, _ in self._counts.most_common())
        self._listed = frozenset(islice(dict.fromkeys(chain(latest, often)), self._most))
        self._missed, self._num_missed = {}, 0
