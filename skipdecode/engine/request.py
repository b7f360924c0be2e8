"""Requests and their progress on the host: tokens so far, and where a row ends. No torch.

A row ends at EOS or another token that stops it, at a stop string, in a loop (`repetition_detection`), at
`max_new_tokens`, or when it is cancelled; nothing else decides that.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from skipdecode.checkpoint.detokenizer import StopStringSearch, answer_text
from skipdecode.checkpoint.grammar import Grammar
from skipdecode.config.sampling import RepetitionDetection, Sampling
from skipdecode.engine.results import Completion, TokenLogprobs
from skipdecode.schedules.schedule import Schedule

DecodeText = Callable[[Sequence[int]], str]
CANCELLED = "cancelled"
REPETITION = "repetition"


@dataclass(frozen=True)
class Request:
    id: str
    prompt_tokens: list[int]
    """Prompt tokens including BOS; at least one."""
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None
    """If given, the log-probabilities of each new token and of this many most likely ones are wanted."""
    score_prompt: bool = False
    """Whether the log-probabilities of the prompt's tokens are wanted too."""
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    """`sampling.structured_outputs`, compiled for the model."""


class InvalidLogits(RuntimeError):
    """The logits of a row are no numbers: an overflow, or memory that has flipped. Whatever is chosen means nothing."""

    def __init__(self, row: str, num_tokens: int) -> None:
        """`row`: its id; `num_tokens`: the tokens that it had before."""
        super().__init__(f"row {row!r}: a logit of new token {num_tokens + 1} is NaN or infinite")
        self.row = row


class Row:
    """A request in a batch: the tokens it has generated, and whether it has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ffns: list[int] = []
        """Dynamic feed-forward blocks that ran in each decode step; may have surplus entries once the row has ended."""
        self.layers: list[int] = []
        """Layers run for each token after the first where no plan says so (`skipdecode.speculative.speculative_batch`),
        as far as there are any; `ffns` then counts all feed-forward blocks."""
        self.logprobs: list[TokenLogprobs] = []
        """One entry per token if requested; may have surplus entries once the row has ended."""
        self.finish_reason: str | None = None
        self._scan: StopStringSearch | None = None
        self._cut_text: str | None = None
        """What a stop string leaves of an answer that should have a structure."""
        detection = request.sampling.repetition_detection
        self._loops = None if detection is None else RepetitionSearch(detection)

    @property
    def is_running(self) -> bool:
        return self.finish_reason is None

    @property
    def is_valid(self) -> bool | None:
        """Whether the text so far, without what stops it, is all that the request's grammar asks for; None without
        one."""
        grammar, tokens = self.request.grammar, self.tokens
        if grammar is None:
            return None
        if self._cut_text is not None:
            return grammar.matches_text(self._cut_text)
        is_stopped = bool(tokens) and tokens[-1] in self.request.sampling.stop_token_ids
        return grammar.matches(tokens[:-1] if is_stopped else tokens)

    def take(self, new: Sequence[int], eos: Collection[int], decode: DecodeText | None) -> None:
        """Appends tokens made on the device, up to the one that ends the row. Raises InvalidLogits for what is no
        token (`torch_sampling.NO_TOKEN`)."""
        sampling = self.request.sampling
        if sampling.stop and self._scan is None:
            assert decode is not None, "stop strings need decode_text"
            self._scan = StopStringSearch(sampling.stop, decode)
        for token in new[: sampling.max_new_tokens - len(self.tokens)]:
            if token < 0:
                raise InvalidLogits(self.request.id, len(self.tokens))
            self.tokens.append(token)
            is_end = (token in eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
            if is_end or (self._scan is not None and self._scan.push(token)):
                self.finish_reason = "stop"
                if not is_end and decode is not None and self.request.grammar is not None:
                    self._cut_text = answer_text(self.tokens, "stop", sampling, decode)
                return
            is_loop = self._loops is not None and self._loops.push(self.tokens)
            if is_loop and sampling.min_new_tokens <= len(self.tokens) < sampling.max_new_tokens:
                self.finish_reason = REPETITION
                return
        if len(self.tokens) == sampling.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self) -> None:
        """Ends the row; has no effect on a row that has ended."""
        self.finish_reason = self.finish_reason or CANCELLED


class RepetitionSearch:
    """Whether the end of a growing text repeats itself, by what each pattern size has matched so far."""

    def __init__(self, detection: RepetitionDetection) -> None:
        self._sizes = range(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._times = detection.min_count - 1
        self._matched = [0] * len(self._sizes)
        """Last tokens that equal those one pattern size before them."""

    def push(self, tokens: Sequence[int]) -> bool:
        """Takes the newest of `tokens`, all of the text so far; True if they now end in a loop."""
        newest, count, found = tokens[-1], len(tokens), False
        for at, size in enumerate(self._sizes):
            if size >= count:
                break
            if tokens[-1 - size] == newest:
                self._matched[at] += 1
                found = found or self._matched[at] >= size * self._times
            else:
                self._matched[at] = 0
        return found


def completions_of(rows: Sequence[Row], schedule: Schedule) -> list[Completion]:
    """The completions of ended rows under one schedule."""
    depth, ffns = [0], [0]  # layers and static feed-forward blocks of the first n decode steps
    for k in range(max(len(row.tokens) for row in rows) - 1):
        plan = schedule.step(k)
        depth.append(depth[-1] + plan.num_layers_run)
        ffns.append(ffns[-1] + plan.num_static_ffns)
    completions = []
    for row in rows:
        assert row.finish_reason is not None, f"row {row.request.id!r} never ended"
        steps = max(len(row.tokens) - 1, 0)  # y_0 comes from the prompt
        counted = len(row.layers)
        layers = sum(row.layers) + depth[steps] - depth[counted]
        ran = sum(row.ffns[:steps]) + ffns[steps] - ffns[counted]
        logprobs = row.logprobs[: len(row.tokens)]
        completions.append(Completion(row.tokens, row.finish_reason, layers, ran, logprobs, is_valid=row.is_valid))
    return completions


def refuse_too_long(requests: Sequence[Request], limit: int) -> None:
    """Raises ValueError for a row that does not fit into the `limit` positions of the model."""
    for r in requests:
        if len(r.prompt_tokens) + r.sampling.max_new_tokens - 1 > limit:  # the last new token is not fed
            raise ValueError(
                f"row {r.id!r}: {len(r.prompt_tokens)} prompt tokens and max_new_tokens={r.sampling.max_new_tokens} "
                f"do not fit the model's {limit} positions"
            )
