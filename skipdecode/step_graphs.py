"""Decode steps as CUDA graphs: one launch per step, where launching its kernels one by one takes longer than they run.

A graph replays fixed kernels on fixed memory. So the caches of all batches lie in the same memory, the column that a
step writes is a number on the device, and attention reads columns in whole steps of COLUMN_STEP behind a mask. Plans
and visible columns both change monotonically in a batch, so it takes about as many graphs as plans plus column steps.
A graph is captured when its key comes the second time; the first time is its warm-up.

On a CPU the same code runs without a capture, which is how its logic is tested there. Steps in which rows decide on
their own blocks (FFN-SkipLLM `row`, `random`) are not captured. One batch at a time.

B rows, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skipdecode.decoder import Decoder, run_layers
from skipdecode.extents import Extents
from skipdecode.kv.graphed import COLUMN_STEP, GraphedCache, GraphedView
from skipdecode.kv.padded import KVCache
from skipdecode.plan import LayerPlan

MAX_GRAPHS = 256  # the least recently used goes first

Key = tuple[LayerPlan, int, int, tuple[int, ...]]
"""Plan, rows, visible columns, columns of each layer."""


def step_graphs(model: Decoder) -> "StepGraphs | None":
    """For a model on a GPU; elsewhere launches cost little, and kernels that read no masked column cost less."""
    return StepGraphs(model) if model.device.type == "cuda" else None


class StepGraphs:
    """The graphs of one model, and the memory of the caches they run on."""

    def __init__(self, model: Decoder) -> None:
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
        shape = {o: (rows, config.num_kv_heads, -(-capacities[o] // COLUMN_STEP) * COLUMN_STEP, config.head_dim)
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
        assert plan.is_settled, "which rows run a block is not known before"
        rows, columns = len(newest), -(-(cache.length + 1) // COLUMN_STEP) * COLUMN_STEP
        self._tokens[:rows].copy_(newest)
        self._num_pad[:rows].copy_(cache.num_pad)
        self._at.fill_(cache.length)
        key, extents = (plan, rows, columns, tuple(k.shape[2] for k in cache.k)), Extents.of_plan(plan)

        def run() -> None:
            num_pad = self._num_pad[:rows]
            last = self.model.config.max_position_embeddings - 1
            positions = (self._at - num_pad)[:, None].clamp(max=last)
            view = GraphedView(cache, num_pad, self._at, columns, positions, self.model.rotations)
            h, _ = run_layers(self.model, self.model.embed(self._tokens[:rows, None], positions), view, extents)
            self._logits[:rows].copy_(self.model.head(h[:, -1]))

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
