"""Log-probabilities of new tokens, for the rows that ask for them; costs nothing where none does.

They are the model's own: before temperature, top-k and top-p. B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.decoder import Decoder
from skipdecode.forced import teacher_batch, teacher_forced_states
from skipdecode.plan import FullDepth
from skipdecode.request import Row, TokenLogprobs

SCORED_COLUMNS = 256  # at a time: logits of a whole long prompt would take hundreds of megabytes


class LogprobRecorder:
    """Sees every choice of a batch on the device, and hands it to the rows when the host looks."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._device = device
        self.keep(rows)

    def keep(self, rows: Sequence[Row]) -> None:
        """The rows of the batch from now on, in its order. What was seen must have been given."""
        asking = [(at, row) for at, row in enumerate(rows) if row.request.top_logprobs is not None]
        self._rows = [row for _, row in asking]
        self._at = torch.tensor([at for at, _ in asking], dtype=torch.int64, device=self._device)
        self._num_top = max([1, *(row.request.top_logprobs or 0 for row in self._rows)])
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def is_asked(self) -> bool:
        return bool(self._rows)

    def see(self, logits: Tensor, chosen: Tensor) -> None:
        """Logits [B, V] and the tokens chosen from them [B]."""
        if self._rows:
            self._seen.append(top_logprobs(logits[self._at], chosen[self._at], self._num_top))

    def give(self) -> None:
        """Hands what was seen since the last time to the rows. Waits for the device."""
        for columns in self._seen:
            for row, one in zip(self._rows, listed(*columns), strict=True):
                row.logprobs.append(TokenLogprobs(one.logprob, one.top[: row.request.top_logprobs]))
        self._seen = []


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits, [B] tokens -> log-probabilities [B] of these, and the likeliest ones: values, ids [B, num_top]."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, chosen[:, None])[:, 0], top.values, top.indices


def listed(own: Tensor, values: Tensor, tokens: Tensor) -> list[TokenLogprobs]:
    """What `top_logprobs` gives, on the host: one per row."""
    columns = zip(own.tolist(), values.tolist(), tokens.tolist(), strict=True)
    return [TokenLogprobs(logprob, list(zip(ids, likeliest, strict=True))) for logprob, likeliest, ids in columns]


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
