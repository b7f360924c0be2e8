"""What decoding gives back: completions, and what their batch cost. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, get_args

DraftKind = Literal["layers", "row", "answers"]
"""What drafts a token: skipped layers, an n-gram match in the row's own text, or what other answers have there."""
DRAFT_KINDS: Final[tuple[DraftKind, ...]] = get_args(DraftKind)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token, from the model's own distribution (before temperature, top-k and top-p)."""

    logprob: float
    top: list[tuple[int, float]]
    """(token, log-probability) of the most likely tokens, in descending order."""


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    """The generated tokens, including the EOS or the token that completed a stop string."""
    finish_reason: str
    """`stop` (EOS, another token that stops the row, or a stop string), `length` or `repetition`."""
    layers_run: int
    """Layers, summed over the row's decode steps."""
    ffns_run: int
    """Feed-forward blocks, summed likewise; fewer than `layers_run` only under FFN-SkipLLM."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token if requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry per prompt token but the first, if requested."""
    is_valid: bool | None = None
    """Whether the text is all that its grammar asks for, which one that the limit cut off is not; None without one."""


@dataclass
class BatchStats:
    """What one batch cost. Token counts exclude padding; `row_steps` includes ended rows that were still in the
    batch."""

    rows: int = 0
    prompt_columns: int = 0
    """Tokens of the longest prompt, or the fixed number of columns."""
    prompt_padding: int = 0
    """Positions of the prompts that were run although they are padding."""
    input_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Rows in the batch, summed over decode steps."""
    layers_run: int = 0
    """The sum of the completions' `layers_run`."""
    ffns_run: int = 0
    """The sum of the completions' `ffns_run`."""
    layer_row_steps: int = 0
    """Layers run, summed over all `row_steps`, including those of ended rows."""
    prefix_tokens_saved: int = 0
    """Tokens of `input_tokens` that were not run because a shared prefix had them."""
    cache_bytes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: list[int] = field(default_factory=list)
    """Rows in the batch at each decode step."""
    deferred_ffn_rows: list[Sequence[int]] = field(default_factory=list)
    """For each decode step, the number of rows that each deferred feed-forward block ran on
    (`skipdecode.model.ffn_executor`)."""

    unrecorded: ClassVar[tuple[str, ...]] = ("batch_rows", "deferred_ffn_rows")
    """Fields for the cost model that are not recorded."""


@dataclass
class LosslessStats(BatchStats):
    """What a batch decoded losslessly cost. `decode_steps` are rounds, `row_steps` rows in them."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    model_decode_s: float = 0.0
    """`decode_s` as the roofline predicts it for these passes."""
    drafted_at: list[int] = field(default_factory=list)
    """Drafted tokens by their position in a draft."""
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by their position in a draft: full depth generated the same tokens up to that position."""
    drafted_by: list[int] = field(default_factory=lambda: [0] * len(DRAFT_KINDS))
    """Drafted tokens of each of DRAFT_KINDS."""
    accepted_by: list[int] = field(default_factory=lambda: [0] * len(DRAFT_KINDS))
    drafted_rounds: int = 0
    timing_plain_rounds: int = 0
    """Plain steps that were timed for the comparison with drafts."""
    slower_rounds: int = 0
    """Plain steps because drafts were found to be slower, or not yet found to be faster."""
    no_gain_rounds: int = 0
    """Plain steps because no drafts were expected to pay at the present acceptance."""

    unrecorded: ClassVar[tuple[str, ...]] = (*BatchStats.unrecorded, "model_decode_s")

    def count_round(self, outcome: str) -> None:
        """`outcome` as in `skipdecode.speculative.controller`."""
        name = f"{outcome}_rounds"
        setattr(self, name, getattr(self, name) + 1)

    def count_drafts(self, kinds: Sequence[DraftKind], accepted: int) -> None:
        """The tokens that a row drafted in a round, by what drafted them, and how many were accepted."""
        drafted = len(kinds)
        for position, kind in enumerate(kinds):
            self.drafted_by[DRAFT_KINDS.index(kind)] += 1
            self.accepted_by[DRAFT_KINDS.index(kind)] += position < accepted
        more = drafted - len(self.drafted_at)
        self.drafted_at += [0] * more
        self.accepted_at += [0] * more
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted


@dataclass(frozen=True)
class BatchResult:
    completions: list[Completion]
    stats: BatchStats

    @classmethod
    def of(cls, completions: list[Completion], stats: BatchStats) -> "BatchResult":
        """The result, with the completions' totals filled in in `stats`."""
        if isinstance(stats, LosslessStats):  # as full depth has them, if all begin together
            lengths = [len(c.tokens) for c in completions]
            stats.batch_rows = [sum(n > k + 1 for n in lengths) for k in range(max(lengths, default=1) - 1)]
        stats.output_tokens = sum(len(c.tokens) for c in completions)
        stats.layers_run = sum(c.layers_run for c in completions)
        stats.ffns_run = sum(c.ffns_run for c in completions)
        return cls(completions, stats)
