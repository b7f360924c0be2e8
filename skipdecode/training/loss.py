"""Losses of training under schedules.

The forward passes are `skipdecode.model.teacher_forcing` and, for several schedules at once,
`skipdecode.training.shared_prompt`; the loop, the optimiser and the files are in `actors.training.trainer`.
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
from skipdecode.schedules.schedule import FullDepth, Schedule
from skipdecode.training.shared_prompt import SharedPromptForward


def response_loss(model: Decoder, batch: TeacherBatch, schedule: Schedule) -> Tensor:
    """Mean cross-entropy per response token, in nats."""
    logits = teacher_forced_logits(model, batch, schedule)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)


class ResponseLoss(nn.Module):
    """The loss of each schedule, summed over the batch's response tokens, as a module that DDP and FSDP can wrap.

    Losses are sums because micro-batches and workers hold different numbers of tokens; the step divides by all of them.
    `distill` in 0..1 is the weight of a teacher against the data: KL(teacher || model) at `temperature`, times its
    square (Hinton et al. 2015). `hidden` weighs the mean squared difference of the states before the LM head. The
    teacher runs at full depth without gradients. Without one the model teaches itself, without SwiftKV, so that a
    frozen base teaches the weights that were added to it.
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
        # in a tuple, so that it is not a submodule, which would be trained and saved
        self._teacher = () if teacher is None else (teacher,)

    def forward(self, batch: TeacherBatch, *schedules: Schedule) -> Tensor:
        """[number of schedules] in nats."""
        is_response = batch.targets != IGNORE
        states_of = self._passes(batch, schedules)
        states = {one: found[is_response] for one, found in zip(schedules, states_of(schedules), strict=True)}
        taught = self._taught(batch, states_of, states, is_response) if self._has_teacher(schedules) else None
        call = partial(checkpoint, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else _call
        losses = []
        for schedule in schedules:
            is_teacher = not self._teacher and schedule == self.full
            losses.append(
                call(self._loss, states[schedule], batch.targets[is_response], None if is_teacher else taught)
            )
        return torch.stack(losses)

    def _passes(self, batch: TeacherBatch, schedules: Sequence[Schedule]) -> "Passes":
        """The function that computes the states [B, T, D] of schedules. Prompts are only separated from responses where
        that saves work, because it takes memory."""
        if len(schedules) > 1 or schedules[0].prefill().swiftkv_from is not None:
            return SharedPromptForward(self.model, batch, recompute=self.recompute).states
        return lambda asked: [teacher_forced_states(self.model, batch, one, recompute=self.recompute) for one in asked]

    def _has_teacher(self, schedules: Sequence[Schedule]) -> bool:
        """Whether a teacher has anything to teach under these schedules."""
        is_taught = bool(self._teacher) or set(schedules) != {self.full}
        return self.training and bool(self.distill or self.hidden) and is_taught

    @torch.no_grad()
    def _taught(
        self,
        batch: TeacherBatch,
        states_of: "Passes",
        own: Mapping[Schedule, Tensor],
        is_response: Tensor,
    ) -> "_Taught":
        """The teacher's states and log-probabilities for the response tokens. `own`: the model's states so far."""
        if self._teacher:
            (teacher,) = self._teacher
            states = teacher_forced_states(teacher, batch, FullDepth(teacher.config.num_hidden_layers))[is_response]
        else:
            teacher = self.model
            states = own[self.full].detach() if self.full in own else states_of([self.full])[0][is_response]
        soft = teacher.head(states).float() / self.temperature
        return _Taught(states, soft.log_softmax(-1))

    def _loss(self, states: Tensor, targets: Tensor, taught: "_Taught | None") -> Tensor:
        """The loss for states [N, D] and targets [N]."""
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
