"""Which tokens drafts choose among: those that prompts and texts had so far, once nearly all that come are of them.

The head is a product with a row for every token of the vocabulary: a fifth of the weights of a small model with 49,000
tokens, and more than that of a draft, which runs few layers. A draft needs no more than the tokens that are likely
here, since full depth verifies it with all of them. Compare the lexical shortlists of machine translation (arXiv
1412.2007) and FR-Spec (arXiv 2502.14856), which take theirs from a corpus beforehand; this one learns what the texts at
hand are made of. No torch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

SHARE = 1 / 4  # of the vocabulary that is listed at most: with more of it there is little to gain
ENOUGH = 0.95  # of the tokens that were made are to be listed ones: a draft of another one is refused
SEEN = 256  # tokens that were made before their share says anything
KEEP = 0.999  # of what was counted, at each token: old text says little about new
NEW = 1 / 16  # of the list: so many tokens come before it is made anew, which copies rows of the head


class Shortlist:
    """Of the batches of one schedule, and learns from each."""

    def __init__(self, vocab_size: int, tokens: Iterable[int] = ()) -> None:
        """`tokens`: a list to keep to, whatever comes; empty: to be learnt."""
        self._most = int(SHARE * vocab_size)
        self._listed = frozenset(tokens)
        self._is_fixed = bool(self._listed)
        self._counts: Counter[int] = Counter()
        self._tried = self._found = 0.0
        self._missed: set[int] = set()

    def read(self, tokens: Iterable[int]) -> None:
        """A prompt that rows of the next rounds go on with: texts repeat its words, rare ones too."""
        own = set(tokens)
        self._counts.update(own)
        self._missed |= own - self._listed

    def wrote(self, tokens: Sequence[int]) -> None:
        """Tokens that full depth made."""
        listed = self._listed or self._counts
        for token in tokens:
            is_listed = token in listed
            self._tried = KEEP * self._tried + 1.0
            self._found = KEEP * self._found + is_listed
            if not is_listed:
                self._missed.add(token)
            self._counts[token] += 1

    @property
    def coverage(self) -> float:
        """The share of the tokens made lately that were listed when they came; 0 before enough of them did."""
        return self._found / self._tried if self._tried >= SEEN else 0.0

    def tokens(self) -> frozenset[int] | None:
        """The list, the same object as long as it stays; None: drafts choose among all tokens."""
        if self._is_fixed:
            return self._listed
        if self.coverage < ENOUGH:
            return None
        if not self._listed or len(self._missed) > NEW * len(self._listed):
            self._list()
        return self._listed

    def _list(self) -> None:
        """Those that came most often, and those that came lately."""
        lately = set(list(self._missed)[: self._most])
        often = [token for token, _ in self._counts.most_common(self._most) if token not in lately]
        self._listed = frozenset(lately.union(often[: self._most - len(lately)]))
        self._missed = set()
