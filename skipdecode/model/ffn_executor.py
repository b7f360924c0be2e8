"""How a batch runs its feed-forward blocks: for all rows, or only for the rows that need them (FFN-SkipLLM).

A plan's dynamic blocks run for some rows only, as decided on the device; all others are static and run for every row.
Blocks are deferred if the executor must run them itself: the dynamic ones, and static ones whose states it records.

The layer loop runs a block in one call with its layer's attention wherever it can. The blocks that an executor has
`deferred` are left out of these calls and run by the executor, which may look at the hidden states.

B rows, T columns, L layers, D width.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import Schedule


class FeedForward(Protocol):
    """The feed-forward block of a decoder layer (`skipdecode.model.layer.Layer`)."""

    def add_feed(self, h: Tensor) -> Tensor: ...
    def post_norm(self, h: Tensor) -> Tensor: ...


class FFNExecutor:
    """Runs every planned block for all rows. Subclasses keep the state of one batch."""

    has_counts: ClassVar[bool] = False
    """True if `history` says more than the plans; reading it waits for the device."""
    rows_run: Sequence[int] = ()
    """The number of rows that each deferred block ran on in the newest step, in order of the layers."""

    def deferred(self, plan: LayerPlan) -> tuple[bool, ...]:
        """[L] the blocks of `plan` that go through `run` instead of one call with attention; empty if none."""
        assert plan.is_static, "the plan has dynamic blocks, and this executor runs blocks for all rows"
        return ()

    def start(self, plan: LayerPlan, k: int) -> None:
        """Called before decode step `k`."""

    def start_pass(self, plans: Sequence[LayerPlan], prompt_columns: int) -> None:
        """Called before a teacher-forced pass over the prompt's columns and one column per step in `plans`."""

    def run(self, layer: int, block: FeedForward, run_all: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        """A deferred block: [B, T, D] -> [B, T, D]. `run_all` is the layer's own call, for all rows."""
        return run_all(h)

    def history(self) -> Iterable[list[int]]:
        """[B][columns since the last call] how many dynamic blocks each row ran. May wait for the device."""
        return itertools.repeat([])

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows` [R] int64."""


ALL_ROWS = FFNExecutor()


class SaturatedRows(FFNExecutor):
    """The paper's rule per row (arXiv 2404.03865, Algorithm 1).

    A token whose state a block leaves nearly unchanged, cos(h, h + FFN(h)) >= threshold, skips the remaining dynamic
    blocks. With `gather` a block runs only on the rows that need it, as a CPU can; without, it runs on all rows and the
    others keep their state, so that no shape depends on the data and nothing waits for the device; teacher-forced
    passes and fixed batch shapes need that.
    """

    has_counts = True

    def __init__(self, num_rows: int, device: torch.device, threshold: float, *, gather: bool) -> None:
        self.threshold = threshold
        self.gather = gather
        self.device = device
        self._rows = torch.arange(num_rows, device=device)
        self.rows_run: list[int] = []
        self._dynamic: tuple[bool, ...] = ()  # [L]
        self._history: list[Tensor] = []

    def deferred(self, plan: LayerPlan) -> tuple[bool, ...]:
        return plan.dynamic_ffn

    def start(self, plan: LayerPlan, k: int) -> None:
        self._begin(plan.dynamic_ffn, 1, 0)

    def start_pass(self, plans: Sequence[LayerPlan], prompt_columns: int) -> None:
        first = next((k for k, plan in enumerate(plans) if plan.dynamic_ffn), None)
        if first is not None:
            self._begin(plans[first].dynamic_ffn, prompt_columns + len(plans), prompt_columns + first)

    def _begin(self, dynamic: tuple[bool, ...], num_columns: int, first: int) -> None:
        """`dynamic` [L]: the blocks that tokens may skip, from column `first` of `num_columns` on."""
        B = len(self._rows)
        self._dynamic, self._first = dynamic, first
        self.rows_run = []
        if dynamic:
            self._active = torch.ones(B, num_columns, dtype=torch.bool, device=self.device)
        self._ran = torch.zeros(B, num_columns, dtype=torch.int32, device=self.device)
        self._history.append(self._ran)

    def run(self, layer: int, block: FeedForward, run_all: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        if not (self._dynamic and self._dynamic[layer]):
            return run_all(h)
        first, T = self._first, h.shape[1]
        active = self._active[:, :T]
        self._ran[:, first:T] += active[:, first:]
        rows = active[:, 0].nonzero()[:, 0] if self.gather else self._rows
        self.rows_run.append(len(rows))
        if len(rows) == 0:
            return h
        if len(rows) < len(h):
            before = h[rows]
            added = block.add_feed(before)
            self._active[rows] = ~(similarity(before, added) >= self.threshold)
            return h.index_copy(0, rows, block.post_norm(added))
        added = block.add_feed(h)
        fed = block.post_norm(added)
        if not self.gather:
            fed = torch.where(active[..., None], fed, h)  # before `active` changes in place
        active[:, first:] &= ~(similarity(h, added) >= self.threshold)[:, first:]
        return fed

    def history(self) -> list[list[int]]:
        steps = torch.cat(self._history, dim=1).tolist() if self._history else [[] for _ in range(len(self._rows))]
        self._history = []
        return steps

    def keep(self, rows: Tensor) -> None:
        assert not self._history, "rows dropped before their history was read"
        self._rows = self._rows[: len(rows)]


class SimilarityRecorder(FFNExecutor):
    """Skips nothing and records cos(h, h + FFN(h)) of every token, for calibration."""

    def __init__(self) -> None:
        self.similarity: dict[int, Tensor] = {}
        """Layer -> [B, T] float32."""

    def deferred(self, plan: LayerPlan) -> tuple[bool, ...]:
        return plan.ffn

    def run(self, layer: int, block: FeedForward, run_all: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        added = block.add_feed(h)
        self.similarity[layer] = similarity(h, added)
        return block.post_norm(added)


def ffn_executor(schedule: Schedule, num_rows: int, device: torch.device, *, gather: bool) -> FFNExecutor:
    """The executor for a batch of `num_rows` under `schedule`; `gather` as in `SaturatedRows`."""
    if schedule.ffn_threshold is None:
        return ALL_ROWS
    return SaturatedRows(num_rows, device, schedule.ffn_threshold, gather=gather)


def similarity(before: Tensor, added: Tensor) -> Tensor:
    """Cosine of [..., D] states in float32: [...]. Of h and h + FFN(h), not of h and FFN(h), which never saturates."""
    return F.cosine_similarity(before.float(), added.float(), dim=-1)
