"""Prompts without their padding, as kernels read them; or their ends, where what comes before is in a cache already."""

import torch.nn.functional as F
from torch import Tensor


class Prompts:
    """Left-padded prompts [B, T] laid one behind the other, without the padding: [N, ...]."""

    def __init__(self, positions: Tensor, columns: Tensor, before: Tensor | None = None) -> None:
        """`positions` [B, T] int64: -1 a padding column (`Decoder.embed`). `columns` [B] int64: that of each prompt's
        first token. `before` [B] int64: tokens of each prompt that come before these, and whose K and V are there."""
        self._is_real = positions >= 0
        lengths = self._is_real.sum(dim=1)
        ends = lengths if before is None else lengths + before
        assert bool((positions[:, -1] == ends - 1).all() & (lengths > 0).all()), "left-padded, and none of them empty"
        self.before, self.columns = before, columns
        self.last_columns = columns + ends - 1
        """[B] int64: of each prompt's last token."""
        self.starts = F.pad(lengths.cumsum(dim=0), (1, 0))
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_columns, self.num_tokens = int(self.last_columns.max()) + 1, int(self.starts[-1])  # S, N

    def __len__(self) -> int:
        return len(self.columns)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x[self._is_real]

    def last(self, h: Tensor) -> Tensor:
        """The last token of each prompt: [N, D] -> [B, 1, D]."""
        return h[self.starts[1:] - 1][:, None]

    def pointers(self) -> tuple[int, int, int, int | None]:
        before = None if self.before is None else self.before.data_ptr()
        return len(self), self.starts.data_ptr(), self.columns.data_ptr(), before
