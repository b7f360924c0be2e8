"""Types of the JSON documents that evaluation writes: for one corpus, for a sweep, and for a calibration."""

from typing import NotRequired, TypeAlias, TypedDict

from pipeline.formatting import Json
from pipeline.report.document import Agreement, Speedup

Decode: TypeAlias = dict[str, Json]
"""A `decode:` mapping."""


Versions = TypedDict("Versions", {"torch": str, "sacrebleu": str, "rouge-score": str})


class Measured(Versions):
    """The day, the device and the versions that figures were measured with."""

    date: str
    device: str
    cores: int | None
    """torch threads, of a CPU."""


class Scores(TypedDict):
    """Against references, times 100."""

    bleu: float
    chrf: float
    rouge1: float
    rouge2: float
    rougeL: float


class SlotFigures(TypedDict):
    slot_share: float | None
    """Per cent of the slot values that stand in the texts."""
    slots: dict[str, float]
    num_slots: int


class LossFigures(TypedDict):
    """The loss of the references, teacher-forced."""

    loss: float | None
    """Nats per response token, EOS included."""
    perplexity: float | None


class Counts(TypedDict):
    """Prompts that are scored, and what has no counterpart."""

    prompts: int
    failed: int
    repeated_rows: int
    rows_without_prompt: int
    prompts_without_reference: int
    references_without_row: int


class PolicyKeys(TypedDict, total=False):
    """Missing if no model was loaded."""

    prefill: str
    quantization: str | None


class PolicyFigures(LossFigures, PolicyKeys, Measured):
    """The loss of the references under the model and schedule of a run; None if it was not computed."""

    model: str | None
    decode: Decode | None
    perplexity_pairs: int


class EvaluationDocument(Counts, Scores, SlotFigures, PolicyFigures):
    """The result of `jobs.evaluate RUN`."""

    generated: str
    references: str
    rows: int
    layers_per_token: float | None


class PrefillSpeedup(TypedDict):
    measured: float | None
    predicted: float | None


class SpeedFigures(TypedDict):
    rows_per_s: float | None
    prefill_ms_per_row: float | None
    decode_ms_per_row: float | None
    cache_bytes_per_row: float | None
    """Memory for keys and values, by the rows that are decoded at a time."""
    speedup_prefill: PrefillSpeedup
    layers_per_token: float | None
    ffn_skip_share: float | None
    output_tokens_per_s: float | None
    speedup: Speedup
    agreement: Agreement


class ReferenceScores(TypedDict, total=False):
    """Like `Scores`; missing without references."""

    bleu: float
    chrf: float
    rouge1: float
    rouge2: float
    rougeL: float
    rougeL_rows: list[float]
    """ROUGE-L of each prompt."""


class SettingFigures(SpeedFigures, ReferenceScores, LossFigures, SlotFigures):
    """The figures of one setting of a sweep."""

    failed: int
    rougeL_to_full: float
    """Mean ROUGE-L against the texts of the same model at full depth, not quantized."""
    equal_to_full: float
    """Share of texts that equal those."""


class SweepRow(SettingFigures):
    """One line of a sweep's table."""

    label: str
    name: str
    model: str
    adapter: NotRequired[str | None]
    quantization: str | None
    kv_cache_dtype: NotRequired[str]
    """Missing in older figures, which have `auto`."""
    decode: Decode
    prefill: str
    speed_at: dict[str, Speedup]
    """Speedup by batch size."""
    elapsed_s: float


class SweepDocument(Measured):
    """`quality.json`"""

    dtype: str
    command: str
    config: dict[str, Json]
    prompts: int
    references: int
    slot_share_of_references: float | None
    rows: list[SweepRow]


class FFNSkip(TypedDict, total=False):
    """A value for `decode.ffn_skip`."""

    warmup_tokens: int
    mode: str
    threshold: float
    cold_start: int
    cold_end: int
    layers: list[int]


class Proposal(TypedDict):
    """Blocks that can be skipped, and the effect on the sample."""

    ffn_skip: FFNSkip
    skip_share: float
    divergence: float
    """Nats per token."""
    token_match: float


class CalibrationFacts(TypedDict):
    """Fields of both kinds of calibration."""

    date: str
    device: str
    cores: int | None
    torch: str
    model: str
    decode: Decode
    """The schedule that generated the sample texts."""
    prefill: str
    prompts: int
    tokens: int
    config: dict[str, Json]
    elapsed_s: float


class CalibrationDocument(CalibrationFacts):
    """`calibration/calibration.json` of feed-forward blocks"""

    calibrated: Proposal
    row: Proposal


class DraftGain(TypedDict):
    """The expected gain of drafts at one batch size."""

    batch_size: int
    draft_tokens: int
    """Drafted per round; 0: drafts do not pay."""
    tokens_per_pass: float
    speedup: float


class DraftProposal(TypedDict):
    """A schedule to draft by, with its figures on texts that the search had not seen."""

    decode: Decode
    layers_per_token: float
    """Mean number of layers that a draft token runs."""
    acceptance: list[float]
    """One number: the share of drafts that full depth makes too."""
    gains: list[DraftGain]
    nearest: float
    """The best speedup at any of the batch sizes, with one draft at least: below 1.02 where none pays."""


class DraftsDocument(CalibrationFacts):
    """`calibration/calibration.json` of drafts"""

    drafts: Decode
    """The entry that the checkpoint carries: the best schedule to draft by, or full depth, which drafts by n-gram
    matches alone, if no schedule pays off."""
    pays: bool
    candidates: list[DraftProposal]
    """The best first."""
    ceilings: dict[str, float]
    """The measured limits of the device: `flops_per_s`, `bytes_per_s`, `call_s`."""


class SimilarityLine(TypedDict):
    """Cosine of a block's input and output at one layer and decode step; a row of `similarity.parquet`."""

    layer: int
    step: int
    tokens: int
    mean: float
    p05: float
    p50: float
    p95: float
