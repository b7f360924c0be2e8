"""Training under a schedule: the losses. The pass itself is `skipdecode.forced`; the loop, the optimiser and the files
are `actors.trainer`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.decoder import Decoder
from skipdecode.forced import IGNORE, TeacherBatch, teacher_forced_logits, teacher_forced_states
from skipdecode.plan import FullDepth, Schedule


def response_loss(model: Decoder, batch: TeacherBatch, schedule: Schedule) -> Tensor:
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
