"""Prompts into a cache, fed without their padding: their tokens lie one behind the other.

Where the back end takes them (`Backend.takes_unpadded`). They may be whole, or ends behind columns that several rows
share, and begin in whatever column `KVCache.num_pad` says. Elsewhere prompts are fed with their padding
(`padded.PaddedView`).

B rows, T new columns, N tokens of all prompts, S columns, G heads of keys and values, K head dim, D width.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from skipdecode.backends.backend import Columns, FusedLayer, FusedStore, Prompts, SharedColumns
from skipdecode.backends.rope import Turn, turn_of
from skipdecode.kv.padded import KVCache
from skipdecode.kv.view import StepView


class PromptsView:
    """Prompts into `cache`, where every layer is one kernel; states are [N, D], without the padding."""

    has_kernels = stores_by_kernel = True
    turn = None

    def __init__(self, cache: KVCache, positions: Tensor, table: Tensor | None, before: Tensor | None = None) -> None:
        """`before` [B] int64: tokens of each prompt that are in `cache`, or shared; None: none."""
        self._cache, self._positions, self._table = cache, positions, table
        columns = cache.num_pad if cache.shared is None else cache.num_pad - cache.shared.counts
        self.prompts = Prompts(positions, columns, before)
        self.pack = self.prompts.pack

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        raise AssertionError("a layer by parts, and prompts without their padding")

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("a layer by parts, and prompts without their padding")

    def run(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, feeds: bool
    ) -> Tensor:
        for kernel, layer in zip(kernels, layers, strict=True):
            memory = self._memory(layer) if attends else None
            h = kernel.read(h, self.prompts, memory, feeds=feeds, shared=self._shared(layer))
        return h

    def store_by_kernel(self, kernel: FusedStore, h: Tensor, layers: Mapping[int, int]) -> None:
        kernel(h, self.prompts, {product: self._memory(layer) for product, layer in layers.items()})

    def part(self, where: slice) -> "PromptsView":
        assert where == slice(None), "all rows of a cohort are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "LastTokens"]:
        turn = turn_of(self._table, self._positions[:, -1:])
        return self.prompts.last(h), LastTokens(self._cache, self.prompts.last_columns, turn)

    def _memory(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._cache.k[layer], self._cache.v[layer]

    def _shared(self, layer: int) -> SharedColumns | None:
        return None if self._cache.shared is None else self._cache.shared.columns(layer)


class LastTokens(StepView):
    """The last token of every prompt in `cache`, where its keys and values are."""

    has_kernels = True

    def __init__(self, cache: KVCache, last_columns: Tensor, turn: Turn | None) -> None:
        """`last_columns` [B] int64: of these tokens."""
        self._cache, self._last, self.turn = cache, last_columns, turn

    def columns(self, layer: int) -> Columns:
        cache = self._cache
        shared = None if cache.shared is None else cache.shared.columns(layer)
        return Columns(cache.k[layer], cache.v[layer], cache.num_pad, self._last, shared=shared)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        attend_one = self._cache.attend_one
        assert attend_one is not None, "prompts without their padding, and no kernels"
        return attend_one(q, k, v, self.columns(layer))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("keys and values of whole prompts are there")

    def part(self, where: slice) -> "LastTokens":
        assert where == slice(None), "all rows of a cohort are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "LastTokens"]:
        raise AssertionError("every token is a last one")
