"""A static batch: rows that start together and therefore share steps and plans; prefill, then one step at a time.

The host decides plans and which rows have ended; the device runs. The host reads tokens every `check_every` steps.
Tokens generated after a row's end are discarded, so reading late never changes the output. `generate` runs one batch to
its end; a server alternates between several. The caller chooses the rows.

B rows, P prompt columns, N new tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.sampling import Sampling
from skipdecode.engine.async_output import AsyncOutput
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.logits_processor import LogitsProcessor
from skipdecode.engine.logprobs import LogprobRecorder, assign
from skipdecode.engine.prefill import allocate_cache, feed_prompts, pad_prompts, shared_prompts
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row, refuse_too_long
from skipdecode.engine.results import BatchStats
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import ffn_executor
from skipdecode.model.sampler import Sampler
from skipdecode.schedules.schedule import Schedule

COMPACT_AT = 0.5  # drop ended rows when at most this share of the batch still runs
CHECK_EVERY = {"cpu": 1, "cuda": 4}  # steps whose tokens the host reads together
MAX_PENDING = {"cpu": 0, "cuda": 1}  # outputs that may still be on their way while the next steps run


class StaticBatch:
    """A batch of requests under one schedule: call `prefill`, then `step` until `is_done`.

    `rows` are in the order of the requests, ended ones included.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        requests: Sequence[Request],
        schedule: Schedule,
        *,
        decode_text: DecodeText | None = None,
        prompt_columns: int | None = None,
        batch_rows: int | None = None,
        compact_at: float = COMPACT_AT,
        check_every: int | None = None,
        max_pending: int | None = None,
        graphs: CudaGraphs | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        """`compact_at`: ended rows are dropped once at most this share of the batch is running (0: never, 1: at once).
        `check_every`, `max_pending`: None for the device's defaults. The others are as in `generate`."""
        assert requests, "an empty batch"
        begun, device, is_fixed = synchronized_time(model.device), model.device, batch_rows is not None
        refuse_too_long(requests, model.config.max_position_embeddings)
        self.model, self.schedule, self._graphs, self._decode_text = model, schedule, graphs, decode_text
        self.rows = [Row(request) for request in requests]
        self.num_new = max(request.sampling.max_new_tokens for request in requests)
        self.compact_at, self.check_every = compact_at, check_every or CHECK_EVERY[device.type]
        self._longest = max(len(r.prompt_tokens) for r in requests)

        # prompts and their cache; `_feed(plan, return_argmax=...)` runs prefill
        allocate = partial(
            allocate_cache, model, schedule=schedule, num_new=self.num_new, force_mask=is_fixed, graphs=graphs
        )
        self._feed: Callable[..., Tensor]
        if sharing is None:
            tokens, num_pad, num_pad_host = pad_prompts(model, requests, prompt_columns, batch_rows)
            self._cache = allocate(num_pad, tokens.shape[1], num_pad_host=num_pad_host)
            self._feed = partial(feed_prompts, model, tokens, self._cache, in_equal_parts=is_fixed)
        else:
            assert not is_fixed, "prefix sharing excludes a fixed batch shape"
            shared = shared_prompts(model, requests, schedule, sharing, allocate, graphs=graphs)
            self._cache, self._feed = shared.cache, shared.feed

        # rows of the batch on the device, including those that pad a fixed shape
        num_rows = len(self._cache.num_pad)
        empty = num_rows - len(requests)
        ids = [r.id for r in requests] + [""] * empty
        samplings = [r.sampling for r in requests] + [Sampling()] * empty
        self._sampler = Sampler(ids, samplings, self.num_new, device)
        gather = device.type == "cpu" and not is_fixed  # gathering needs a host sync on GPUs
        self._ffns = ffn_executor(schedule, num_rows, device, gather=gather)

        # output. `_unsent_tokens`: tokens [B] of the steps not yet sent to the host; `_output`: copies in flight
        self._num_made, self._unsent_tokens = 0, list[Tensor]()
        self._batch_rows = list(range(len(self.rows)))  # batch row -> index into `rows`; padding rows follow
        self._logprobs = LogprobRecorder(self.rows, device)
        self._output: AsyncOutput[tuple[list[int], list[Row]]] = AsyncOutput(device)
        self._max_pending = MAX_PENDING[device.type] if max_pending is None else max_pending
        self._process = LogitsProcessor(model.config.eos_token_ids, model.config.vocab_size, device)
        self._is_processed = any(row.request.sampling.processes_logits for row in self.rows)
        if self._is_processed:  # the next step's logits depend on the newest token
            self.check_every, self._max_pending = 1, 0
        input_tokens = sum(len(r.prompt_tokens) for r in requests)
        columns = self._longest if prompt_columns is None else prompt_columns
        is_packed = not is_fixed and model.supports_packed_prompts(self._cache.k[0])
        self.stats = BatchStats(
            rows=len(self.rows),
            prompt_columns=columns,
            prompt_padding=0 if is_packed else num_rows * columns - input_tokens,
            input_tokens=input_tokens,
            prefix_tokens_saved=0 if sharing is None else sharing.tokens_saved,
            cache_bytes=self._cache.nbytes,
            prefill_s=synchronized_time(device) - begun,
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache now; `stats` have what it began with."""
        return self._cache.nbytes

    @property
    def is_done(self) -> bool:
        """True if no row is running any more."""
        return not any(row.is_running for row in self.rows)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Feeds the prompts and generates the first token of every row."""
        start = synchronized_time(self.model.device)
        output = self._feed(self.schedule.prefill(), return_argmax=self._needs_argmax_only)
        del self._feed  # releases the prompts, and prefixes that have been copied
        self._choose(output)
        self.stats.prefill_s += synchronized_time(self.model.device) - start
        self._read_output_if_due()

    @torch.inference_mode()
    def step(self) -> None:
        """Feeds the newest token of every row and generates the next one."""
        k, newest, cache, ffns = self._num_made - 1, self._newest, self._cache, self._ffns
        plan, stats = self.schedule.step(k), self.stats
        stats.decode_steps += 1
        stats.row_steps += len(newest)
        stats.layer_row_steps += len(newest) * plan.num_layers_run
        stats.batch_rows.append(len(newest))
        ffns.start(plan, k)
        if self._graphs is not None:
            output = self._graphs(newest, cache, plan, ffns, return_argmax=self._needs_argmax_only)
        else:
            positions = cache.next_positions[:, None]  # [B, 1]
            if self._longest + k > (last := self.model.config.max_position_embeddings - 1):
                positions = positions.clamp(max=last)  # only ended rows get that far
            output = self.model(newest[:, None], positions, cache, plan, ffns, return_argmax=self._needs_argmax_only)
        self._choose(output)
        stats.deferred_ffn_rows.append(ffns.rows_run)
        self._read_output_if_due()

    @property
    def _needs_argmax_only(self) -> bool:
        """True if of the logits only the most likely token is wanted."""
        return self._sampler.is_greedy and not self._logprobs.is_asked and not self._is_processed

    def _choose(self, output: Tensor) -> None:
        """Chooses the next token of every row. `output`: logits [B, V], or already the argmax [B] if
        `_needs_argmax_only`."""
        if self._needs_argmax_only:
            self._newest = output  # [B]
        else:
            processed = self._process(output, [self.rows[index] for index in self._batch_rows])
            self._newest = self._sampler(processed, self._num_made)
        self._unsent_tokens.append(self._newest)
        self._num_made += 1
        if self._logprobs.is_asked:
            self._logprobs.record(output, self._newest)

    def _read_output_if_due(self) -> None:
        is_last = self._num_made == self.num_new
        if len(self._unsent_tokens) == self.check_every or is_last:
            asking, seen = self._logprobs.take()
            unsent, self._unsent_tokens = self._unsent_tokens, []
            tokens = unsent[0][:, None] if len(unsent) == 1 else torch.stack(unsent, dim=1)
            self._output.send([tokens, *seen], (self._batch_rows, asking))
        # The first tokens are read at once; counts of feed-forward blocks are not copied asynchronously.
        is_eager = is_last or self._num_made == 1 or self._ffns.has_counts
        while self._output.num_pending > (0 if is_eager else self._max_pending):
            self._read_output()

    def _read_output(self) -> None:
        """Gives the oldest pending tokens to their rows; drops ended rows once enough have ended."""
        rows = self.rows
        (tokens, *seen), (batch_rows, asking) = self._output.take()  # [B, n]
        assign(asking, seen)
        if self._ffns.has_counts:
            for index, ran in zip(batch_rows, self._ffns.history(), strict=False):
                rows[index].ffns += ran
        for index, new in zip(batch_rows, tokens.tolist(), strict=False):
            row = rows[index]
            if row.is_running:
                row.take(new, self.model.config.eos_token_ids, self._decode_text)
        batch_rows, size = self._batch_rows, len(self._newest)
        running = [at for at, index in enumerate(batch_rows) if rows[index].is_running]
        kept = kept_rows(size, len(running), self.compact_at, self._graphs)
        if kept < size:
            others = [at for at, index in enumerate(batch_rows) if not rows[index].is_running]
            self._keep(sorted(running + others[: kept - len(running)]))

    def _keep(self, kept: list[int]) -> None:
        """Keeps only `kept`, some already ended."""
        keep = to_device(kept, self.model.device)
        self._sampler.keep(keep)
        self._ffns.keep(keep)
        self._batch_rows = [self._batch_rows[at] for at in kept]
        runs = self.schedule.step(self._num_made - 1).attn  # no later step runs a layer that this one does not
        self._newest, self._cache = self._newest[keep], self._cache.keep(kept, runs)
        self._logprobs.keep([self.rows[index] for index in self._batch_rows])


def kept_rows(size: int, num_running: int, compact_at: float, graphs: CudaGraphs | None) -> int:
    """The number of rows that a batch of `size` continues with: the running ones, once they are few enough, and some
    ended ones where CUDA graphs exist only for certain sizes."""
    if not num_running or num_running >= size or num_running > compact_at * size:
        return size
    return num_running if graphs is None else min(size, graphs.rows_for(num_running))


def carried_rows(lengths: Sequence[int], compact_at: float = COMPACT_AT, check_every: int = 1) -> list[int]:
    """Rows in the batch at each decode step (`BatchStats.batch_rows`) if row i generates `lengths[i]` tokens and no
    CUDA graphs are used: ended rows stay until they are dropped."""
    carried, size = [], len(lengths)
    for made in range(1, max(lengths)):
        if made == 1 or made % check_every == 0:
            size = kept_rows(size, sum(length > made for length in lengths), compact_at, None)
        carried.append(size)
    return carried


def synchronized_time(device: torch.device) -> float:
    """The clock in seconds, after waiting for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
