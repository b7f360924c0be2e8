"""Decode steps as CUDA graphs: one launch per step, where launching its kernels one by one takes longer than they run.

A graph replays fixed kernels on fixed memory. So the caches of all batches lie in the same memory, the column that a
step writes is a number on the device, and attention reads columns in whole steps of COLUMN_STEP behind a mask. Plans
and visible columns both change monotonically in a batch, so it takes about as many graphs as plans plus column steps.
A graph is captured when its key comes the second time; the first time is its warm-up.

On a CPU the same code runs without a capture, which is how its logic is tested there. Steps in which rows decide on
their own blocks (FFN-SkipLLM `row`, `random`) are not captured. One batch at a time.

B rows, S columns visible, H heads, K head dim, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from skipdecode.cache import KVCache
from skipdecode.model import OPT
from skipdecode.plan import LayerPlan

COLUMN_STEP = 32  # a graph for every so many columns; also what a layer's memory is rounded up to
MAX_GRAPHS = 256  # the least recently used goes first

Key = tuple[LayerPlan, int, int, tuple[int, ...]]
"""Plan, rows, visible columns, columns of each layer."""


class GraphedCache(KVCache):
    """A `KVCache` in memory of `StepGraphs`; `keep` moves rows within it."""

    def keep(self, rows: Tensor) -> Self:
        for owner in set(self.owners):
            for memory in (self.k[owner], self.v[owner]):
                memory[: len(rows)] = memory[rows]  # indexing copies first
        return self._of(slice(len(rows)), rows)  # leading rows: the same addresses and strides, however many


class _Window(KVCache):
    """What a captured step sees of a cache: `columns` of them, of which it writes the one that `at` [1] says."""

    def __init__(self, cache: KVCache, num_pad: Tensor, at: Tensor, columns: int) -> None:
        self.k, self.v, self.owners, self.num_pad = cache.k, cache.v, cache.owners, num_pad
        self._at, self._columns, self.length = at, columns, 0

    @property
    def can_attend(self) -> bool:
        return False

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k[layer].index_copy_(2, self._at, k)
        self.v[layer].index_copy_(2, self._at, v)
        return self.read(layer, 1)

    def read(self, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        return self.k[layer][:, :, : self._columns], self.v[layer][:, :, : self._columns]

    def mask(self, num_new: int) -> Tensor:
        columns = torch.arange(self._columns, device=self._at.device)
        may = (columns >= self.num_pad[:, None]) & (columns <= self._at)
        # additive, so that the attention of every layer need not make it so
        bias = torch.zeros(may.shape, dtype=self.k[0].dtype, device=may.device).masked_fill_(~may, float("-inf"))
        return bias[:, None, None]


def step_graphs(model: OPT) -> "StepGraphs | None":
    """For a model on a GPU; elsewhere launches cost little, and kernels that read no masked column cost less."""
    return StepGraphs(model) if model.device.type == "cuda" else None


class StepGraphs:
    """The graphs of one model, and the memory of the caches they run on."""

    def __init__(self, model: OPT) -> None:
        self.model = model
        self.num_captured = 0
        self._memory: dict[tuple[str, int], Tensor] = {}  # flat, of K and V by layer
        self._tokens = self._num_pad = torch.empty(0, dtype=torch.int64, device=model.device)
        self._at = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._logits = torch.empty(0, dtype=model.dtype, device=model.device)
        self._replays: OrderedDict[Key, Callable[[], None] | None] = OrderedDict()  # None: has run once
        self._pool: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held for caches; graphs hold the intermediate results of a step beside them."""
        return sum(t.numel() * t.element_size() for t in self._memory.values())

    def clear(self) -> None:
        """Gives all memory back."""
        self._replays.clear()
        self._memory.clear()
        self._pool = None
        self._tokens = self._num_pad = self._tokens.new_empty(0)
        self._logits = self._logits.new_empty(0)

    def allocate(
        self, num_pad: Tensor, capacities: Sequence[int], owners: Sequence[int], *, is_masked: bool = False
    ) -> KVCache:
        """As `KVCache.allocate`, in the memory of the batch before, which ends that batch."""
        config, rows = self.model.config, len(num_pad)
        shape = {o: (rows, config.num_attention_heads, -(-capacities[o] // COLUMN_STEP) * COLUMN_STEP, config.head_dim)
                 for o in set(owners)}  # fmt: skip
        sizes = {(name, owner): torch.Size(shape[owner]).numel() for owner in shape for name in "kv"}
        if any(key not in self._memory or self._memory[key].numel() < size for key, size in sizes.items()):
            had = {key: t.numel() for key, t in self._memory.items()}
            self.clear()  # graphs know the old addresses; and there may not be room for both
            for key in had | sizes:
                size = max(had.get(key, 0), sizes.get(key, 0))
                self._memory[key] = torch.empty(size, dtype=self.model.dtype, device=self.model.device)
        if rows > len(self._tokens):
            self._replays.clear()
            self._tokens, self._num_pad = num_pad.new_zeros(rows), num_pad.new_zeros(rows)
            self._logits = self._logits.new_empty(rows, config.vocab_size)
        own = {key: self._memory[key][:size].view(shape[key[1]]) for key, size in sizes.items()}
        for part in own.values():
            part.zero_()  # behind the mask too: a weight of 0 times what is not a number would be none
        k, v = [own["k", owner] for owner in owners], [own["v", owner] for owner in owners]
        return GraphedCache(k, v, num_pad, owners, is_masked=is_masked)

    def __call__(self, newest: Tensor, cache: KVCache, plan: LayerPlan) -> Tensor:
        """Feeds `newest` [B] behind what is in `cache`: logits [B, V], good until the next call."""
        assert isinstance(cache, GraphedCache), "a cache from elsewhere"
        assert not plan.by_row, "which rows run a block is not known before"
        rows, columns = len(newest), -(-(cache.length + 1) // COLUMN_STEP) * COLUMN_STEP
        self._tokens[:rows].copy_(newest)
        self._num_pad[:rows].copy_(cache.num_pad)
        self._at.fill_(cache.length)
        key = (plan, rows, columns, tuple(k.shape[2] for k in cache.k))

        def run() -> None:
            num_pad = self._num_pad[:rows]
            last = self.model.config.max_position_embeddings - 1
            positions = (self._at - num_pad)[:, None].clamp(max=last)
            window = _Window(cache, num_pad, self._at, columns)
            self._logits[:rows].copy_(self.model(self._tokens[:rows, None], positions, window, plan))

        if key not in self._replays:
            self._replays[key] = None
            while len(self._replays) > MAX_GRAPHS:
                self._replays.popitem(last=False)
            self._warm_up(run)
        else:
            replay = self._replays[key] or self._capture(run)
            self._replays[key] = replay
            self._replays.move_to_end(key)
            replay()
        cache.length += 1
        return self._logits[:rows]

    def _warm_up(self, run: Callable[[], None]) -> None:
        """The step itself, on a stream beside: what libraries set up at their first call must not be captured."""
        if self.model.device.type != "cuda":
            return run()
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            run()
        here.wait_stream(beside)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        if self.model.device.type != "cuda":
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()  # graphs replay one after another, so they may share
        return graph.replay
