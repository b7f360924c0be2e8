"""What evaluation writes down: the document of one corpus, of a sweep with its rows, of a calibration.

Types alone. A `quality.json` of an earlier version may lack what readers take with `get`.
"""

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
    """Of the references, teacher-forced."""

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
    """Not there where no policy was loaded."""

    prefill: str
    quantization: str | None


class PolicyFigures(LossFigures, PolicyKeys, Measured):
    """The references under the policy of a run; None where it was left out."""

    model: str | None
    decode: Decode | None
    perplexity_pairs: int


class EvaluationDocument(Counts, Scores, SlotFigures, PolicyFigures):
    """Of `jobs.evaluate RUN`."""

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
    speedup_prefill: PrefillSpeedup
    layers_per_token: float | None
    ffn_skip_share: float | None
    output_tokens_per_s: float | None
    speedup: Speedup
    agreement: Agreement


class ReferenceScores(TypedDict, total=False):
    """As `Scores`; not there without references."""

    bleu: float
    chrf: float
    rouge1: float
    rouge2: float
    rougeL: float
    rougeL_rows: list[float]
    """Of each prompt."""


class SettingFigures(SpeedFigures, ReferenceScores, LossFigures, SlotFigures):
    """What one setting of a sweep came to."""

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
    decode: Decode
    prefill: str
    speed_at: dict[str, Speedup]
    """By batch size."""
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
    """As `decode.ffn_skip` takes it."""

    warmup_tokens: int
    mode: str
    threshold: float
    cold_start: int
    cold_end: int
    layers: list[int]


class Proposal(TypedDict):
    """What could be skipped, and what that did to the sample."""

    ffn_skip: FFNSkip
    skip_share: float
    divergence: float
    """Nats per token."""
    token_match: float


class CalibrationFacts(TypedDict):
    """What both kinds of a calibration write down."""

    date: str
    device: str
    cores: int | None
    torch: str
    model: str
    decode: Decode
    """The schedule beneath, which wrote the texts."""
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
    """What drafts are expected to gain in batches of one size."""

    batch_size: int
    draft_tokens: int
    """Drafted per round; 0: drafts do not pay."""
    tokens_per_pass: float
    speedup: float


class DraftProposal(TypedDict):
    """A schedule to draft by, and what it came to on texts that the search had not seen."""

    decode: Decode
    layers_per_token: float
    """Layers that a draft runs, in the mean."""
    acceptance: list[float]
    """One number: the share of drafts that full depth makes too."""
    gains: list[DraftGain]
    nearest: float
    """The best speedup at any of the batch sizes, with one draft at least: below 1.02 where none pays."""


class DraftsDocument(CalibrationFacts):
    """`calibration/calibration.json` of drafts"""

    drafts: Decode
    """What the checkpoint carries: the best schedule to draft by, or full depth, which drafts by n-gram matches alone,
    if no other pays."""
    pays: bool
    candidates: list[DraftProposal]
    """The best first."""
    ceilings: dict[str, float]
    """What the device can do, by which passes are priced: `flops_per_s`, `bytes_per_s`, `call_s`."""


class SimilarityLine(TypedDict):
    """How far a block moves the state (cosine) at one layer and decode step; a row of `similarity.parquet`."""

    layer: int
    step: int
    tokens: int
    mean: float
    p05: float
    p50: float
    p95: float
