"""Training under schedules: the losses. The passes are those of `skipdecode.branches`; the loop, the optimiser and the
files are `actors.trainer`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.branches import Branches
from skipdecode.decoder import Decoder
from skipdecode.forced import IGNORE, TeacherBatch, teacher_forced_logits
from skipdecode.plan import FullDepth, Schedule


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
        self._teacher = (
            None if teacher is None else (teacher,)
        )  # in a tuple: no submodule, so nobody trains or saves it

    def forward(self, batch: TeacherBatch, *schedules: Schedule) -> Tensor:
        """[number of schedules]: nats of each, in one pass over the prompts."""
        kept = batch.targets != IGNORE
        targets = batch.targets[kept]
        branches = Branches(self.model, batch, recompute=self.recompute)
        states = {schedule: branches.states(schedule)[kept] for schedule in schedules}
        learns = bool(self.distill or self.hidden) and self.training
        is_own = self._teacher is None
        taught = None
        if learns and not (is_own and set(schedules) == {self.full}):
            taught = self._taught(batch, branches, states.get(self.full), kept)
        losses = []
        for schedule in schedules:
            logits = self.model.head(states[schedule]).float()
            loss = F.cross_entropy(logits, targets, reduction="sum")
            if taught is not None and not (is_own and schedule == self.full):
                loss = self._distilled(loss, logits, states[schedule], taught)
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def _taught(self, batch: TeacherBatch, branches: Branches, own: Tensor | None, kept: Tensor) -> "_Taught":
        """What the teacher says of the response tokens. `own`: states of the model's full depth, where it has run."""
        if self._teacher is None:
            teacher, states = self.model, branches.states(self.full)[kept] if own is None else own.detach()
        else:
            (teacher,) = self._teacher
            states = Branches(teacher, batch).states(FullDepth(teacher.config.num_hidden_layers))[kept]
        soft = teacher.head(states).float() / self.temperature
        return _Taught(states, soft.log_softmax(-1))

    def _distilled(self, loss: Tensor, logits: Tensor, states: Tensor, taught: "_Taught") -> Tensor:
        t = self.temperature
        divergence = F.kl_div((logits / t).log_softmax(-1), taught.logprobs, reduction="sum", log_target=True)
        loss = (1 - self.distill) * loss + self.distill * t**2 * divergence
        if self.hidden:
            loss = loss + self.hidden * (states - taught.states).float().square().mean(-1).sum()
        return loss


@dataclass(frozen=True)
class _Taught:
    states: Tensor
    """[response tokens, D]"""
    logprobs: Tensor
    """[response tokens, V], at the loss's temperature."""
