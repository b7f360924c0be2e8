"""`Generator`: the model of one worker. Loads once, takes a window of rows, gives back as many answers in their order.

A plain class without Ray; Ray Data and the tests call it alike. It sorts the window into length buckets, decodes in
batches, measures a share of the batches at full depth too, and turns a batch that cannot be decoded into smaller ones
until the row at fault is alone. It knows nothing of files, tables or clusters.
"""

import copy
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.batching.buckets import Batch
from actors.batching.full_depth_sample import Turns, predicted
from actors.batching.memory_budget import DETERMINISTIC_ROWS, Room
from actors.batching.prefix_batches import NOMINAL, PromptPrices
from actors.batching.prompt_scoring import is_scored_alone, score_alone, scored
from actors.batching.windows import Cutting, sharing_in
from actors.generator_config import GeneratorConfig as GeneratorConfig
from actors.gpu_memory import is_lost
from actors.model_loading import load, make_graphs
from actors.results import Answer, RowFailure, WindowResult, agreement, figures
from actors.warm_up import NEW_TOKENS, PROMPT_TOKENS, ROWS, warm_up
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.cost.roofline import Ceilings, measure_ceilings
from skipdecode.engine.cuda_graphs import plans_of
from skipdecode.engine.generate import BatchResult, Completion, Request, generate
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.model.pipeline_parallel import dtype_name
from skipdecode.schedules.from_config import known_acceptance, make_schedule
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import FullDepth, LayerPlan, Schedule
from skipdecode.speculative.draft_length import DraftLength
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.generate import generate_lossless
from skipdecode.speculative.latency_model import Prices

logger = logging.getLogger(__name__)

DRAFT_TOKENS = 64  # new tokens that drafts without a horizon are made for, as trainings are by default
MAX_STEPS = 4096  # decode steps that are looked through for plans to capture: every depth comes within them


class Generator:
    def __init__(self, config: GeneratorConfig) -> None:
        start = time.perf_counter()
        self.config = config
        loaded = load(config)
        self.model, self.devices, self.dtype = loaded.model, loaded.devices, loaded.dtype
        self.device = self.devices[0]
        self.tokenizer = Tokenizer(config.tokenizer or config.source, self.model.config)
        self.full = FullDepth(self.model.config.num_hidden_layers)
        self.ceilings: Ceilings | None = None
        self._draft_lengths: dict[Lossless, DraftLength] = {}
        self._vocabulary = DraftVocabulary(self.model.config.vocab_size)  # one, since the model keeps one head for it
        self._measure()
        self.room = Room(self.model.config, self.dtype.itemsize, self.devices, config.memory_share)
        self.graphs = make_graphs(config, self.model, self.room)  # takes what is left of the device
        self.room = replace(self.room, graphs=self.graphs)
        self._turns = Turns()
        self._prices: dict[LayerPlan, PromptPrices] = {}
        self._warm_up()
        self.load_s = time.perf_counter() - start

    def with_decode(
        self,
        decode: dict[str, Any],
        batch_size: int | None = None,
        prefill: str | None = None,
        length_buckets: Sequence[int] = (),
    ) -> "Generator":
        """The same loaded model under another `decode:` mapping (batch size, prefill, buckets), counting anew."""
        other = copy.copy(self)
        other.config = replace(
            self.config,
            decode=decode,
            batch_size=batch_size or self.config.batch_size,
            prefill=prefill or self.config.prefill,
            length_buckets=tuple(length_buckets) or self.config.length_buckets,
        )
        other._measure()
        other._turns = Turns()
        other._draft_lengths = {}
        other._warm_up()
        return other

    def _measure(self) -> None:
        if self.ceilings is None and (self.config.baseline_fraction > 0 or self.config.decode.get("lossless")):
            self.ceilings = measure_ceilings(str(self.device), dtype_name(self.dtype))

    @property
    def numbers(self) -> str:
        """What it computes in, for people: `bfloat16`, `bfloat16, int8 weights`."""
        return dtype_name(self.dtype) + (f", {self.config.quantization} weights" if self.config.quantization else "")

    def schedule(self, max_new_tokens: int) -> Schedule:
        """The schedule of a row with that limit; rows with equal schedules share batches. Where it only drafts, it is
        the same for all limits: rows of full depth share batches whatever theirs are."""
        if self.config.decode.get("lossless"):
            max_new_tokens = DRAFT_TOKENS
        return make_schedule(
            self.config.decode,
            num_layers=self.model.config.num_hidden_layers,
            max_new_tokens=max_new_tokens,
            kv_layers=self.model.config.kv_layers(self.config.prefill),
        )

    def draft_length(self, schedule: Lossless) -> DraftLength:
        """Decides how many tokens that schedule's batches draft; one for all of them, which learns from each."""
        if schedule not in self._draft_lengths:
            ceilings = None if self.config.deterministic else self.ceilings  # time decides nothing there
            prices, known = Prices.of(self.model, ceilings), known_acceptance(self.model.config, schedule)
            self._draft_lengths[schedule] = DraftLength(schedule, prices, known, vocabulary=self._vocabulary)
        return self._draft_lengths[schedule]

    def __call__(self, requests: Sequence[Request], may_measure: bool = True) -> WindowResult:
        """One answer per request, in order; a row that cannot be decoded is a `RowFailure`, never an exception.

        `may_measure`: a share of the batches is decoded at full depth too. Not of rows that are no fair sample (parts
        of another worker's window are small, and of the longest rows); these do not count for the share either.
        """
        answers: dict[int, Answer] = {}
        result = WindowResult([])
        batches = self.cut(requests)
        random.Random(self._turns.batches).shuffle(batches)  # else the first pairs have the shortest prompts
        for batch in batches:
            schedule = self.schedule(requests[batch.rows[0]].sampling.max_new_tokens)
            answers |= self._decode(batch, requests, schedule, result.batches, may_measure)
        assert sorted(answers) == list(range(len(requests))), "rows in are not rows out"
        result.answers = [answers[row] for row in range(len(requests))]
        return result

    def decode_batches(self, requests: Sequence[Request]) -> list[tuple[Batch, BatchResult]]:
        """The batches of a window with what each cost, for whoever measures; an error is raised, and none is split.

        Scores of prompts count as part of the prefill.
        """
        found = []
        for batch in self.cut(requests):
            chosen = [requests[row] for row in batch.rows]
            result = self._run(batch, chosen, self.schedule(chosen[0].sampling.max_new_tokens))
            result.stats.prefill_s += scored(self.model, chosen, result, not self.config.deterministic)[1]
            found.append((batch, result))
        return found

    @property
    def cutting(self) -> Cutting:
        """How windows are cut into batches; made anew, for graphs and room may change."""
        return Cutting(
            full=self.full,
            schedule=self.schedule,
            batch_size=self.batch_size,
            buckets=self.config.length_buckets,
            shares=self.config.shares_prefixes and not self.config.deterministic and len(self.devices) == 1,
            copies_prefixes=not self.model.supports_shared_prefix or self.graphs is not None,
            price=partial(
                PromptPrices.of,
                self.model.config,
                ceilings=self.ceilings or NOMINAL[self.device.type],
                itemsize=self.dtype.itemsize,
                weight_itemsize=self.model.weight_itemsize,
            ),
            known_prices=self._prices,
        )

    def cut(self, requests: Sequence[Request]) -> list[Batch]:
        """The batches that a window is decoded in."""
        return self.cutting.cut(requests)

    def sharing_of(self, requests: Sequence[Request], schedule: Schedule) -> PrefixSharing | None:
        """What a batch of whoever waits together shares; None: nothing that pays."""
        return self.cutting.sharing_of(requests, schedule)

    def batch_size(self, bucket: int, max_new_tokens: int, *, head_columns: int = 0) -> int:
        """Rows per batch for prompts of up to `bucket` tokens. `head_columns`: of heads beside these, per row."""
        if self.config.batch_size:
            return self.config.batch_size
        if self.config.deterministic:  # free memory must not choose a shape
            return DETERMINISTIC_ROWS
        schedules = {self.schedule(max_new_tokens): 1.0}
        if self.config.baseline_fraction > 0:  # the same rows at full depth, which on a host may take twice the share
            schedules[self.full] = 1.0 if self.room.is_cuda else 0.5
        return self.room.rows(schedules, prompt_columns=bucket, num_new=max_new_tokens, head_columns=head_columns)

    def _capture(self) -> None:
        """All graphs that batches under this configuration ask for."""
        if self.graphs is None:
            return
        schedules = [self.schedule(min(self.model.config.max_position_embeddings, MAX_STEPS))]
        schedules += [self.full] if self.config.baseline_fraction > 0 else []
        rows = [self.graphs.max_rows] if self.config.deterministic else None
        self.graphs.capture_all(plans_of(schedules, MAX_STEPS), rows)
        logger.info("%s", self.graphs.describe())

    def _decode(
        self,
        batch: Batch,
        requests: Sequence[Request],
        schedule: Schedule,
        records: list[dict[str, Any]],
        may_measure: bool,
        split_error: str | None = None,
    ) -> dict[int, Answer]:
        """`split_error`: why the larger batch that this one is a half of could not be decoded."""
        chosen = [requests[row] for row in batch.rows]
        try:
            completions = self._measured(batch, chosen, schedule, records, may_measure)
            if split_error is not None:
                records[-1]["split_error"] = split_error
            return dict(zip(batch.rows, completions, strict=True))
        except Exception as error:  # whatever a batch dies of must not take its neighbours along
            if is_lost(error, self.devices):
                raise  # every later batch would fail too; a new process may not
            message = f"{type(error).__name__}: {error}"[:2000]
        # Outside `except`: the traceback holds the dead batch's cache, and its halves need that memory. Graphs stay.
        if len(batch.rows) == 1:
            return {batch.rows[0]: RowFailure("engine_error", message)}
        half = len(batch.rows) // 2
        answers: dict[int, Answer] = {}
        for part in (slice(half), slice(half, None)):
            answers |= self._decode(batch.of(part), requests, schedule, records, may_measure, message)
        return answers

    def _measured(
        self,
        batch: Batch,
        chosen: Sequence[Request],
        schedule: Schedule,
        records: list[dict[str, Any]],
        may_measure: bool,
    ) -> list[Completion]:
        """Decodes the batch, at full depth too when its turn has come, and records what it cost."""
        started_at = time.time()
        counts = may_measure and not is_scored_alone(chosen[0])
        is_paired = counts and self._turns.is_next(self.config.baseline_fraction) and schedule != self.full
        full: BatchResult | None = None
        full_error = None
        if is_paired and self._turns.is_full_first:
            full, full_error = self._baseline(batch, chosen)
        result = self._run(batch, chosen, schedule)
        shape = self.cutting.shared_shape(batch, chosen, schedule)
        if is_paired and not self._turns.is_full_first:
            full, full_error = self._baseline(batch, chosen)
        record = {"started_at": started_at, "batch": self._turns.batches} | figures(result)
        record["layers"] = self.model.config.num_hidden_layers
        # first: a batch that fails leaves no record
        completions, record["score_s"] = scored(self.model, chosen, result, not self.config.deterministic)
        if full_error is not None:
            record["full_error"] = full_error
        if full is not None:
            record |= {f"full_{key}": value for key, value in figures(full).items()} | agreement(result, full)
            assert self.ceilings is not None
            record |= predicted(
                result,
                schedule,
                self.model,
                self.ceilings,
                itemsize=self.dtype.itemsize,
                num_devices=len(self.devices),
                sharing=shape,
                in_graphs=self.graphs is not None and self.graphs.failure is None,
            )
        records.append(record)
        self._turns = self._turns.after(chosen[0].id, counts=counts, is_pair=full is not None)
        return completions

    def _baseline(self, batch: Batch, chosen: Sequence[Request]) -> tuple[BatchResult | None, str | None]:
        """The batch at full depth, or why it could not be had: no row may fail of a measurement."""
        try:
            return self._run(batch, chosen, self.full), None
        except Exception as error:
            if is_lost(error, self.devices):
                raise
            return None, f"{type(error).__name__}: {error}"[:2000]

    def _run(self, batch: Batch, chosen: Sequence[Request], schedule: Schedule) -> BatchResult:
        if is_scored_alone(chosen[0]):
            return score_alone(self.model, chosen, not self.config.deterministic)
        if isinstance(schedule, Lossless):
            length, decode = self.draft_length(schedule), self.tokenizer.decode
            sharing = sharing_in(batch, chosen)
            return generate_lossless(self.model, chosen, schedule, decode_text=decode, length=length, sharing=sharing)
        fixed: dict[str, Any] = {}
        if self.config.deterministic:
            rows = self.batch_size(batch.bucket, max(r.sampling.max_new_tokens for r in chosen))
            fixed = {"prompt_columns": batch.bucket, "batch_rows": rows, "compact": False}
        if (sharing := sharing_in(batch, chosen)) is not None:
            fixed = {"sharing": sharing}
        return generate(self.model, chosen, schedule, decode_text=self.tokenizer.decode, graphs=self.graphs, **fixed)

    def _warm_up(self) -> None:
        """First calls are slow; they belong to loading, not to the first batch."""
        self._capture()
        schedule = self.schedule(NEW_TOKENS)
        is_cuda = self.device.type == "cuda"
        most = self.batch_size(PROMPT_TOKENS, NEW_TOKENS) if is_cuda else ROWS  # as many as memory holds
        warm_up(self.model, schedule, self.graphs, max_rows=most)
