"""Layers as one call for tokens of a continuous batch (`skipdecode.kv.tokens`): laid out once, and kept as long as rows
and their memory stay. To lay one out takes as long as a small model needs for a third of a step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from skipdecode.backends.backend import Backend, Columns, FusedLayer

KEPT = 8  # calls: of whole models and of what drafts, for as many numbers of tokens
FEW = 64  # tokens that a call is laid out for at least, where it takes fewer


class _Kept(NamedTuple):
    numbers: Tensor
    """As `TokensView.numbers`, where the call reads them."""
    call: Callable[[Tensor], Tensor]
    parts: dict[int, Tensor]
    """Of `numbers`, for so many tokens."""


class KeptSteps:
    """Of one batch."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def clear(self) -> None:
        """When rows or their memory change: calls hold memory, too."""
        self._kept.clear()

    def of(
        self,
        kernels: Sequence[FusedLayer],
        layers: Sequence[int],
        numbers: Tensor,
        most: int,
        memory_of: Callable[[int], tuple[Tensor, Tensor]],
        *,
        feeds: bool,
    ) -> Callable[[Tensor], Tensor]:
        """`Backend.prepare_step` for tokens that attend; `numbers` and `most` as of `TokensView`, `memory_of` a layer
        as `SlotCache.memory_of`."""
        backend, size = self._backend, numbers.shape[1]
        room = max(FEW, 1 << (size - 1).bit_length()) if backend.takes_fewer else size
        key = (room, most if backend.wants_among else 1, feeds, *layers, *kernels)
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            held = numbers.new_zeros(len(numbers), room)
            one = columns_of(memory_of(layers[0]), held, most)
            of = [one._replace(k=k, v=v) for k, v in map(memory_of, layers)]
            self._kept[key] = _Kept(held, backend.prepare_step(kernels, room, of, feeds=feeds), {})
        kept = self._kept[key]
        if size not in kept.parts:
            kept.parts[size] = kept.numbers[:, :size]
        kept.parts[size].copy_(numbers)
        return kept.call


def columns_of(memory: tuple[Tensor, Tensor], numbers: Tensor, most: int) -> Columns:
    """Of `TokensView.numbers`."""
    first, last, places = numbers[:3]
    return Columns(*memory, first, last, places, among=numbers[3:] if len(numbers) > 3 else None, most=most)
