"""Training under schedules: the losses. The passes are those of `skipdecode.model.teacher_forcing`, and
`skipdecode.training.shared_prompt` for
several schedules at once; the loop, the optimiser and the files are `actors.training.trainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import IGNORE, TeacherBatch, teacher_forced_logits, teacher_forced_states
from skipdecode.schedules.plan import FullDepth, Schedule
from skipdecode.training.shared_prompt import Branches


def response_loss(model: Decoder, batch: TeacherBatch, schedule: Schedule) -> Tensor:
    """Mean cross-entropy per response token, in nats."""
    logits = teacher_forced_logits(model, batch, schedule)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)


class ResponseLoss(nn.Module):
    """The losses as a module, so that DDP and FSDP can wrap it: each summed over the batch's response tokens.

    Sums, because the mean belongs to the whole step: its micro-batches and workers hold different numbers of tokens.
    `distill` in 0..1 is the share of the divergence from a teacher instead of the data: KL(teacher || model) of the
    distributions at `temperature`, times its square (Hinton et al. 2015). `hidden` adds so much of the mean squared
    difference of the states before the head. The teacher runs at full depth, without a gradient; none given: the model
    itself, and without SwiftKV, so that a frozen base teaches the weights that were added to it.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        distill: float = 0.0,
        temperature: float = 1.0,
        hidden: float = 0.0,
        teacher: Decoder | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.distill, self.temperature, self.hidden = distill, temperature, hidden
        self.recompute = recompute
        self.full = FullDepth(model.config.num_hidden_layers)
        self._teacher = () if teacher is None else (teacher,)  # in a tuple: no submodule, so nobody trains or saves it

    def forward(self, batch: TeacherBatch, *schedules: Schedule) -> Tensor:
        """[number of schedules]: nats of each."""
        kept = batch.targets != IGNORE
        states_of = self._passes(batch, schedules)
        states = {one: found[kept] for one, found in zip(schedules, states_of(schedules), strict=True)}
        taught = self._taught(batch, states_of, states, kept) if self._learns(schedules) else None
        call = partial(checkpoint, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else _call
        losses = []
        for schedule in schedules:
            is_teacher = not self._teacher and schedule == self.full
            losses.append(call(self._loss, states[schedule], batch.targets[kept], None if is_teacher else taught))
        return torch.stack(losses)

    def _passes(self, batch: TeacherBatch, schedules: Sequence[Schedule]) -> "Passes":
        """What gives the states [B, T, D] of schedules. Prompts apart from responses only where that saves work: it
        takes memory."""
        if len(schedules) > 1 or schedules[0].prefill().kv_layers is not None:
            return Branches(self.model, batch, recompute=self.recompute).states
        return lambda asked: [teacher_forced_states(self.model, batch, one, recompute=self.recompute) for one in asked]

    def _learns(self, schedules: Sequence[Schedule]) -> bool:
        """Whether any of them has somebody to learn from."""
        has_teacher = bool(self._teacher) or set(schedules) != {self.full}
        return self.training and bool(self.distill or self.hidden) and has_teacher

    @torch.no_grad()
    def _taught(
        self,
        batch: TeacherBatch,
        states_of: "Passes",
        own: Mapping[Schedule, Tensor],
        kept: Tensor,
    ) -> "_Taught":
        """What the teacher says of the response tokens. `own`: states of the model itself, as far as it has run."""
        if self._teacher:
            (teacher,) = self._teacher
            states = teacher_forced_states(teacher, batch, FullDepth(teacher.config.num_hidden_layers))[kept]
        else:
            teacher = self.model
            states = own[self.full].detach() if self.full in own else states_of([self.full])[0][kept]
        soft = teacher.head(states).float() / self.temperature
        return _Taught(states, soft.log_softmax(-1))

    def _loss(self, states: Tensor, targets: Tensor, taught: "_Taught | None") -> Tensor:
        """Of states [N, D] and targets [N]."""
        logits = self.model.head(states).float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if taught is None:
            return loss
        t = self.temperature
        divergence = F.kl_div((logits / t).log_softmax(-1), taught.logprobs, reduction="sum", log_target=True)
        loss = (1 - self.distill) * loss + self.distill * t**2 * divergence
        if self.hidden:
            loss = loss + self.hidden * (states - taught.states).float().square().mean(-1).sum()
        return loss


Passes = Callable[[Sequence[Schedule]], list[Tensor]]


def _call(function: Callable[..., Tensor], *given: object) -> Tensor:
    return function(*given)


@dataclass(frozen=True)
class _Taught:
    states: Tensor
    """[response tokens, D]"""
    logprobs: Tensor
    """[response tokens, V], at the loss's temperature."""
