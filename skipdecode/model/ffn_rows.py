"""Which rows still need a feed-forward block, decided on the device while a batch is decoded (FFN-SkipLLM).

Two ways to the same result. `gather` runs a block on the rows that need it and on no other, as a CPU can; without it
the block runs on all rows and the others keep their state, so that no shape depends on the data and nothing waits for
the device. Teacher-forced passes and fixed batch shapes take the second.

B rows, T columns, L layers, D width.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.model.random_numbers import row_uniforms
from skipdecode.schedules.ffn_policy import FeedForward, FFNs
from skipdecode.schedules.plan import LayerPlan


class RowFFNs(FFNs):
    """The state of one batch: which tokens still run the blocks in question, and how many each has run."""

    has_counts = True

    def __init__(self, num_rows: int, device: torch.device, *, gather: bool) -> None:
        self.gather = gather
        self.device = device
        self._rows = torch.arange(num_rows, device=device)
        self.rows_run: list[int] = []
        self._asked: tuple[bool, ...] = ()
        self._history: list[Tensor] = []

    def apart(self, plan: LayerPlan) -> tuple[bool, ...]:
        return plan.dynamic_ffn

    def start(self, plan: LayerPlan, k: int) -> None:
        self._begin(plan.dynamic_ffn, k, 1, 0)

    def start_pass(self, plans: Sequence[LayerPlan], prompt_columns: int) -> None:
        asking = next((k for k, plan in enumerate(plans) if plan.dynamic_ffn), None)
        if asking is not None:
            columns = prompt_columns + len(plans)
            self._begin(plans[asking].dynamic_ffn, asking, columns, prompt_columns + asking)

    def _begin(self, asked: tuple[bool, ...], k: int, num_columns: int, first: int) -> None:
        """`asked` [L]: the blocks in question, from step `k` on, whose column is `first` of `num_columns`."""
        B = len(self._rows)
        self._asked, self.k, self.first = asked, k, first
        self.rows_run = []
        if asked:
            self.active = torch.ones(B, num_columns, dtype=torch.bool, device=self.device)
        self.ran = torch.zeros(B, num_columns, dtype=torch.int32, device=self.device)
        self._history.append(self.ran)

    def run(self, layer: int, block: FeedForward, alone: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        """The block for the tokens that need it, identity for the others: [B, T, D] -> [B, T, D]."""
        if not (self._asked and self._asked[layer]):
            return alone(h)
        T = h.shape[1]
        needed = self._needed(layer, T)
        self.ran[:, self.first : T] += needed[:, self.first :]
        rows = needed[:, 0].nonzero()[:, 0] if self.gather else self._rows
        self.rows_run.append(len(rows))
        if len(rows) == 0:
            return h
        if len(rows) < len(h):
            before = h[rows]
            added = block.add_feed(before)
            self._look(layer, before, added, rows)
            return h.index_copy(0, rows, block.post_norm(added))
        added = block.add_feed(h)
        fed = block.post_norm(added)
        if not self.gather:
            fed = torch.where(needed[..., None], fed, h)  # before the look, which may change `needed` in place
        self._look(layer, h, added)
        return fed

    def _needed(self, layer: int, num_columns: int) -> Tensor:
        """[B, T] bool: the tokens that run this block."""
        return self.active[:, :num_columns]

    def _look(self, layer: int, before: Tensor, added: Tensor, rows: Tensor | None = None) -> None:
        """Sees the state before and after the residual, [R, T, D] of `rows` (None: all), and may end their blocks."""

    def history(self) -> list[list[int]]:
        steps = torch.cat(self._history, dim=1).tolist() if self._history else [[] for _ in range(len(self._rows))]
        self._history = []
        return steps

    def keep(self, rows: Tensor) -> None:
        assert not self._history, "rows dropped before their history was read"
        self._rows = self._rows[: len(rows)]


class SaturatedRows(RowFFNs):
    """The paper's rule (arXiv 2404.03865, Algorithm 1): once a block leaves the state as it was, no more blocks."""

    def __init__(self, num_rows: int, device: torch.device, threshold: float, *, gather: bool) -> None:
        super().__init__(num_rows, device, gather=gather)
        self.threshold = threshold

    def _look(self, layer: int, before: Tensor, added: Tensor, rows: Tensor | None = None) -> None:
        goes_on = ~(similarity(before, added) >= self.threshold)  # [R, T]
        if rows is None:
            T = before.shape[1]
            self.active[:, self.first : T] &= goes_on[:, self.first :]
        else:
            self.active[rows] = goes_on


class RandomRows(RowFFNs):
    """Each block of each token with its own chance, the same in whatever batch the row is: a baseline."""

    def __init__(
        self, ids: Sequence[str], num_steps: int, num_layers: int, share: float, seed: int, device: torch.device, *,
        gather: bool,
    ) -> None:  # fmt: skip
        super().__init__(len(ids), device, gather=gather)
        drawn = np.stack([row_uniforms(seed, f"{i}\0ffn", num_steps * num_layers) for i in ids])
        chosen = torch.from_numpy(drawn).view(len(ids), num_steps, num_layers) >= share
        self._chosen = chosen.to(device)  # [B, steps, L]

    def _needed(self, layer: int, num_columns: int) -> Tensor:
        needed = torch.ones(len(self._rows), num_columns, dtype=torch.bool, device=self.device)
        needed[:, self.first :] = self._chosen[:, self.k : self.k + max(num_columns - self.first, 0), layer]
        return needed

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._chosen = self._chosen[rows]


class SimilarityRecorder(FFNs):
    """Skips nothing and keeps cos(h, h + FFN(h)) of every token: what calibration looks at."""

    def __init__(self) -> None:
        self.similarity: dict[int, Tensor] = {}
        """Layer -> [B, T] float32."""

    def apart(self, plan: LayerPlan) -> tuple[bool, ...]:
        return plan.ffn

    def run(self, layer: int, block: FeedForward, alone: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        added = block.add_feed(h)
        self.similarity[layer] = similarity(h, added)
        return block.post_norm(added)


def similarity(before: Tensor, added: Tensor) -> Tensor:
    """Cosine of [..., D] states in float32: [...]. Of h and h + FFN(h), not of h and FFN(h), which never saturates."""
    return F.cosine_similarity(before.float(), added.float(), dim=-1)
