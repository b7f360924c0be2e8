"""`Generator`: the model of one worker. It loads once, takes a window of rows at a time and answers each of them.

A plain class without Ray. It knows nothing of files, tables or clusters.
"""

import copy
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.batching.buckets import PlannedBatch, merged
from actors.batching.full_depth_sample import FullDepthSample, agreement, figures, predicted
from actors.batching.prompt_scoring import is_scored_alone, score_alone, with_scores
from actors.batching.shared_prefixes import NOMINAL_CEILINGS, PrefillCosts, prefixes_in
from actors.batching.windows import WindowCutter
from actors.ceilings import measure_ceilings
from actors.failures import Interrupted, RowFailure, cause_of, described, row_at_fault
from actors.generator_config import GeneratorConfig
from actors.loading import KERNELS_ARE_REQUIRED, load_packed_model
from actors.memory import DETERMINISTIC_ROWS, MAX_BATCH_ROWS, MemoryBudget, is_device_lost
from actors.warm_up import NEW_TOKENS, PROMPT_TOKENS, ROWS, warm_up
from skipdecode.backends.device import backend_on, choice_on
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs, graphs_serve, plans_of
from skipdecode.engine.generate import ShouldContinue, always, generate, refill, result_of
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import Request, Row
from skipdecode.engine.results import BatchResult, Completion
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import dtype_name
from skipdecode.schedules.from_config import known_acceptance, make_schedule
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule
from skipdecode.speculative.answer_index import AnswerIndex
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.speculative_batch import SpeculativeBatch

logger = logging.getLogger(__name__)

DRAFT_HORIZON = 64  # horizon of draft schedules that set none, which is also the default of training
MAX_CAPTURED_STEPS = 4096  # decode steps whose plans are captured as graphs: every depth comes up within them


def num_positions(request: Request) -> int:
    """Of the row at most, prompt and answer: how long a batch takes is up to its longest."""
    return len(request.prompt_tokens) + request.sampling.max_new_tokens


Answer = Completion | RowFailure


@dataclass
class WindowResult:
    answers: list[Answer]
    """One per row that was begun, in their order."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """One record per decoded batch: shape, tokens, layers, times, and those of the full-depth pass if there was one."""
    left: list[int] = field(default_factory=list)
    """The rows that were not begun, since the caller wanted no more."""


class Generator:
    def __init__(self, config: GeneratorConfig, model: Decoder | None = None) -> None:
        """`model`: one that is in memory and packed, in place of that of `config.source`; `config.tokenizer` then
        names the tokenizer."""
        start = time.perf_counter()
        self.config = config
        self.model, self.devices, self.dtype = (
            load_packed_model(config) if model is None else (model, [model.device], model.dtype)
        )
        self.device = self.devices[0]
        self.tokenizer = Tokenizer(config.tokenizer or config.source, self.model.config)
        self.full = FullDepth(self.model.config.num_hidden_layers)
        self.ceilings: Ceilings | None = None
        self._controllers: dict[Lossless, SpeculationController] = {}
        self._vocabulary = DraftVocabulary(self.model.config.vocab_size)
        """Shared by all controllers: the model holds a single draft head."""
        self._answers = AnswerIndex()
        """Of all batches, whatever drafts in them."""
        self._measure_ceilings()
        self.memory = MemoryBudget(self.model.config, self.model.kv_itemsize, self.devices, config.memory_share)
        self.graphs = self._make_graphs()
        self.memory = replace(self.memory, graphs=self.graphs)
        self._sample = FullDepthSample()
        self._num_recorded = 0
        self._costs: dict[LayerPlan, PrefillCosts] = {}
        self._warm_up()
        self._check_speed()
        self.load_s = time.perf_counter() - start

    def with_decode(
        self,
        decode: dict[str, Any],
        batch_size: int | None = None,
        prefill: str | None = None,
        length_buckets: Sequence[int] = (),
    ) -> "Generator":
        """A generator that shares the loaded model, under another `decode:` mapping (batch size, prefill, buckets)."""
        other = copy.copy(self)
        other.config = replace(
            self.config,
            decode=decode,
            batch_size=batch_size or self.config.batch_size,
            prefill=prefill or self.config.prefill,
            length_buckets=tuple(length_buckets) or self.config.length_buckets,
        )
        other._measure_ceilings()
        other._sample, other._num_recorded = FullDepthSample(), 0
        other._controllers = {}
        other._warm_up()
        return other

    @property
    def precision(self) -> str:
        """The numeric formats for display."""
        return self.config.precision(dtype_name(self.dtype))

    @property
    def why_slow(self) -> str | None:
        """Why decoding is slower here than it could be: torch's operators in place of kernels, prompts with padding, or
        steps that could not be captured; None if it is not."""
        if (reason := backend_on(self.device).why_slow) is not None:
            return reason
        chosen = choice_on(self.device)
        if self.device.type == "cpu" and dtype_name(self.dtype) not in ("float32", chosen.dtype):
            return f"the back end {chosen.name} has no kernels for {dtype_name(self.dtype)}"
        # float32 keeps its padding by nature, and deterministic batches have one shape
        can_be_packed = dtype_name(self.dtype) != "float32" and not self.config.deterministic
        if can_be_packed and (reason := self.model.why_padded) is not None:
            return f"prompts are fed with padding: {reason}"
        if self.graphs is None or self.graphs.failure is None:
            return None
        how_many = "some steps" if self.graphs.num_graphs else "steps"
        return f"{how_many} run kernel by kernel, since they could not be captured: {self.graphs.failure}"

    # --- a window of rows

    def __call__(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        """Answers every request; one that cannot be decoded is a `RowFailure`, never an exception.

        A share of the batches is also decoded at full depth. `may_measure=False` excludes rows that would bias the
        sample, such as stolen ones, from that share. `should_continue` is asked before more rows begin: once it says
        no, those that have begun are answered, and the others are `left`.
        """
        answers: dict[int, Answer] = {}
        result = WindowResult([])
        batches = self.cut(requests)
        if should_continue is always:  # otherwise the first pairs have the shortest prompts
            random.Random(self._sample.batches).shuffle(batches)
        else:  # what is left is to take little time
            batches.sort(key=lambda batch: max(map(num_positions, (requests[row] for row in batch.rows))), reverse=True)
        continuous: dict[tuple[Schedule, int], list[PlannedBatch]] = {}  # batches to be decoded as one continuous batch
        for batch in batches:
            first = requests[batch.rows[0]]
            schedule = self.schedule(first.sampling.max_new_tokens)
            counts_as_sample = may_measure and not is_scored_alone(first)
            is_due = counts_as_sample and self._sample.is_due(self.config.baseline_fraction)
            is_paired = is_due and schedule != self.full
            if is_paired or is_scored_alone(first) or not self.uses_continuous_batching(schedule):
                if answers and not should_continue():
                    break
                answers |= self._decode_or_split(batch, requests, schedule, result.batches, is_paired)
            else:
                continuous.setdefault((schedule, batch.max_rows), []).append(batch)
            self._sample = self._sample.after(first.id, counts_as_sample=counts_as_sample, is_pair=is_paired)
        for (schedule, _), own in continuous.items():
            if not answers or should_continue():
                answers |= self._decode_or_split(
                    merged(own), requests, schedule, result.batches, is_paired=False, should_continue=should_continue
                )
        result.left = [row for row in range(len(requests)) if row not in answers]
        assert should_continue is not always or not result.left, "rows in are not rows out"
        result.answers = [answers[row] for row in sorted(answers)]
        return result

    def uses_continuous_batching(self, schedule: Schedule) -> bool:
        """True if rows of a window join as others end; otherwise they start together in static batches.

        On a GPU, steps are captured for rows that all stand at the same one (`skipdecode.engine.cuda_graphs`).
        """
        return (
            self.device.type == "cpu"
            and self.graphs is None
            and schedule.is_static
            and not self.config.deterministic
            and len(self.devices) == 1
        )

    def decode_batches(self, requests: Sequence[Request]) -> list[tuple[PlannedBatch, BatchResult]]:
        """Decodes a window to measure it: its batches and their results. Errors are raised, and no batch is split.

        Scoring prompts counts as prefill.
        """
        found = []
        for batch in self.cut(requests):
            chosen = [requests[row] for row in batch.rows]
            result = self._run(batch, chosen, self.schedule(chosen[0].sampling.max_new_tokens))
            result.stats.prefill_s += self._scored(chosen, result)[1]
            found.append((batch, result))
        return found

    def cut(self, requests: Sequence[Request]) -> list[PlannedBatch]:
        """The batches that a window is decoded in."""
        return self.cutter.cut(requests)

    def shared_prefixes(self, requests: Sequence[Request], schedule: Schedule) -> PrefixSharing | None:
        """The prefixes that these requests share as one batch; None if sharing does not save time."""
        return self.cutter.shared_prefixes(requests, schedule)

    @property
    def cutter(self) -> WindowCutter:
        return WindowCutter(
            full=self.full,
            schedule=self.schedule,
            batch_size=self.batch_size,
            buckets=self.config.length_buckets,
            shares_prefixes=self.config.shares_prefixes and not self.config.deterministic and len(self.devices) == 1,
            copies_prefixes=not self.model.supports_shared_prefix,
            prefix_group_rows=backend_on(self.device).prefix_group_rows,
            prefill_costs=self._prefill_costs,
        )

    def schedule(self, max_new_tokens: int) -> Schedule:
        """The schedule of a row with that limit. Rows with equal schedules share batches.

        A schedule that is only used for drafting does not depend on the limit, so that all rows can share batches.
        """
        return make_schedule(
            self.config.decode,
            num_layers=self.model.config.num_hidden_layers,
            max_new_tokens=DRAFT_HORIZON if self.config.decode.get("lossless") else max_new_tokens,
            swiftkv_from=self.model.config.swiftkv_layer(self.config.prefill),
        )

    def batch_size(self, bucket: int, max_new_tokens: int, *, prefix_columns: int = 0) -> int:
        """Rows per batch for prompts of up to `bucket` tokens, beside `prefix_columns` of shared prefixes per row."""
        if self.config.batch_size:
            return self.config.batch_size
        if self.config.deterministic:  # free memory must not choose a shape
            return DETERMINISTIC_ROWS
        schedules = {self.schedule(max_new_tokens): 1.0}
        if self.config.baseline_fraction > 0:  # the same rows at full depth, which on a host may take twice the share
            schedules[self.full] = 1.0 if self.memory.is_cuda else 0.5
        return self.memory.rows(schedules, prompt_columns=bucket, num_new=max_new_tokens, prefix_columns=prefix_columns)

    def _prefill_costs(self, schedule: Schedule) -> PrefillCosts:
        plan = schedule.prefill()
        if plan not in self._costs:
            self._costs[plan] = PrefillCosts.of(
                self.model.config,
                schedule,
                self.ceilings or NOMINAL_CEILINGS[self.device.type],
                itemsize=self.dtype.itemsize,
                weight_itemsize=self.model.weight_itemsize,
                kv_itemsize=self.model.kv_itemsize,
            )
        return self._costs[plan]

    # --- a batch

    def _decode_or_split(
        self,
        batch: PlannedBatch,
        requests: Sequence[Request],
        schedule: Schedule,
        records: list[dict[str, Any]],
        is_paired: bool,
        split_error: str | None = None,
        should_continue: ShouldContinue = always,
    ) -> dict[int, Answer]:
        """Answers by row, as far as they were begun. Of a batch that fails, the rows that have not ended are decoded in
        halves, until the row at fault is alone. A row whose logits are no numbers is tried once more, alone.

        `is_paired`: at full depth too. `split_error`: why the batch that this one is a half of failed.
        """
        chosen = [requests[row] for row in batch.rows]
        started_at, answers = time.time(), dict[int, Answer]()
        try:
            completions = self._decode_and_record(batch, chosen, schedule, records, is_paired, should_continue)
            if split_error is not None:
                records[-1]["split_error"] = split_error
            return dict(zip(batch.rows, completions, strict=False))
        except Exception as error:  # whatever the cause, it must not take the neighbours along
            if is_device_lost(cause_of(error), self.devices):
                raise cause_of(error) from None  # every later batch would fail too; a new process may not
            message, wrong = described(error), row_at_fault(error)
            if isinstance(error, Interrupted):
                answers = {batch.rows[at]: made for at, made in zip(error.ended, error.result.completions, strict=True)}
                records.append(self._record(started_at, error.result) | {"split_error": message})
        # Outside `except`: the traceback holds the failed batch's cache, and its halves need that memory.
        left = [at for at, row in enumerate(batch.rows) if row not in answers]
        at_fault = [at for at in left if chosen[at].id == wrong]
        if len(left) == 1 and (not at_fault or split_error is not None):
            return answers | {batch.rows[left[0]]: RowFailure("engine_error", message)}
        half, max_rows = len(left) // 2, max(1, min(batch.max_rows, len(batch.rows)) // 2)  # perhaps memory lacks
        parts = [left[:half], left[half:]]
        if len(at_fault) == 1:
            parts, max_rows = [[at for at in left if at not in at_fault], at_fault], batch.max_rows
        for numbers in parts:
            if numbers:
                part = replace(batch.of(numbers), max_rows=max_rows)
                answers |= self._decode_or_split(part, requests, schedule, records, is_paired, message)
        return answers

    def _decode_and_record(
        self,
        batch: PlannedBatch,
        chosen: Sequence[Request],
        schedule: Schedule,
        records: list[dict[str, Any]],
        is_paired: bool,
        should_continue: ShouldContinue,
    ) -> list[Completion]:
        """Decodes the batch, at full depth too if `is_paired`, and appends a record of what it cost. The completions
        are those of its first rows, which were begun."""
        started_at = time.time()
        full: BatchResult | None = None
        full_error = None
        if is_paired and self._sample.is_full_first:
            full, full_error = self._run_at_full_depth(batch, chosen)
        result = self._run(batch, chosen, schedule, should_continue)
        chosen = chosen[: len(result.completions)]
        if is_paired and not self._sample.is_full_first:
            full, full_error = self._run_at_full_depth(batch, chosen)
        record = self._record(started_at, result)
        completions, record["score_s"] = self._scored(chosen, result)  # a batch that fails here leaves no record
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
                shared_prefixes=self.cutter.shared_prefix_shape(batch, chosen),
                in_graphs=self.graphs is not None and self.graphs.num_graphs > 0,
            )
        records.append(record)
        return completions

    def _record(self, started_at: float, result: BatchResult) -> dict[str, Any]:
        """What a batch cost, as it is recorded."""
        number, self._num_recorded = self._num_recorded, self._num_recorded + 1
        record = {"started_at": started_at, "batch": number} | figures(result)
        return record | {"layers": self.model.config.num_hidden_layers}

    def _run_at_full_depth(
        self, batch: PlannedBatch, chosen: Sequence[Request]
    ) -> tuple[BatchResult | None, str | None]:
        """The result, or the error: no row may fail because of a measurement."""
        try:
            return self._run(batch, chosen, self.full), None
        except Exception as error:
            if is_device_lost(cause_of(error), self.devices):
                raise
            return None, described(error)

    def compiled(self, request: Request) -> Request:
        """The request with the grammar of its structured outputs; ValueError if there is none. From any thread."""
        asked = request.sampling.structured_outputs
        if asked is None or request.grammar is not None:
            return request
        return replace(request, grammar=self.tokenizer.grammars.compile(asked))

    def _run(
        self,
        batch: PlannedBatch,
        chosen: Sequence[Request],
        schedule: Schedule,
        should_continue: ShouldContinue = always,
    ) -> BatchResult:
        if is_scored_alone(chosen[0]):
            return score_alone(self.model, chosen, together=not self.config.deterministic)
        chosen = [self.compiled(request) for request in chosen]
        sharing = prefixes_in(batch, [request.prompt_tokens for request in chosen])
        decode_text = self.tokenizer.decode
        if isinstance(schedule, Lossless) or self.uses_continuous_batching(schedule):
            return self._run_continuous(chosen, schedule, min(batch.max_rows, len(chosen)), sharing, should_continue)
        options: dict[str, Any] = {} if sharing is None else {"sharing": sharing}
        if self.config.deterministic:
            rows = self.batch_size(batch.bucket, max(r.sampling.max_new_tokens for r in chosen))
            options = {"prompt_columns": batch.bucket, "batch_rows": rows, "compact": False}
        return generate(self.model, chosen, schedule, decode_text=decode_text, graphs=self.graphs, **options)

    def _run_continuous(
        self,
        chosen: Sequence[Request],
        schedule: Schedule,
        max_rows: int,
        sharing: PrefixSharing | None,
        should_continue: ShouldContinue,
    ) -> BatchResult:
        """Raises `Interrupted` if it fails after rows have ended."""
        batch, rows = self.empty_batch(schedule), list[Row]()
        try:
            return refill(batch, chosen, max_rows=max_rows, sharing=sharing, rows=rows, should_continue=should_continue)
        except Exception as error:
            ended = [at for at, row in enumerate(rows) if not row.is_running and not chosen[at].score_prompt]
            if not ended:
                raise
            raise Interrupted(ended, result_of(batch, [rows[at] for at in ended])) from error

    def empty_batch(self, schedule: Schedule) -> ContinuousBatch:
        """A batch that rows of that schedule may join."""
        decode_text = self.tokenizer.decode
        if isinstance(schedule, Lossless):
            controller = self.speculation(schedule)
            return SpeculativeBatch(self.model, schedule, decode_text=decode_text, controller=controller)
        return ContinuousBatch(self.model, schedule, decode_text=decode_text)

    def _scored(self, chosen: Sequence[Request], result: BatchResult) -> tuple[list[Completion], float]:
        """The completions with the requested prompt scores, and the seconds that scoring took."""
        if is_scored_alone(chosen[0]):
            return result.completions, 0.0
        start = time.perf_counter()
        together = not self.config.deterministic
        completions = with_scores(self.model, chosen, result.completions, together=together)
        return completions, time.perf_counter() - start

    def speculation(self, schedule: Lossless) -> SpeculationController:
        """The controller of a schedule's drafts, which learns from all of its batches."""
        if schedule not in self._controllers:
            ceilings = None if self.config.deterministic else self.ceilings  # times must decide nothing there
            latency, known = LatencyModel.of(self.model, ceilings), known_acceptance(self.model.config, schedule)
            self._controllers[schedule] = SpeculationController(
                schedule, latency, known, vocabulary=self._vocabulary, answers=self._answers
            )
        return self._controllers[schedule]

    # --- loading

    def _measure_ceilings(self) -> None:
        if self.ceilings is None and (self.config.baseline_fraction > 0 or self.config.decode.get("lossless")):
            self.ceilings = measure_ceilings(str(self.device), dtype_name(self.dtype))

    def _make_graphs(self) -> CudaGraphs | None:
        """CUDA graphs of decode steps, whose pool then uses all of `memory_share`; None if steps are not captured."""
        config = self.config
        is_lossless = bool(config.decode.get("lossless"))  # allocates its caches itself
        if not config.has_graphs or is_lossless or len(self.devices) > 1 or not graphs_serve(self.model):
            return None
        rows = config.batch_size or (DETERMINISTIC_ROWS if config.deterministic else MAX_BATCH_ROWS["cuda"])
        return CudaGraphs(self.model, self.memory.gpu_cache_bytes, max_rows=rows)

    def _warm_up(self) -> None:
        """Captures graphs and makes the first, slow calls, so that they count as loading."""
        self._capture_graphs()
        # On a GPU for as many rows as fit into memory, since kernels are compiled for numbers of rows.
        max_rows = self.batch_size(PROMPT_TOKENS, NEW_TOKENS) if self.device.type == "cuda" else ROWS
        warm_up(self.model, self.schedule(NEW_TOKENS), self.graphs, max_rows=max_rows)

    def _check_speed(self) -> None:
        """Says why decoding is slow; ValueError if the configuration does not put up with it."""
        reason = self.why_slow
        if reason is None:
            return
        if self.config.require_kernels:
            raise ValueError(f"{KERNELS_ARE_REQUIRED}, and {reason}")
        logger.warning("decoding is slower than it could be: %s", reason)

    def _capture_graphs(self) -> None:
        """Captures all graphs that batches under this configuration need."""
        if self.graphs is None:
            return
        schedules = [self.schedule(min(self.model.config.max_position_embeddings, MAX_CAPTURED_STEPS))]
        schedules += [self.full] if self.config.baseline_fraction > 0 else []
        rows = [self.graphs.max_rows] if self.config.deterministic else None
        self.graphs.capture_all(plans_of(schedules, MAX_CAPTURED_STEPS), rows)
        logger.info("%s", self.graphs.describe())
