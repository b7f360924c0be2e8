"""Decode steps as CUDA graphs: one launch per step, where launching its kernels one by one takes longer than they run.

A graph belongs to a plan and a number of rows. Its kernels read on the device where keys and values are and which
column is new (`skipdecode.kv.graph_cache`), so it serves every batch, whatever its length. Rows are padded to a ladder
of a few sizes, so the number of graphs is plans x sizes, and all are captured when a model loads (`capture_all`). A
graph includes greedy choice and the increment of the column. A batch whose rows share prefixes needs more kernels in
each layer: with the first such batch a graph is captured anew, and serves batches without prefixes, too. Steps that are
not captured run the same kernels one by one: once a capture has failed twice, if there are more rows than the ladder
has, if graphs have used up their share of memory, and if feed-forward blocks are decided per row (FFN-SkipLLM `row`).

Without a device the same code runs without capturing, which is how its logic is tested.

B rows, L layers, V vocabulary.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.backends.errors import is_out_of_memory
from skipdecode.cost.batch_sizes import FINEST, MAX_ROWS, ladder
from skipdecode.kv.graph_cache import CachePool, GraphedCache, Layout, PoolFull, PrefixTable, TableView
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import ALL_ROWS, FFNExecutor
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.sampler import argmax
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.schedule import Schedule

logger = logging.getLogger(__name__)

MAX_GRAPHS = 256  # further steps run kernel by kernel
TOO_MANY = f"at most {MAX_GRAPHS} graphs are kept"
MAX_GRAPH_BYTES = 2 << 30  # device memory for intermediate results of all graphs; further steps run kernel by kernel

Work = Callable[[], None]
"""Launches kernels on fixed memory; nothing in it depends on the host."""


class GraphCapture:
    """How work is captured. This base class captures nothing and does the work again, as devices other than GPUs do."""

    def warm_up(self, work: Work) -> None:
        """Does the work once: what libraries set up at their first call must not be captured."""
        work()

    def capture(self, work: Work) -> Work:
        """The work as one launch, without doing it now. Raises whatever capturing raises."""
        return work

    def forget(self) -> None:
        """Called when all graphs are gone."""

    def held_bytes(self) -> int:
        """Bytes of device memory that graphs hold for intermediate results; excludes the driver's own for each."""
        return 0


class CudaGraphCapture(GraphCapture):
    """Captures CUDA graphs.

    One stream serves every warm-up and every capture, since libraries keep a workspace for each stream that they meet
    (cuBLAS 32 MiB on Hopper). All graphs share one memory pool, since they replay one after another, but those captured
    after one that failed, which have another. A pool goes away with its last graph: `forget` drops them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._pools: list[Any] = []
        """All that graphs lie in; `_pool` is the one for the next graph."""

    def warm_up(self, work: Work) -> None:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # if it fails in the middle, it is run again here
            here.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._pools.append(self._pool)
        here = torch.cuda.current_stream(self._device)
        try:  # thread_local: other threads of a worker copy their own things meanwhile
            with (
                collector_held_off(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                work()
        except BaseException:
            self._abandon_pool()
            raise
        finally:  # a capture that fails at its end leaves its own stream current
            with torch.cuda.device(self._device):  # setting a stream sets its device too
                torch.cuda.set_stream(here)
        return graph.replay

    def _abandon_pool(self) -> None:
        """Ends a failed capture for torch's allocator too, and takes another pool for the next one.

        torch does so only where the driver has ended the capture well. Otherwise the allocator takes it to be under way
        for good: it puts off what is freed, and refuses to begin another capture in this pool.
        """
        device = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(Exception):  # the first raises where torch has ended it; what it is called is torch's affair
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        self._pool = None

    def forget(self) -> None:
        self._pool, self._pools = None, []

    def held_bytes(self) -> int:
        # From torch's snapshot of the graphs' pools alone: free device memory changes with other processes, and torch's
        # totals leave out a pool's memory between replays.
        if not self._pools:
            return 0
        pools = {tuple(pool) for pool in self._pools}
        try:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            return sum(int(one["total_size"]) for one in segments if tuple(one["segment_pool_id"]) in pools)
        except Exception:  # no snapshots (cudaMallocAsync), or in another format, which is torch's own: a figure only
            return 0


@contextmanager
def collector_held_off() -> Iterator[None]:
    """Keeps Python's collector of cycles from running: what it drops, such as a kernel's module, may call the driver,
    which ends a capture under way."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


Key = tuple[LayerPlan, int]
"""A plan and the padded number of rows."""


class _Graph(NamedTuple):
    replay: Work
    reads_prefixes: bool
    """Whether it serves batches that share prefixes."""


def plans_of(schedules: Iterable[Schedule], num_steps: int) -> list[LayerPlan]:
    """The distinct static plans of decode steps, deepest first."""
    plans = {schedule.step(k) for schedule in schedules for k in range(num_steps)}
    static = [plan for plan in plans if plan.is_static]
    return sorted(static, key=lambda plan: (-plan.num_layers_run, -sum(plan.ffn), plan.attn, plan.ffn))


class CudaGraphs:
    """The graphs of one model, and the memory of the caches they run on."""

    def __init__(
        self,
        model: Decoder,
        cache_bytes: int,
        *,
        max_rows: int = MAX_ROWS,
        captures: GraphCapture | None = None,
    ) -> None:
        """`cache_bytes`: memory for the K/V of all batches that exist at the same time."""
        self.model, self.max_rows = model, max_rows
        self.num_captured = self.num_late = self.graph_bytes = 0
        """Graphs captured since the start, those of them after `capture_all`, and the device memory they take."""
        self.failure: str | None = None
        """Why no more steps are captured, and those without a graph run kernel by kernel: the error of a capture that
        failed twice, or of a step's first run."""
        self.full: str | None = None
        """Why no more steps are captured, while existing graphs stay in use: memory, or their number."""
        self._captures = captures or (CudaGraphCapture(model.device) if model.device.type == "cuda" else GraphCapture())
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._fineness, self._is_loading = FINEST, False
        device, self.pool = model.device, CachePool(cache_bytes, model.kv_dtype, model.device)
        self._tokens = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self._num_pad = torch.zeros_like(self._tokens)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._where = torch.zeros(model.config.num_hidden_layers, 4, dtype=torch.int64, device=device)
        self._prefixes = PrefixTable(model.config.num_hidden_layers, self.max_rows, device)
        self._logits = torch.zeros(self.max_rows, model.config.vocab_size, dtype=model.dtype, device=device)
        self._serial, self._next, self._newest = -1, 0, self._tokens  # what these hold: of which cache, and column

    @property
    def nbytes(self) -> int:
        """Bytes of the cache pool; graphs hold the intermediate results of a step in addition (`graph_bytes`)."""
        return self.pool.nbytes

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.max_rows, self._fineness)

    def rows_for(self, num_rows: int) -> int:
        """The size to which a batch of `num_rows` is padded; above `max_rows` it is not."""
        return next((rung for rung in self.rungs if rung >= num_rows), num_rows)

    def has_room(self, num_rows: int, capacities: Sequence[int], kv_owner: Sequence[int]) -> bool:
        """True if `allocate` would find memory now."""
        return self.pool.has_room(Layout.of(self.model.config, self.rows_for(num_rows), capacities, kv_owner).count)

    def allocate(
        self,
        num_pad: Tensor,
        capacities: Sequence[int],
        kv_owner: Sequence[int],
        *,
        force_mask: bool = False,
        num_pad_host: Sequence[int] | None = None,
    ) -> GraphedCache:
        """`KVCache.allocate` from the pool; raises PoolFull if other batches leave too little memory."""
        layout = Layout.of(self.model.config, self.rows_for(len(num_pad)), capacities, kv_owner)
        return GraphedCache.within(
            self.pool, layout, num_pad, kv_owner, force_mask=force_mask, num_pad_host=num_pad_host
        )

    def allocate_prefixes(
        self, num_pad: Tensor, columns: int, kv_owner: Sequence[int], *, num_pad_host: Sequence[int]
    ) -> GraphedCache:
        """Memory of the pool for prefixes that rows share, as many as `num_pad` has numbers; PoolFull as above."""
        layout = Layout.of(self.model.config, len(num_pad), [columns] * len(kv_owner), kv_owner)
        return GraphedCache.within(self.pool, layout, num_pad, kv_owner, num_pad_host=num_pad_host)

    @torch.inference_mode()
    def capture_all(self, plans: Sequence[LayerPlan], rows: Sequence[int] | None = None) -> None:
        """Captures every plan at every number of `rows` (None: the whole ladder) ahead of the first batch.

        If that were more than MAX_GRAPHS, the ladder loses its quarters, then its midpoints. Evicts least recently used
        graphs of other plans.
        """
        known = {plan for plan, _ in self._graphs}
        if rows is None and not self._graphs:
            while self._fineness and len(known.union(plans)) * len(self.rungs) > MAX_GRAPHS:
                self._fineness -= 1
        wanted = self.rungs if rows is None else [self.rows_for(n) for n in rows if n <= self.max_rows]
        self._is_loading = True
        self._make_way({(plan, n) for plan in plans for n in wanted})
        gc.collect()  # since it is held off within each capture
        for n in sorted(set(wanted), reverse=True):  # the largest first: the others fit into its memory
            for plan in plans:
                if (plan, n) not in self._graphs and self._may_capture():
                    self._rehearse(plan, n)
        has_ended = self.failure is not None or self.full is not None
        if plans and has_ended:  # compile what runs without graphs before a batch has to wait for it
            for n in sorted(set(wanted)):
                self._rehearse(plans[0], n)
        self._is_loading = False
        if self.full is not None:
            logger.warning("some decode steps run kernel by kernel: %s", self.describe())

    def _make_way(self, wanted: set[Key]) -> None:
        """Evicts least recently used graphs of other keys so that `wanted` fit into MAX_GRAPHS."""
        others = [key for key in self._graphs if key not in wanted]
        for key in others[: max(0, len(wanted) + len(others) - MAX_GRAPHS)]:
            del self._graphs[key]
        if self.full == TOO_MANY:
            self.full = None

    def _rehearse(self, plan: LayerPlan, rows: int) -> None:
        """Runs a step of dummy rows, with one column of memory for all layers, and captures it if possible."""
        layers = self.model.config.num_hidden_layers
        try:
            cache = self.allocate(torch.zeros_like(self._num_pad[:rows]), [1] * layers, [0] * layers, force_mask=True)
        except PoolFull:  # then there will never be such a batch
            return
        try:
            self._enter(torch.zeros_like(self._tokens[:rows]), cache, rows)
            self._first_run(plan, rows, None) if self._may_capture() else self._step(plan, rows, None)
        except torch.OutOfMemoryError as error:  # smaller batches may still fit
            self.full = _no_room(error)
        except Exception as error:  # not the graphs' fault; a batch that meets it fails with it
            self._at.tolist()  # raises where the device itself is lost
            logger.warning("a decode step of %d rows fails: %s: %s", rows, type(error).__name__, error)
        self._serial = -1

    def __call__(
        self,
        newest: Tensor,
        cache: KVCache,
        plan: LayerPlan,
        ffns: FFNExecutor = ALL_ROWS,
        *,
        return_argmax: bool = False,
    ) -> Tensor:
        """Feeds `newest` [B] after what is in `cache`: logits [B, V], valid until the next call, or with
        `return_argmax` the most likely token of each row [B]."""
        assert isinstance(cache, GraphedCache), "the cache was not allocated here"
        num_rows = len(newest)
        rows = self.rows_for(num_rows)
        if rows > self.max_rows or not plan.is_static:
            last = self.model.config.max_position_embeddings - 1
            positions = cache.next_positions[:, None].clamp(max=last)
            return self.model.forward(newest[:, None], positions, cache, plan, ffns, return_argmax=return_argmax)
        self._enter(newest, cache, rows)
        graph, prefixes = self._graphs.get((plan, rows)), None if cache.shared is None else self._prefixes
        if graph is not None and (prefixes is None or graph.reads_prefixes):
            self._graphs.move_to_end((plan, rows))
            graph.replay()
        elif self._may_capture(replaces=graph is not None):
            self._first_run(plan, rows, prefixes)
        else:
            self._step(plan, rows, prefixes)
        cache.length += 1
        self._next += 1
        if not return_argmax:
            self._newest = self._tokens  # equal to no tensor that a caller has
            return self._logits[:num_rows]
        self._newest = self._tokens[:num_rows].clone()
        return self._newest

    def _may_capture(self, *, replaces: bool = False) -> bool:
        """True if another step may be captured, in place of a graph that there is or not."""
        if replaces:
            return self.failure is None and self.full in (None, TOO_MANY)
        if self.failure is None and self.full is None and self.num_graphs >= MAX_GRAPHS:
            self.full = TOO_MANY
        return self.failure is None and self.full is None

    def _enter(self, newest: Tensor, cache: GraphedCache, rows: int) -> None:
        """Copies what the step reads into its fixed memory, unless it is there already."""
        has_come = self._serial != cache.serial
        if has_come:
            self._where.copy_(cache.where)
            self._num_pad[: len(newest)].copy_(cache.num_pad)
            self._num_pad[len(newest) : rows].fill_(cache.length)  # padding rows attend to what they write
            self._prefixes.fill(cache.shared)
            self._serial = cache.serial
        if has_come or self._next != cache.length:
            self._at.fill_(cache.length)
            self._next = cache.length
        if has_come or newest is not self._newest:
            self._tokens[: len(newest)].copy_(newest)

    def _first_run(self, plan: LayerPlan, rows: int, prefixes: PrefixTable | None) -> None:
        """Runs the step, and captures it for the next time."""

        def work() -> None:
            self._step(plan, rows, prefixes)

        try:
            self._captures.warm_up(work)
        except torch.OutOfMemoryError:  # the caller halves the batch
            raise
        except Exception as error:
            self._fail(error)
            work()  # an error now is the batch's own
            return
        try:
            replay = self._captured(work)
        except Exception as error:  # whatever it is, steps without a graph run all the same
            if self._graphs and is_out_of_memory(error):
                self.full = _no_room(error)
                return
            self._fail(error)
            return
        self.num_captured += 1
        self.num_late += not self._is_loading
        self._graphs[plan, rows] = _Graph(replay, prefixes is not None)
        self.graph_bytes = self._captures.held_bytes()
        if self.graph_bytes > MAX_GRAPH_BYTES:
            self.full = f"all of them may take {MAX_GRAPH_BYTES / 2**30:g} GiB"

    def _captured(self, work: Work) -> Work:
        """The work as a graph. A capture that fails is tried once more, for it may be chance: a call of another thread
        or library that no capture allows."""
        try:
            return self._captures.capture(work)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._at.tolist()  # raises where the device itself is lost
            logger.warning("capturing a decode step failed, and is tried again: %s: %s", type(error).__name__, error)
        return self._captures.capture(work)

    def _fail(self, error: Exception) -> None:
        """From now on no more steps are captured; existing graphs stay in use."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"[:500]
        self._at.tolist()  # raises where the device itself is lost
        logger.warning("decode steps run kernel by kernel, since capturing one failed: %s", self.failure)
        if not self._graphs:
            self._captures.forget()
            self.graph_bytes = 0

    def _step(self, plan: LayerPlan, rows: int, prefixes: PrefixTable | None) -> None:
        """The work of a graph: runs the tokens of `rows` rows through `plan`, and computes logits, most likely tokens
        and the next column."""
        model, num_pad, tokens = self.model, self._num_pad[:rows], self._tokens[:rows]
        last, positions = model.config.max_position_embeddings - 1, self._at - num_pad
        if prefixes is not None:
            positions = positions + prefixes.counts(rows)
        positions = positions[:, None].clamp(max=last)
        view = TableView(self.pool.memory, self._where, num_pad, self._at, positions, model.rotary_tables, prefixes)
        h, _ = run_layers(model, model.embed(tokens[:, None], positions), view, LayerRanges.of_plan(plan))
        # logits go into memory that graphs share, so that callers who want them need no copy
        logits = model.head_into(h[:, -1], self._logits[:rows])
        tokens.copy_(argmax(logits))
        self._at.add_(1)

    def describe(self) -> str:
        """A summary for logs."""
        if self.failure is not None and not self._graphs:
            return f"no graphs ({self.failure})"
        found = f"{self.num_graphs} graphs in {self.graph_bytes / 2**30:.2f} GiB"
        found += f", {self.num_late} of them after loading" if self.num_late else ""
        found += f", full ({self.full})" if self.full is not None else ""
        found += f", no more ({self.failure})" if self.failure is not None else ""
        return f"{found}, {self.nbytes / 2**30:.1f} GiB for caches"


def _no_room(error: Exception) -> str:
    return f"the device has no memory for another; {error}".splitlines()[0][:300]


def graphs_serve(model: Decoder) -> bool:
    """True if steps can be captured: on a GPU whose back end has kernels that read their bounds on the device."""
    return model.device.type == "cuda" and backend_on(model.device).supports_graph_capture
