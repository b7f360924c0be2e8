"""New columns of some rows of a continuous batch as one step, several of a row if need be: as drafts are verified
(`skipdecode.speculative.speculative_batch`).

Every token is a row of the states. It has a place (the row of the batch whose K and V it sees) and a column there, up
to which it sees them. Tokens of a place lie side by side, in any order: all are stored before any attends. Kernels of
one column per row serve where they take places (`Columns.places`); elsewhere the tokens of a place are queries behind a
mask.

N tokens, B rows of the batch, T most tokens of a place, S columns visible, H heads of queries, G of keys and values, K
head dim.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from skipdecode.backends.backend import Columns, FusedLayer
from skipdecode.backends.rope import Turn, turn_of
from skipdecode.kv.kept_steps import columns_of
from skipdecode.kv.ragged import SlotCache
from skipdecode.kv.view import StepView, attention


class TokensView(StepView):
    """N tokens of an arena's batch; their states are [N, 1, D]."""

    def __init__(self, arena: SlotCache, places: Tensor, columns: Tensor, table: Tensor | None, most: int) -> None:
        """`places`, `columns` [N] int64, of which no two tokens have both alike; `table`: of `rope.rotary_table`.
        `most`:
        tokens of a place at most."""
        self._arena, self._places, self._columns, self._table, self._most = arena, places, columns, table, most
        self._attend_one = arena.attention_at_places
        self.has_kernels = self._attend_one is not None

    def advance(self) -> None:
        """To the next column of every token's place."""
        self._columns = self.numbers[1].add_(1)
        for kept in ("turn", "_slots"):
            self.__dict__.pop(kept, None)

    @property
    def positions(self) -> Tensor:
        """[N, 1] int64."""
        return self._columns[:, None]

    @cached_property
    def turn(self) -> Turn | None:
        return turn_of(self._table, self.positions)

    @cached_property
    def numbers(self) -> Tensor:
        """[3, N] int64: the first column of each token's place, its own, and its place; or [5, N], with what is
        `Columns.among`."""
        numbers = torch.stack([torch.zeros_like(self._columns), self._columns, self._places])
        if not self._arena.wants_among:
            return numbers
        return torch.cat([numbers, among(self._places, self._arena.num_rows)])

    def columns(self, layer: int) -> Columns:
        return columns_of(self._arena.memory_of(layer), self.numbers, self._most)

    def run(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, feeds: bool
    ) -> Tensor:
        """As `KVView.run`."""
        if not attends:
            return super().run(kernels, h, layers, attends=attends, feeds=feeds)
        return self._arena.step_of(kernels, layers, self.numbers, self._most, feeds=feeds)(h)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self._attend_one is not None:
            return self._attend_one(q, k, v, self.columns(layer))
        if k is not None and v is not None:
            self.store(layer, k, v)
        slots, mask = self._slots
        keys, values = (memory[:, :, : mask.shape[3]] for memory in self._arena.memory_of(layer))
        queries = q.new_zeros(len(mask), q.shape[1], mask.shape[2], q.shape[3])  # [B, H, T, K]
        queries[self._places, :, slots] = q[:, :, 0]
        return attention(queries, keys, values, mask)[self._places, :, slots][:, :, None]

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        """[N] the place of each token among those of its row, and [B, 1, T, S] what these may attend to."""
        at = among(self._places, self._arena.num_rows)[0]
        until = self._columns.new_zeros(self._arena.num_rows, self._most)  # queries that are nobody's see a column too
        until[self._places, at] = self._columns
        visible = torch.arange(int(self._columns.max()) + 1, device=self._places.device)
        return at, (visible <= until[..., None])[:, None]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._arena.memory_of(layer)
        keys[self._places, :, self._columns] = k[:, :, 0]
        values[self._places, :, self._columns] = v[:, :, 0]

    def part(self, where: slice) -> "TokensView":
        if where == slice(None):
            return self
        return TokensView(self._arena, self._places[where], self._columns[where], self._table, self._most)

    def last(self, h: Tensor) -> tuple[Tensor, "TokensView"]:
        raise AssertionError("every token is a last one")


def among(places: Tensor, num_rows: int) -> Tensor:
    """`Columns.among` [2, N] of tokens at `places` [N]. Waits for no device."""
    at = torch.arange(len(places), device=places.device)
    begins = torch.cat([at[:1] == 0, places[1:] != places[:-1]])
    counts = places.new_zeros(num_rows).index_add_(0, places, torch.ones_like(places))
    return torch.stack([at - torch.where(begins, at, 0).cummax(0).values, counts[places]])
