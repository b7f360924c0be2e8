"""Seconds of the passes of one model: by the cost model, and as this machine has them.

By pass: a draft, the verification of several columns of each row, a step at full depth, and what the host does beside
them. What drafts gain by these prices is for `skipdecode.speculative.draft_length`. No torch.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import Ceilings, Cost, attention_cost, ffn_cost, head_cost
from skipdecode.schedules.plan import LayerPlan

if TYPE_CHECKING:
    from skipdecode.model.decoder import Decoder

KEPT_TIMES = 24  # of passes of one size
# Of a size, before its price is its own: one slow pass would say for good that nobody wants another of that size.
ENOUGH = 4
LEAST = 8  # of so many times the least one counts: other processes make passes longer
# Passes of a number of drafts, before its price is by what they took; and passes of as many rows, until which it is
# tried: rows may always have fewer drafts than were wanted.
TRIES, TRIED_FOR = 2, 128
# Passes of as many rows without one of some size, after which its price is old: memory is fast or slow for seconds at a
# time, and the best number of drafts changes with it.
OLD = 48
# Machines to decide by where the one at hand is not to be measured: 2 cores with matrix units and without, by order of
# magnitude, and what the host does in a skipped pass and in a round with drafts (of the demo model, on a Xeon).
REFERENCE_AMX = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=1e-6)
REFERENCE = Ceilings(flops_per_s=2e11, bytes_per_s=2.5e10, call_s=1e-6)
HOST_DRAFT_S, HOST_ROUND_S = 1.5e-4, 1.5e-4
COLUMNS = 16  # of context are priced alike
MOST_KNOWN = 4096  # prices that are kept
Pass = tuple[str, int, int]
"""Its kind, and its size (`_size`)."""


def size_of(rows: int) -> int:
    """The same for batches that are priced alike: half as many rows again are others."""
    return round(2 * math.log2(rows))


def _size(rows: int, tokens: int) -> tuple[int, int]:
    """Of passes, for which a draft more for each row counts as well."""
    return size_of(rows), round(tokens / rows) - 1


def _less(rows: int, tokens: int) -> str:
    """The kind of a pass with a draft less for each row."""
    return "verify" if tokens > 2 * rows else "full"


class Prices:
    """Seconds of passes of one model."""

    def __init__(
        self,
        config: DecoderConfig,
        itemsize: int,
        weight_itemsize: int | None = None,
        ceilings: Ceilings | None = None,
        *,
        reference: Ceilings = REFERENCE,
        keep: int | None = KEPT_TIMES,
    ) -> None:
        """`ceilings`: of this
        machine, whose measured times then count, too; None: decide without a clock, by `reference`. `keep`: the newest
        times of each size of pass; None: all, of passes that are timed in turns, so that each size speaks for itself
        from the first on."""
        self._config, self._sizes = config, {"itemsize": itemsize, "weight_itemsize": weight_itemsize}
        self._ceilings, self.is_timed, self._keep = ceilings or reference, ceilings is not None, keep
        self._ratios: dict[Pass, deque[float]] = {}
        # A decision asks for some twenty prices, in the time that a small model takes for a step.
        self._nearest: dict[Pass, list[deque[float]]] = {}
        self._known: dict[tuple[Any, ...], float] = {}
        self._rounds_s: dict[int, deque[float]] = {}
        self._verified: Counter[int] = Counter()  # passes, by their number of rows
        self._seen_at: dict[tuple[int, int], deque[int]] = {}  # by size: how many there were up to the newest of it

    @classmethod
    def of(cls, model: "Decoder", ceilings: Ceilings | None = None, *, keep: int | None = KEPT_TIMES) -> "Prices":
        """Of a model whose weights are as it decodes by them."""
        sizes = model.dtype.itemsize, model.weight_itemsize
        reference = REFERENCE_AMX if model.has_matrix_units else REFERENCE
        return cls(model.config, *sizes, ceilings, reference=reference, keep=keep)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def model_s(
        self, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None, kind: str = "full"
    ) -> float:
        """By the cost model: `tokens` new columns of `rows` rows that see about `context` columns, and the head on
        each. `outputs`: tokens that drafts choose among; None: all, by the model's own head. `kind` as in `seconds`."""
        about = context // COLUMNS * COLUMNS + COLUMNS // 2
        key = sum(plan.attn), sum(plan.ffn), rows, tokens, about, outputs
        if (seconds := self._known.get(key)) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            seconds = self._known[key] = self._model_s(*key)
        return seconds

    def _model_s(
        self, attn_runs: int, ffn_runs: int, rows: int, tokens: int, context: int, outputs: int | None
    ) -> float:
        sizes: dict[str, Any] = self._sizes
        attn = attention_cost(self._config, rows=tokens, new_columns=1, context=context, **sizes)
        read_once = attn.cache_bytes * (1 - rows / tokens)  # columns of a row read its cache together
        attn = Cost(attn.flops, attn.bytes - read_once, attn.calls, attn.cache_flops, attn.cache_bytes - read_once)
        ffn = ffn_cost(self._config, tokens=tokens, **sizes)
        head = head_cost(self._config, rows=tokens, outputs=outputs, **sizes)
        seconds = self._ceilings.seconds
        return attn_runs * seconds(attn) + ffn_runs * seconds(ffn) + seconds(head)

    def seconds(
        self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None
    ) -> float:
        """The same as this machine has it: `kind` is draft or verify, or full for a step without any of that.

        A draft more than was tried is priced half-way to costing nothing, or it might never be tried: where arithmetic
        begins to bind the cost model may be far off.
        """
        seconds = self.model_s(plan, rows, tokens, context, outputs, kind) * self._ratio(kind, rows, tokens)
        if kind == "draft" and not self.is_timed:
            return seconds + HOST_DRAFT_S
        if kind != "verify" or not self._is_next(rows, tokens):
            return seconds
        less = self.seconds(_less(rows, tokens), plan, rows, tokens - rows, context)
        return min(seconds, (seconds + less) / 2)

    def _is_next(self, rows: int, tokens: int) -> bool:
        """Whether a verification of so many tokens is to be tried: one draft fewer was, and this was not."""
        if not self.is_timed or self._keep is None or self._verified[size_of(rows)] > TRIED_FOR:
            return False
        own, less = ("verify", *_size(rows, tokens)), (_less(rows, tokens), *_size(rows, tokens - rows))
        return len(self._ratios.get(own, ())) < TRIES <= len(self._ratios.get(less, ()))

    def num_verified(self, rows: int) -> int:
        """Verifications of as many rows so far."""
        return self._verified[size_of(rows)]

    def num_seen_since(self, rows: int, tokens: int, since: int) -> int:
        """Of the newest ENOUGH verifications of that size those behind the first `since` of as many rows."""
        return sum(at > since for at in self._seen_at.get(_size(rows, tokens), ()))

    def saw(
        self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, took_s: float,
        model_s: float | None = None,
    ) -> None:  # fmt: skip
        """What such a pass took. `model_s`: by the cost model, where that is known."""
        if self.is_timed:
            of = (kind, *(size := _size(rows, tokens)))
            if kind == "verify":
                self._verified[size[0]] += 1
                seen_at = self._seen_at.setdefault(size, deque(maxlen=ENOUGH))
                if seen_at and self._verified[size[0]] - seen_at[-1] > OLD and self._keep is not None:
                    self._ratios.pop(of, None)
                seen_at.append(self._verified[size[0]])
            seen = self._ratios.setdefault(of, deque(maxlen=self._keep))
            if len(seen) < ENOUGH:
                self._nearest.clear()
            seen.append(took_s / (model_s or self.model_s(plan, rows, tokens, context, kind=kind)))

    def saw_round(self, rows: int, took_s: float) -> None:
        """What a round of so many rows took beside its passes: the host's work, whatever the model."""
        if self.is_timed:
            self._rounds_s.setdefault(size_of(rows), deque(maxlen=self._keep)).append(took_s)

    def round_s(self, rows: int) -> float:
        """That, for the nearest number of rows that was seen; 0 for none yet."""
        if not self.is_timed:
            return HOST_ROUND_S
        if not self._rounds_s:
            return 0.0
        size = size_of(rows)
        seen = self._rounds_s[min(self._rounds_s, key=lambda other: abs(other - size))]
        return max(0.0, self._least(seen))  # where other processes stopped a later pass, the first seems to take less

    def learn(self, other: "Prices") -> None:
        """Takes over the times that `other`, of the same model, has seen."""
        self._ratios |= other._ratios
        self._nearest.clear()
        self._rounds_s |= other._rounds_s

    def spread(self, kind: str) -> float:
        """How many times as long as the shortest pass of a size the middle one took, of the size where these are
        farthest apart; 1 without any."""
        seen = [ratios for (one, *_), ratios in self._ratios.items() if one == kind]
        return max((median(ratios) / min(ratios) for ratios in seen), default=1.0)

    def _ratio(self, kind: str, rows: int, tokens: int) -> float:
        """Measured over predicted for passes of about that size: the nearest that were seen, and the next ones where
        these were seen seldom. The least of the last, since other processes make passes longer, and one size may have
        met them where another did not.
        """
        if not self._ratios:
            return 1.0
        of = (kind, *_size(rows, tokens))
        if of not in self._nearest:
            self._nearest[of] = self._seen_near(of)
        return min(map(self._least, self._nearest[of]))

    def _least(self, ratios: Sequence[float]) -> float:
        """But for the very least of many: by luck with that, a size would be taken for better than it is."""
        if self._keep is None or len(ratios) < ENOUGH:
            return min(ratios)
        return sorted(ratios)[max(1, len(ratios) // LEAST)]

    def _seen_near(self, of: Pass) -> list[deque[float]]:
        """Of the nearest sizes, as many as were seen ENOUGH times together; of the same kind if that was seen."""
        enough = 1 if self._keep is None else min(ENOUGH, self._keep)
        first, *others = sorted(self._ratios, key=lambda seen: _distance(seen, of))
        near = [self._ratios[first]]
        for other in others:
            if sum(map(len, near)) >= enough or other[0] != first[0]:
                break
            near.append(self._ratios[other])
        return near


def _distance(one: Pass, other: Pass) -> int:
    return abs(one[1] - other[1]) + abs(one[2] - other[2]) + 100 * (one[0] != other[0])
