"""Log-probabilities of generated tokens and of prompts, for the rows that want them.

They are the model's own, before temperature, top-k and top-p. B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.model import MAX_LOGPROBS
from skipdecode.engine.request import Row
from skipdecode.engine.results import TokenLogprobs
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_states
from skipdecode.schedules.schedule import FullDepth

SCORED_TOKENS = 256  # at a time, since the logits of a whole long prompt would take hundreds of megabytes


Asked = tuple[list[Row], list[Tensor]]
"""The rows of a batch that want log-probabilities, and for each token recorded the three tensors of `top_logprobs`."""


class LogprobRecorder:
    """Records log-probabilities of a batch on the device; `assign` hands them to the rows once they are on the host."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._device = device
        self._seen: list[Tensor] = []
        self.keep(rows)

    def keep(self, rows: Sequence[Row]) -> None:
        """Sets the rows of the batch, in its order. Everything recorded before must have been taken."""
        assert not self._seen, "log-probabilities of other rows have not been taken"
        asking = [(at, row) for at, row in enumerate(rows) if row.request.top_logprobs is not None]
        self._at = to_device([at for at, _ in asking], self._device, torch.int64)
        self._rows = [row for _, row in asking]
        self.num_top = max([1, *(row.request.top_logprobs or 0 for row in self._rows)])

    @property
    def is_asked(self) -> bool:
        return bool(self._rows)

    def record(self, logits: Tensor, chosen: Tensor) -> None:
        """Records one step: logits [B, V] and the tokens [B] chosen from them."""
        if self._rows:
            own = chosen[self._at].clamp(min=0)  # where it is no token, the row ends once the host reads that
            self._seen += top_logprobs(logits[self._at], own, self.num_top)

    def take(self) -> Asked:
        """What was recorded since the last call, on the device."""
        seen, self._seen = self._seen, []
        return self._rows, seen


def assign(rows: Sequence[Row], seen: Sequence[Tensor]) -> None:
    """Appends to the rows what `LogprobRecorder.take` returned, once it is on the host."""
    for at in range(0, len(seen), 3):
        for row, one in zip(rows, listed(*seen[at : at + 3]), strict=True):
            row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, V] and tokens [B] -> their log-probabilities [B], and the most likely ones: values and ids [B,
    num_top].

    Ties, up to MAX_LOGPROBS of them, are in ascending order of id, as in greedy choice. MAX_LOGPROBS are always
    searched for: which of equal values `topk` returns depends on how many it is asked for, and other rows of the batch
    must not change a row's result.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
    ids, order = top.indices.sort(dim=-1)
    values, order = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    return own, values[:, :num_top], ids.gather(-1, order)[:, :num_top]


def listed(own: Tensor, values: Tensor, tokens: Tensor) -> list[TokenLogprobs]:
    """The result of `top_logprobs` on the host, one per row."""
    columns = zip(own.tolist(), values.tolist(), tokens.tolist(), strict=True)
    return [TokenLogprobs(logprob, list(zip(ids, values, strict=True))) for logprob, values, ids in columns]


def score_prompt(model: Decoder, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities at full depth of each of `tokens` but the first, given the tokens before it."""
    return score_prompts(model, [tokens], num_top)[0]


@torch.inference_mode()
def score_prompts(model: Decoder, prompts: Sequence[Sequence[int]], num_top: int) -> list[list[TokenLogprobs]]:
    """`score_prompt` of several prompts, which go through the model together."""
    scored: list[list[TokenLogprobs]] = [[] for _ in prompts]
    rows = [row for row, tokens in enumerate(prompts) if len(tokens) > 1]
    if not rows:
        return scored
    pairs = [(list(prompts[row][:1]), list(prompts[row][1:])) for row in rows]
    batch = teacher_batch(pairs, model.config.filler_token_id, model.device)
    states = teacher_forced_states(model, batch, FullDepth(model.config.num_hidden_layers))  # [B, P - 1, D]
    for at, row in enumerate(rows):
        length = len(prompts[row]) - 1
        for start in range(0, length, SCORED_TOKENS):
            part = slice(start, min(start + SCORED_TOKENS, length))
            logits = model.head(states[at, part])
            scored[row] += listed(*top_logprobs(logits, batch.targets[at, part], max(1, num_top)))
    return [[TokenLogprobs(one.logprob, one.top[:num_top]) for one in row] for row in scored]
