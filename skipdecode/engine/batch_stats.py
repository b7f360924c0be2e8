"""What decoding one batch cost: counts of tokens, rows, steps and layers, bytes, and seconds. No torch.

Whoever decodes the batch fills it in. What of it a record keeps, and how batches are added up, is the caller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class BatchStats:
    """What one batch cost. Token counts are real tokens; `row_steps` also count ended rows that were carried along."""

    rows: int = 0
    prompt_columns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Decode steps times rows in the batch at that time."""
    layers_run: int = 0
    """Layers of the steps that rows needed: the sum of the rows' `layers_run`."""
    ffns_run: int = 0
    """Feed-forward blocks, likewise."""
    layer_row_steps: int = 0
    """Layers of all `row_steps`, wasted ones included."""
    prefix_tokens_saved: int = 0
    """Of `input_tokens`, those that were not run, since another row's run served."""
    cache_bytes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: list[int] = field(default_factory=list)
    """Rows in the batch at each decode step."""
    deferred_ffn_rows: list[Sequence[int]] = field(default_factory=list)
    """At each decode step, the rows that each feed-forward block apart ran on (`skipdecode.model.ffn_executor`)."""

    unrecorded: ClassVar[tuple[str, ...]] = ("batch_rows", "deferred_ffn_rows")
    """What the cost model reads and no record keeps."""


@dataclass
class LosslessStats(BatchStats):
    """Of a batch at full depth with drafts. `decode_steps` are verifications, `row_steps` rows in them."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    model_decode_s: float = 0.0
    """By the cost model alone (`Prices.model_s`)."""
    drafted_at: list[int] = field(default_factory=list)
    """Drafted tokens by their place in a draft."""
    accepted_at: list[int] = field(default_factory=list)
    """Those of them that full depth made too, and all before them."""

    unrecorded: ClassVar[tuple[str, ...]] = (*BatchStats.unrecorded, "model_decode_s")

    def count(self, drafted: int, accepted: int) -> None:
        more = drafted - len(self.drafted_at)
        self.drafted_at += [0] * more
        self.accepted_at += [0] * more
        for place in range(drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted
