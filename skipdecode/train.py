"""Teacher-forced training under a schedule, exact and cheap: the prefix trick.

The columns that run a layer are always the first n_l of the sequence (budgets never grow), so layer `l` runs on
`h[:, :n_l]` with plain causal attention and leaves the rest alone. The result equals decoding with the cache. Prompts
are left-padded to a common length and responses right-padded, so rows of any lengths share the columns.

Losses and batches only; the loop, the optimiser and the files are `actors.trainer`.

B rows, P prompt columns, T response tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skipdecode.cache import causal_mask, diagonal
from skipdecode.ffn_rows import RowFFNs, row_ffns
from skipdecode.ffn_skip import FFNSkip
from skipdecode.model import OPT, Block
from skipdecode.plan import FullDepth, Schedule, steps_per_layer


@dataclass(frozen=True)
class TeacherBatch:
    tokens: Tensor
    """[B, P + T - 1] int64: left-padded prompts, then all response tokens but the last."""
    targets: Tensor
    """[B, T] int64: the response tokens, `ignore_index` -100 behind the end."""
    num_pad: Tensor
    """[B] int64: columns of left padding."""
    prompt_columns: int


LayerRun = Callable[[Block, Tensor, Tensor | None], Tensor]
"""A layer, or its attention, on its columns: block, h [B, T, D], mask -> [B, T, D]."""
Feed = Callable[[Block, Tensor], Tensor]
"""Its feed-forward block, likewise."""

IGNORE = -100  # torch's cross_entropy default


def teacher_batch(
    pairs: Sequence[tuple[list[int], list[int]]], pad_token_id: int, device: torch.device | str = "cpu"
) -> TeacherBatch:
    """From (prompt tokens, response tokens with EOS); both must be non-empty."""
    P = max(len(prompt) for prompt, _ in pairs)
    T = max(len(response) for _, response in pairs)
    tokens = torch.full((len(pairs), P + T - 1), pad_token_id)
    targets = torch.full((len(pairs), T), IGNORE)
    for row, (prompt, response) in enumerate(pairs):
        line = torch.tensor(prompt + response[:-1])
        tokens[row, P - len(prompt) : P - len(prompt) + len(line)] = line
        targets[row, : len(response)] = torch.tensor(response)
    num_pad = torch.tensor([P - len(prompt) for prompt, _ in pairs])
    return TeacherBatch(tokens.to(device), targets.to(device), num_pad.to(device), P)


def teacher_forced_logits(
    model: OPT, batch: TeacherBatch, schedule: Schedule, *, recompute: bool = False, ffns: RowFFNs | None = None
) -> Tensor:
    """[B, T, V] float32: the logits that decoding under `schedule` has for each response token, in one pass.

    `recompute` keeps only the input of each layer for the backward pass (activation checkpointing). `ffns` decides on
    feed-forward blocks in the place of what `schedule` brings (FFN-SkipLLM, which is not trained).
    """
    return model.head(teacher_forced_states(model, batch, schedule, recompute=recompute, ffns=ffns)).float()


def teacher_forced_states(
    model: OPT, batch: TeacherBatch, schedule: Schedule, *, recompute: bool = False, ffns: RowFFNs | None = None
) -> Tensor:
    """[B, T, D]: what enters the head for each response token."""
    columns = batch.tokens.shape[1]
    num_steps = columns - batch.prompt_columns
    device = batch.tokens.device
    offsets = torch.arange(columns, device=device)
    positions = (offsets - batch.num_pad[:, None]).clamp(min=-1, max=model.config.max_position_embeddings - 1)
    mask: Tensor | None = None
    if bool(batch.num_pad.any()):
        valid = (offsets >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, S]
        mask = valid & causal_mask(columns, columns, device) | diagonal(columns, columns, device)
    h = model.embed(batch.tokens, positions)
    feeds: Sequence[Feed | None] = [None] * schedule.num_layers
    if isinstance(schedule, FFNSkip):
        feeds = _thinned(batch, schedule, ffns)
    swift, kv_layers = model.swift, schedule.prefill().kv_layers
    shared: list[tuple[Tensor, Tensor]] = []  # K and V of each group of layers under SwiftKV
    for i, (block, steps) in enumerate(zip(model.layers, steps_per_layer(schedule, num_steps), strict=True)):
        n = batch.prompt_columns + steps  # the columns that run this layer
        seen = mask if mask is None else mask[:, :, :n, :n]
        run: LayerRun = _run
        if kv_layers is not None and i >= kv_layers:
            assert swift is not None, "a schedule for SwiftKV, and a model without"
            # K/V of a token come from its state at the first of these layers that it runs, which is its state here
            shared = shared or swift.project(h)
            keys, values = (t[:, :, :n] for t in shared[swift.group(i)])
            attend = partial(_attend_to, query=swift.query(i), keys=keys, values=values)
            run = partial(_attend_and_feed, attend=attend, feed=feeds[i] or Block.feed)
        elif (feed := feeds[i]) is not None:
            run = partial(_attend_and_feed, attend=_attend, feed=feed)
        x = checkpoint(run, block, h[:, :n], seen, use_reentrant=False) if recompute else run(block, h[:, :n], seen)
        h = x if n == columns else torch.cat([x, h[:, n:]], dim=1)
    return h[:, batch.prompt_columns - 1 :]


def _run(block: Block, h: Tensor, mask: Tensor | None) -> Tensor:
    x: Tensor = block(h, keep, mask)
    return x


def _attend(block: Block, h: Tensor, mask: Tensor | None) -> Tensor:
    return block.attend(h, keep, mask)


def _attend_to(block: Block, h: Tensor, mask: Tensor | None, query: nn.Module, keys: Tensor, values: Tensor) -> Tensor:
    return block.attend_to(h, query, keys, values, mask)


def _attend_and_feed(block: Block, h: Tensor, mask: Tensor | None, attend: LayerRun, feed: Feed) -> Tensor:
    return feed(block, attend(block, h, mask))


def keep(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for the cache where the whole sequence is there at once."""
    return k, v


def _thinned(batch: TeacherBatch, schedule: FFNSkip, ffns: RowFFNs | None) -> list[Feed]:
    """The feed-forward block of each layer when it is left out for some tokens: [L]."""
    B, columns = batch.tokens.shape
    P, first = batch.prompt_columns, batch.prompt_columns + schedule.warmup_tokens
    plans = [schedule.step(k) for k in range(columns - P)]
    by_row = plans[-1].by_row and schedule.step(schedule.warmup_tokens).by_row if plans else ()
    if by_row:
        ids, device = [str(row) for row in range(B)], batch.tokens.device
        ffns = ffns or row_ffns(schedule, ids, columns - P, device, gather=False)
        assert ffns is not None, schedule
        ffns.start(schedule.warmup_tokens, columns, first)

    def feed(block: Block, h: Tensor, layer: int, fed: int) -> Tensor:
        if ffns is not None and by_row and by_row[layer]:
            return ffns.feed(layer, block, h)
        return torch.cat([block.feed(h[:, :fed]), h[:, fed:]], dim=1)  # those that run it are the first ones, here too

    return [
        partial(feed, layer=layer, fed=P + sum(plan.ffn[layer] for plan in plans))
        for layer in range(schedule.num_layers)
    ]


def response_loss(model: OPT, batch: TeacherBatch, schedule: Schedule) -> Tensor:
    """Mean cross-entropy per response token, in nats."""
    logits = teacher_forced_logits(model, batch, schedule)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)


class ResponseLoss(nn.Module):
    """The loss as a module of its own, so that DDP and FSDP can wrap it: summed over the batch's response tokens.

    A sum, because the mean belongs to the whole step: its micro-batches and workers hold different numbers of tokens.
    `distill` in 0..1 is the share of the divergence from a teacher instead of the data: KL(teacher || model) of the
    distributions at `temperature`, times its square (Hinton et al. 2015). `hidden` adds so much of the mean squared
    difference of the states before the head. The teacher runs at full depth, without a gradient; none given: the model
    itself, and without SwiftKV, so that a frozen base teaches the weights that were added to it.
    """

    def __init__(
        self,
        model: OPT,
        *,
        distill: float = 0.0,
        temperature: float = 1.0,
        hidden: float = 0.0,
        teacher: OPT | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.distill, self.temperature, self.hidden = distill, temperature, hidden
        self.recompute = recompute
        self.full = FullDepth(model.config.num_hidden_layers)
        self._teacher = (
            None if teacher is None else (teacher,)
        )  # in a tuple: no submodule, so nobody trains or saves it

    def forward(self, batch: TeacherBatch, schedule: Schedule) -> Tensor:
        states = teacher_forced_states(self.model, batch, schedule, recompute=self.recompute)
        logits, targets = self.model.head(states).flatten(0, 1).float(), batch.targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        is_own = self._teacher is None and schedule == self.full
        if not (self.distill or self.hidden) or not self.training or is_own:
            return loss
        teacher = self.model if self._teacher is None else self._teacher[0]
        with torch.no_grad():
            taught = teacher_forced_states(teacher, batch, FullDepth(teacher.config.num_hidden_layers))
            soft = teacher.head(taught).flatten(0, 1).float()
        kept = targets != IGNORE
        t = self.temperature
        own, goal = (logits[kept] / t).log_softmax(-1), (soft[kept] / t).log_softmax(-1)
        loss = (1 - self.distill) * loss + self.distill * t**2 * F.kl_div(own, goal, reduction="sum", log_target=True)
        if self.hidden:
            squares = (states - taught).float().square().mean(-1).flatten()
            loss = loss + self.hidden * squares[kept].sum()
        return loss
