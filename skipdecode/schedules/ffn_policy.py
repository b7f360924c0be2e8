"""Who runs the feed-forward blocks of a batch. The layer loop, cohorts and teacher-forced passes ask it, whatever the
schedule.

`FFNs` is the usual case: every planned block runs for all rows, in one call with its layer's attention if it can.
Others take blocks out of these calls and run them themselves (`skipdecode.model.ffn_rows`): those are the blocks
apart. No
torch at import.

B rows, T columns, L layers, D width.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from skipdecode.schedules.plan import LayerPlan


class FeedForward(Protocol):
    """What can be known of a decoder layer here (`skipdecode.model.layer.Layer`)."""

    def add_feed(self, h: "Tensor") -> "Tensor": ...
    def post_norm(self, h: "Tensor") -> "Tensor": ...


class FFNs:
    """Every planned block, for all rows; of one batch, though there is nothing to remember of it."""

    has_counts: ClassVar[bool] = False
    """Whether `history` tells more than the plans, and waits for the device."""
    rows_run: Sequence[int] = ()
    """Rows that each block apart ran on in the newest step, in order of the layers."""

    def apart(self, plan: "LayerPlan") -> tuple[bool, ...]:
        """[L] the blocks of `plan` that go through `run`, and not into one call with attention; empty: none."""
        assert plan.is_static, "the plan leaves blocks to the rows, and nothing decides for them"
        return ()

    def start(self, plan: "LayerPlan", k: int) -> None:
        """Before decode step `k`."""

    def start_pass(self, plans: Sequence["LayerPlan"], prompt_columns: int) -> None:
        """Before a teacher-forced pass over so many columns and, behind them, one for each of the steps' `plans`."""

    def run(self, layer: int, block: FeedForward, alone: Callable[["Tensor"], "Tensor"], h: "Tensor") -> "Tensor":
        """The block of `layer`: [B, T, D] -> [B, T, D]. `alone` is the layer's own call for it."""
        return alone(h)

    def history(self) -> Iterable[list[int]]:
        """[B][columns since the last call]: blocks apart that each row ran. May wait for the device."""
        return itertools.repeat([])

    def keep(self, rows: "Tensor") -> None:
        """Drops all rows but `rows` [R] int64."""


ALL_ROWS = FFNs()
