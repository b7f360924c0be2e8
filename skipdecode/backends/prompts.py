"""Prompts without their padding, as kernels read them."""

import torch.nn.functional as F
from torch import Tensor


class Prompts:
    """Left-padded prompts [B, T] laid one behind the other, without the padding: [N, ...]."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` [B, T] int64: -1 a padding column (`Decoder.embed`)."""
        self._is_real = positions >= 0
        lengths = self._is_real.sum(dim=1)
        assert bool((positions[:, -1] == lengths - 1).all() & (lengths > 0).all()), (
            "left-padded, and none of them empty"
        )
        self.columns = positions.shape[1] - lengths
        """[B] int64: the column of each prompt's first token."""
        self.starts = F.pad(lengths.cumsum(dim=0), (1, 0))
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_columns, self.num_tokens = positions.shape[1], int(self.starts[-1])  # T, N

    def __len__(self) -> int:
        return len(self.columns)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x[self._is_real]

    def last(self, h: Tensor) -> Tensor:
        """The last token of each prompt: [N, D] -> [B, 1, D]."""
        return h[self.starts[1:] - 1][:, None]

    def pointers(self) -> tuple[int, int, int]:
        return len(self), self.starts.data_ptr(), self.columns.data_ptr()
