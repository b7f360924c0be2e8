"""Drafts of a round by repetition: before skipped passes, in place of them, or behind them. No torch."""

from collections.abc import Collection, Sequence

from skipdecode.engine.request import Row
from skipdecode.speculative.controller import Decision
from skipdecode.speculative.draft import Chain
from skipdecode.speculative.draft_length import SKIPPED, Acceptance
from skipdecode.speculative.ngram import RepeatsOfRows

SURE = 3  # tokens that repeat from which on a repeat comes before a skipped pass, where nobody decides


class RepeatDrafts:
    """Of the rows of a batch."""

    def __init__(self, acceptance: Acceptance, *, decides: bool) -> None:
        """`decides`: by `acceptance`, whether a repeat is better than a skipped pass."""
        self._acceptance, self._decides = acceptance, decides
        self._repeats = RepeatsOfRows()

    def keep(self, rows: Collection[Row]) -> None:
        """Forgets all others."""
        self._repeats.keep(rows)

    def draft(self, chain: Chain, row: Row, decision: Decision, eos: Sequence[int]) -> None:
        """What the row repeats, or leaves it to skipped passes."""
        chain.wanted = decision.skipped
        if not decision.repeated or chain.room <= 0:
            return
        most = min(max(decision.repeated.values()), chain.room)
        found, tokens = self._repeats.of(row).find(most, min(decision.repeated))
        count = decision.repeated.get(found, 0)
        if count and (not decision.skipped or self._is_better(found)):
            chain.add(tokens[:count], found, eos)
            chain.wanted = 0

    def _is_better(self, found: int) -> bool:
        """Whether a repeat of so many tokens is as good as a skipped pass."""
        rate = self._acceptance.rate
        return rate(found, 0) >= rate(SKIPPED, 0) if self._decides else found >= SURE

    def go_on(self, chain: Chain, row: Row, decision: Decision, eos: Sequence[int]) -> None:
        """Behind drafts of skipped passes: what follows on them elsewhere."""
        room, drafts = chain.room - chain.num_drafts, chain.tokens[1:]
        if not drafts or room <= 0 or chain.sources[0][0] != SKIPPED:
            return
        index = self._repeats.of(row)
        index.add(drafts)
        found, tokens = index.find(min(max(decision.continued.values()), room), min(decision.continued))
        index.drop(len(drafts))
        chain.add(tokens[: decision.continued.get(found, 0)], found, eos)
