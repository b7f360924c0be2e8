"""One row of work: the request, what it has made so far, and the completion. All of it on the host; no torch.

Where a row ends is decided here and nowhere else: EOS, a stop string, `max_new_tokens`, or a caller that cancels it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from skipdecode.config.sampling import Sampling
from skipdecode.detokenizer import StopStringSearch
from skipdecode.schedules.plan import Schedule

DecodeText = Callable[[Sequence[int]], str]
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Request:
    id: str
    prompt_tokens: list[int]
    """With BOS; at least one."""
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None
    """Log-probabilities of each new token and of this many likeliest ones; None: not wanted."""
    score_prompt: bool = False
    """Those of the prompt's tokens too."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one new token, from the model's own distribution (before temperature, top-k and top-p)."""

    logprob: float
    top: list[tuple[int, float]]
    """(token, log-probability), likeliest first."""


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    """With the EOS that ended the row, or the token that completed a stop string."""
    finish_reason: str
    """`stop` (EOS or a stop string) or `length`."""
    layers_run: int
    """Layers, summed over the row's decode steps."""
    ffns_run: int
    """Feed-forward blocks, likewise; fewer than `layers_run` under FFN-SkipLLM only."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token where the request asks for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens but the first, where the request asks for them."""


class Row:
    """One request on the host: what it has made, and whether it has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ffns: list[int] = []
        """Blocks in question that ran, per decode step; longer than needed once the row has ended."""
        self.layers: list[int] = []
        """Layers that each decode step's token took, where no plan says it
        (`skipdecode.speculative.speculative_batch`); `ffns` are then
        all of the blocks."""
        self.logprobs: list[TokenLogprobs] = []
        """One per token where the request asks for them; longer than needed once the row has ended."""
        self.finish_reason: str | None = None
        self._scan: StopStringSearch | None = None

    @property
    def is_running(self) -> bool:
        return self.finish_reason is None

    def take(self, new: Sequence[int], eos: Collection[int], decode: DecodeText | None) -> None:
        """Adds tokens that the device made, up to the one that ends the row."""
        sampling = self.request.sampling
        if sampling.stop and self._scan is None:
            assert decode is not None, "a request has stop strings, and there is no decoder of text"
            self._scan = StopStringSearch(sampling.stop, decode)
        for token in new[: sampling.max_new_tokens - len(self.tokens)]:
            self.tokens.append(token)
            is_eos = token in eos and not sampling.ignore_eos
            if is_eos or (self._scan is not None and self._scan.push(token)):
                self.finish_reason = "stop"
                return
        if len(self.tokens) == sampling.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self) -> None:
        """Nobody waits for it any more; without effect on a row that has ended."""
        self.finish_reason = self.finish_reason or CANCELLED


def complete(rows: Sequence[Row], schedule: Schedule) -> list[Completion]:
    """What ended rows of one schedule have made and run."""
    depth, ffns = [0], [0]  # layers and certain feed-forward blocks of the first n decode steps
    for k in range(max(len(row.tokens) for row in rows) - 1):
        plan = schedule.step(k)
        depth.append(depth[-1] + plan.num_layers_run)
        ffns.append(ffns[-1] + plan.num_static_ffns)
    completions = []
    for row in rows:
        assert row.finish_reason is not None, f"row {row.request.id!r} never ended"
        steps = max(len(row.tokens) - 1, 0)  # y_0 comes from the prompt
        layers, ran = depth[steps], ffns[steps] + sum(row.ffns[:steps])
        if row.layers:
            layers, ran = sum(row.layers), sum(row.ffns)
        logprobs = row.logprobs[: len(row.tokens)]
        completions.append(Completion(row.tokens, row.finish_reason, layers, ran, logprobs))
    return completions


def refuse_too_long(requests: Sequence[Request], limit: int) -> None:
    """ValueError for a row that does not fit a model of `limit` positions."""
    for r in requests:
        if len(r.prompt_tokens) + r.sampling.max_new_tokens - 1 > limit:  # the last new token is not fed
            raise ValueError(
                f"row {r.id!r}: {len(r.prompt_tokens)} prompt tokens and max_new_tokens={r.sampling.max_new_tokens} "
                f"do not fit the model's {limit} positions"
            )
