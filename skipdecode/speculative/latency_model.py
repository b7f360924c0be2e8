"""Seconds of a model's passes: by the roofline, times how much longer passes of that kind were seen to take.

No torch.
"""

from collections import deque
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Literal

from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import Ceilings, Cost, attention_cost, ffn_cost, head_cost
from skipdecode.schedules.layer_plan import LayerPlan

if TYPE_CHECKING:
    from skipdecode.model.decoder import Decoder

PassKind = Literal["plain", "draft", "verify"]
"""A step at full depth, a draft by skipped layers, and the verification of several tokens of each row."""
# The newest measurements of a kind and batch size, whose median is robust to what other processes do; and how many
# there must be before they count.
KEPT_RATIOS, FEWEST_RATIOS = 16, 2
CONTEXT_STEP = 64  # contexts are rounded to the middle of such a span, so that estimates can be cached
# Two cores with and without matrix units, by order of magnitude: for runs in which no clock may decide
# (`sampling.deterministic`).
REFERENCE_AMX = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=1e-6)
REFERENCE = Ceilings(flops_per_s=2e11, bytes_per_s=2.5e10, call_s=1e-6)
HOST_S = 1.5e-4  # the host's work in a pass that is no plain step: half a step of a model of 5 million parameters


class LatencyModel:
    """Predicts passes of one model, and learns from those that were timed."""

    def __init__(
        self,
        config: DecoderConfig,
        itemsize: int,
        weight_itemsize: float | None = None,
        ceilings: Ceilings | None = None,
        *,
        kv_itemsize: int | None = None,
        reference: Ceilings = REFERENCE,
    ) -> None:
        """`ceilings`: those of this machine, on which passes are timed; None: predict by `reference`, without a
        clock."""
        self.config, self.is_timed = config, ceilings is not None
        self._sizes: dict[str, float | None] = {"itemsize": itemsize, "weight_itemsize": weight_itemsize}
        self._kv_itemsize = kv_itemsize
        self._ceilings = ceilings or reference
        self._ratios: dict[tuple[PassKind, int], deque[float]] = {}
        self._cached = lru_cache(maxsize=4096)(self._seconds)

    @classmethod
    def of(cls, model: "Decoder", ceilings: Ceilings | None = None) -> "LatencyModel":
        reference = REFERENCE_AMX if model.has_matrix_units else REFERENCE
        sizes = model.dtype.itemsize, model.weight_itemsize
        return cls(model.config, *sizes, ceilings, kv_itemsize=model.kv_itemsize, reference=reference)

    def roofline_s(self, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None) -> float:
        """Seconds by the roofline alone for `tokens` new tokens of `rows` rows that see `context` positions, LM head
        included.

        `outputs`: the size of the draft vocabulary; None for all tokens.
        """
        middle = context // CONTEXT_STEP * CONTEXT_STEP + CONTEXT_STEP // 2
        return self._cached(sum(plan.attn), sum(plan.ffn), rows, tokens, middle, outputs)

    def _seconds(self, attn: int, ffn: int, rows: int, tokens: int, context: int, outputs: int | None) -> float:
        shape = {"rows": tokens, "new_columns": 1, "context": context, "kv_itemsize": self._kv_itemsize}
        one = attention_cost(self.config, **shape, **self._sizes)  # type: ignore[arg-type]
        read_once = one.cache_bytes * (1 - rows / tokens)  # new tokens of a row read its cache together
        one = Cost(one.flops, one.bytes - read_once, one.calls, one.cache_flops, one.cache_bytes - read_once)
        feed = ffn_cost(self.config, tokens=tokens, **self._sizes)  # type: ignore[arg-type]
        head = head_cost(self.config, rows=tokens, outputs=outputs, **self._sizes)  # type: ignore[arg-type]
        seconds = self._ceilings.seconds
        return attn * seconds(one) + ffn * seconds(feed) + seconds(head)

    def seconds(
        self, kind: PassKind, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None
    ) -> float:
        """`roofline_s`, corrected by the measured times of such passes of batches of about that size; else by those of
        plain steps, plus the host's work."""
        predicted = self.roofline_s(plan, rows, tokens, context, outputs)
        seen = self._ratios.get((kind, rows.bit_length()), ())
        if len(seen) >= FEWEST_RATIOS:
            return predicted * median(seen)
        plain = self._ratios.get(("plain", rows.bit_length()), ())
        has_host = kind != "plain" and (plain or not self.is_timed)
        return predicted * (median(plain) if plain else 1.0) + (HOST_S if has_host else 0.0)

    def forget_drafts(self, rows: int) -> None:
        """Drops measurements of drafts and verifications of about as many rows."""
        self._ratios.pop(("draft", rows.bit_length()), None)
        self._ratios.pop(("verify", rows.bit_length()), None)

    def observe(self, kind: PassKind, rows: int, took_s: float, predicted_s: float) -> None:
        """Records the measured time of passes, beside that of `roofline_s`."""
        if self.is_timed:
            key = kind, rows.bit_length()
            self._ratios.setdefault(key, deque(maxlen=KEPT_RATIOS)).append(took_s / predicted_s)
