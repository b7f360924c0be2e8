"""Log-probabilities of new tokens, for the rows that ask for them; costs nothing where none does.

They are the model's own: before temperature, top-k and top-p. B rows, V vocabulary.
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
from skipdecode.schedules.plan import FullDepth

SCORED_COLUMNS = 256  # at a time: logits of a whole long prompt would take hundreds of megabytes


Asked = tuple[list[Row], list[Tensor]]
"""The rows of a batch that ask, and of every choice seen of them what `top_logprobs` gives, one behind the other."""


class LogprobRecorder:
    """Sees every choice of a batch on the device; `give` hands it to the rows when the host looks."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._device = device
        self._seen: list[Tensor] = []
        self.keep(rows)

    def keep(self, rows: Sequence[Row]) -> None:
        """The rows of the batch from now on, in its order. What was seen must have been taken."""
        assert not self._seen, "of other rows"
        asking = [(at, row) for at, row in enumerate(rows) if row.request.top_logprobs is not None]
        self._at = to_device([at for at, _ in asking], self._device, torch.int64)
        self._rows = [row for _, row in asking]
        self.num_top = max([1, *(row.request.top_logprobs or 0 for row in self._rows)])

    @property
    def is_asked(self) -> bool:
        return bool(self._rows)

    def see(self, logits: Tensor, chosen: Tensor) -> None:
        """Logits [B, V] and the tokens chosen from them [B]."""
        if self._rows:
            self._seen += top_logprobs(logits[self._at], chosen[self._at], self.num_top)

    def take(self) -> Asked:
        """What was seen since the last time, on the device."""
        seen, self._seen = self._seen, []
        return self._rows, seen


def give(rows: Sequence[Row], seen: Sequence[Tensor]) -> None:
    """To the rows what `LogprobRecorder.take` gave, once it is on the host."""
    for at in range(0, len(seen), 3):
        for row, one in zip(rows, listed(*seen[at : at + 3]), strict=True):
            row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits, [B] tokens -> log-probabilities [B] of these, and the likeliest ones: values, ids [B, num_top].

    Of equal ones, if no more than MAX_LOGPROBS, the lowest id comes first, as greedy choice has it. As many are looked
    for whatever `num_top`: which of equal ones `topk` takes goes by how many it is asked for, and a row's neighbours
    shall not change what it gets.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
    ids, order = top.indices.sort(dim=-1)
    values, order = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    return own, values[:, :num_top], ids.gather(-1, order)[:, :num_top]


def listed(own: Tensor, values: Tensor, tokens: Tensor) -> list[TokenLogprobs]:
    """What `top_logprobs` gives, on the host: one per row."""
    columns = zip(own.tolist(), values.tolist(), tokens.tolist(), strict=True)
    return [TokenLogprobs(logprob, list(zip(ids, argmax, strict=True))) for logprob, argmax, ids in columns]


def score_prompt(model: Decoder, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What the model at full depth thinks of each of `tokens` but the first, given those before it."""
    return score_prompts(model, [tokens], num_top)[0]


@torch.inference_mode()
def score_prompts(model: Decoder, prompts: Sequence[Sequence[int]], num_top: int) -> list[list[TokenLogprobs]]:
    """The same of several, which go through the model together."""
    scored: list[list[TokenLogprobs]] = [[] for _ in prompts]
    rows = [row for row, tokens in enumerate(prompts) if len(tokens) > 1]
    if not rows:
        return scored
    pairs = [(list(prompts[row][:1]), list(prompts[row][1:])) for row in rows]
    batch = teacher_batch(pairs, model.config.filler_token_id, model.device)
    states = teacher_forced_states(model, batch, FullDepth(model.config.num_hidden_layers))  # [B, P - 1, D]
    for at, row in enumerate(rows):
        length = len(prompts[row]) - 1
        for start in range(0, length, SCORED_COLUMNS):
            part = slice(start, min(start + SCORED_COLUMNS, length))
            logits = model.head(states[at, part])
            scored[row] += listed(*top_logprobs(logits, batch.targets[at, part], max(1, num_top)))
    return [[TokenLogprobs(one.logprob, one.top[:num_top]) for one in row] for row in scored]
