"""Which tokens drafts choose among: those that prompts and texts had so far, once nearly all that come are of them.

The head is a product with a row for every token of the vocabulary: a fifth of the weights of a small model with 49,000
tokens, and more than that of a draft, which runs few layers. A draft needs no more than the tokens that are likely
here, since full depth verifies it with all of them. Compare the lexical shortlists of machine translation (arXiv
1412.2007) and FR-Spec (arXiv 2502.14856), which take theirs from a corpus beforehand; this one learns what the texts at
hand are made of. A draw by the same random number lands elsewhere where tokens are left out, but only as far as these
weigh anything together.
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
from skipdecode.model.linear import pack
from skipdecode.model.sampler import argmax

SHARE = 1 / 4  # of the vocabulary that is listed at most: with more of it there is little to gain
RARE = 1 / 4  # of a full list that words of late may take, however seldom they came
# Of the tokens that come so many are to be listed ones, or drafts of the others are refused; and the list is given up
# below the second.
ENOUGH, TOO_FEW = 0.95, 0.92
SEEN = 256  # tokens that were made before the first list, and until a share of them says anything
KEEP = 0.996  # of what was counted of that share, at each token: old text says little about new
NEW = 1 / 16  # of the list: so often others come before it is made anew, which copies rows of the head
HALVED_EVERY = 1 << 16  # tokens, after which older ones count half


@dataclass(frozen=True)
class DraftHead:
    """The rows of a model's head that belong to some of its tokens."""

    tokens: Tensor
    """[n] int64, rising: so that ties go as they go among all."""
    weight: Tensor | PackedWeight
    """[n, E]: their rows."""

    @classmethod
    def of(cls, tokens: Iterable[int], model: Decoder) -> "DraftHead":
        """Copies the rows of a model that `has_head_rows`."""
        ids = to_device(sorted(tokens), model.device)
        rows = model.head_weight.detach()[ids]
        packed = pack(rows, model.quantization)
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
    """Of a model in a process, and learns from all of its texts."""

    def __init__(self, vocab_size: int, tokens: Iterable[int] = (), *, learns: bool = True) -> None:
        """Without `learns` it keeps to `tokens`; none: to no list."""
        self._most = int(SHARE * vocab_size)
        self._listed, self._learns, self._is_used = frozenset(tokens), learns, not learns
        self._counts: Counter[int] = Counter()
        self._num_counted = 0
        self._tried = self._found = 0.0
        self._missed: dict[int, None] = {}  # those not listed, in the order in which they came
        self._num_missed = 0
        self._head: tuple[frozenset[int], DraftHead] | None = None

    def head(self, model: Decoder) -> DraftHead | None:
        """The head that drafts choose by; None: that of the model. Kept as long as the list stays."""
        listed = self.tokens() if model.has_head_rows else None
        if listed is None:
            return None
        if self._head is None or self._head[0] is not listed:
            self._head = listed, DraftHead.of(listed, model)
        return self._head[1]

    def read(self, tokens: Iterable[int]) -> None:
        """A prompt that rows of the next rounds go on with: texts repeat its words, rare ones too."""
        own = dict.fromkeys(tokens)
        self._counts.update(own.keys())
        self._miss(own)

    def wrote(self, tokens: Sequence[int]) -> None:
        """Tokens that full depth made."""
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
        """The share of the tokens made lately that were listed when they came; 0 before it can be said."""
        return self._found / self._tried if self._tried >= SEEN / 2 else 0.0

    def tokens(self) -> frozenset[int] | None:
        """The list, the same object as long as it stays; None: drafts choose among all tokens."""
        if self._learns:
            if self._num_missed > NEW * len(self._listed) and (self._listed or self._num_counted >= SEEN):
                self._list()
            self._is_used = self.coverage >= (TOO_FEW if self._is_used else ENOUGH)
        return self._listed if self._is_used and self._listed else None

    def _miss(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token not in self._listed:
                self._missed.pop(token, None)  # to the end
                self._missed[token] = None
                self._num_missed += 1

    def _list(self) -> None:
        """Those that came lately, as far as there is room for rare ones, and those that came most often."""
        lately = list(self._missed)[-int(RARE * self._most) :]
        often = (token for token, _ in self._counts.most_common())
        self._listed = frozenset(islice(dict.fromkeys(chain(lately, often)), self._most))
        self._missed, self._num_missed = {}, 0
