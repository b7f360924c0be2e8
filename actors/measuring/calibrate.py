"""What skipping feed-forward blocks costs a model on prompts of its own: measured, and the best choice proposed.

The model decodes sample prompts under the schedule beneath; teacher-forced passes over what it wrote then say how alike
the state is before and after every block, and how far each candidate moves the model's predictions
(`skipdecode.training.loss`,
equal to decoding). No Ray, no files.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import FFNExecutor, SimilarityRecorder, ffn_executor
from skipdecode.model.teacher_forcing import IGNORE, TeacherBatch, teacher_batch
from skipdecode.schedules.ffn_skip import FFNSkip, SkipBand, SkipSaturated
from skipdecode.schedules.plan import Schedule
from skipdecode.training.shared_prompt import Branches

Pair = tuple[list[int], list[int]]
"""Prompt tokens and the tokens that the model wrote."""
Tell = Callable[[int], None]
"""Hears how many passes are done: one for each schedule and batch."""
Progress = Callable[[int, int], None]
"""The same, and how many there will be."""

BORDERS = 12  # candidates of each cold border, at most
SHARE_TOLERANCE = 0.02  # proposals whose share is that close to what was asked for are equals
TOP = 256  # the likeliest tokens that a prediction is remembered by; all others count as one
BISECTIONS = 40  # of a threshold in [-1, 1]: to about 1e-12


@dataclass(frozen=True)
class Candidate:
    """A way to skip, and what it does to the sample."""

    schedule: FFNSkip
    skip_share: float
    """Feed-forward blocks of decode steps left out, of those that the schedule beneath runs."""
    divergence: float
    """KL divergence of the predictions from those without skipping, in nats per token; 0 when nothing changes."""
    token_match: float
    """Share of the tokens that the model wrote that are still the likeliest, each given the ones before it."""


class Sample:
    """The text that `model` wrote under `base`, in batches for teacher-forced passes.

    Prompts skip nothing, so a batch runs them once for many candidates (`skipdecode.training.shared_prompt`).
    """

    def __init__(self, model: Decoder, base: Schedule, pairs: Sequence[Pair], batch_rows: int) -> None:
        self.model, self.base = model, base
        ordered = sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
        pad = model.config.filler_token_id
        self.batches = [
            teacher_batch(ordered[start : start + batch_rows], pad, model.device)
            for start in range(0, len(ordered), batch_rows)
        ]
        found = [self._unskipped(batch) for batch in self.batches]
        self.predictions = [one.predictions for one in found]
        self.similarity = np.concatenate([one.similarity for one in found])
        """[N, L] cosines of every token fed in decoding, NaN where the layer does not run."""
        self.step = np.concatenate([one.step for one in found])
        """[N] their decode steps."""

    @property
    def num_prompts(self) -> int:
        return sum(len(batch.tokens) for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens that a decode step made."""
        return len(self.step)

    @torch.inference_mode()
    def _unskipped(self, batch: TeacherBatch) -> "_Unskipped":
        recorder = SimilarityRecorder()
        logits = self._logits(Branches(self.model, batch), self.base, recorder)
        is_fed = fed(batch)
        tokens = logits.topk(min(TOP, logits.shape[-1] - 1), dim=-1).indices
        found = torch.full((*is_fed.shape, self.base.num_layers), torch.nan)
        for layer, values in recorder.similarity.items():
            own = values[:, 1:].cpu()  # behind the prompt's last token
            found[:, : own.shape[1], layer] = own
        is_fed = is_fed.cpu()
        return _Unskipped((coarse(logits, tokens), tokens), found[is_fed].numpy(), is_fed.nonzero()[:, 1].numpy())

    def _logits(self, branches: Branches, schedule: Schedule, ffns: FFNExecutor) -> torch.Tensor:
        """[N, V] float32, of the tokens that a decode step made."""
        states = branches.state(schedule, ffns)[:, 1:]
        return self.model.head(states[fed(branches.batch)]).float()

    def ffns(self, start: int = 0) -> NDArray[np.int64]:
        """[L] blocks that tokens of decode steps `start` and later run under the schedule beneath."""
        counts: NDArray[np.int64] = (~np.isnan(self.similarity[self.step >= start])).sum(axis=0)
        return counts

    def candidates(self, schedules: Sequence[FFNSkip], tell: Tell) -> list[Candidate]:
        measured = self.measure(schedules, tell).tolist()
        return [Candidate(one, *figures) for one, figures in zip(schedules, measured, strict=True)]

    @torch.inference_mode()
    def measure(self, schedules: Sequence[Schedule], tell: Tell = lambda done: None) -> NDArray[np.float64]:
        """[schedules, 3]: share skipped, divergence, token match."""
        sums = np.zeros((len(schedules), 3))
        for at, (batch, predictions) in enumerate(zip(self.batches, self.predictions, strict=True)):
            branches = Branches(self.model, batch)
            for number, schedule in enumerate(schedules):
                sums[number] += self._measure(branches, schedule, predictions)
                tell(at * len(schedules) + number + 1)
        return sums / (max(int(self.ffns().sum()), 1), self.num_tokens, self.num_tokens)

    def _measure(
        self, branches: Branches, schedule: Schedule, predictions: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[int, float, int]:
        """(blocks skipped, divergence, matches) of a batch, summed over its tokens."""
        batch, (wanted, tokens) = branches.batch, predictions
        ffns = ffn_executor(schedule, len(batch.targets), self.model.device, gather=False)
        logits, is_fed = self._logits(branches, schedule, ffns), fed(batch)
        divergence = float(F.kl_div(coarse(logits, tokens), wanted, reduction="sum", log_target=True))
        matched = int((logits.argmax(-1) == batch.targets[:, 1:][is_fed]).sum())
        skipped = 0
        for k, tokens_fed in enumerate(is_fed.sum(dim=0).tolist()):
            skipped += tokens_fed * (sum(self.base.step(k).ffn) - schedule.step(k).num_static_ffns)
        for own, ran in zip(is_fed.tolist(), ffns.history(), strict=False):
            skipped -= sum(itertools.compress(ran[1:], own))
        return skipped, divergence, matched

    def table(self) -> list[dict[str, Any]]:
        """Per layer and decode step: tokens, and mean and quantiles of the cosine."""
        lines = []
        for k in range(int(self.step.max(initial=-1)) + 1):
            own = self.similarity[self.step == k]
            for layer in range(self.base.num_layers):
                values = own[:, layer][~np.isnan(own[:, layer])]
                if len(values):
                    p05, p50, p95 = np.quantile(values, (0.05, 0.5, 0.95))
                    lines.append(
                        {"layer": layer, "step": k, "tokens": len(values), "mean": float(values.mean())}
                        | {"p05": float(p05), "p50": float(p50), "p95": float(p95)}
                    )
        return lines


@dataclass(frozen=True)
class _Unskipped:
    """What a batch comes to without skipping."""

    predictions: tuple[torch.Tensor, torch.Tensor]
    """`coarse` log-probabilities [N, TOP + 1], and the likeliest tokens [N, TOP]."""
    similarity: NDArray[np.float32]
    """[N, L]"""
    step: NDArray[np.int64]
    """[N]"""


def fed(batch: TeacherBatch) -> torch.Tensor:
    """[B, T - 1] bool: y_k that was fed to make y_(k+1)."""
    return batch.targets[:, 1:] != IGNORE


def coarse(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `tokens` [N, K] and, last, of all others together: [N, K + 1] from [N, V] logits."""
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, tokens)
    others = logp.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], dim=-1)


def propose_layers(sample: Sample, share: float, warmup_tokens: int, progress: Progress) -> Candidate:
    """The fixed set of blocks that comes close to `share` and moves the predictions least.

    Tried: every run of neighbouring layers, and the layers that cost least when each is left out alone. A whole number
    of layers cannot come to every share, so as many are taken as come closest.
    """
    refuse_unreachable(sample, share, warmup_tokens)
    total, own = int(sample.ffns().sum()), sample.ffns(warmup_tokens)
    running = [layer for layer in range(sample.base.num_layers) if own[layer]]

    def closest(layers: Sequence[int]) -> tuple[int, ...]:
        """The first of `layers`, as many as come closest to the share."""
        reached = np.cumsum([own[layer] for layer in layers]) / total
        return tuple(sorted(layers[: int(np.abs(reached - share).argmin()) + 1]))

    total_passes = (2 * len(running) + 1) * len(sample.batches)
    singles = [SkipBand(sample.base, warmup_tokens, (layer,)) for layer in running]
    alone = sample.candidates(singles, lambda done: progress(done, total_passes))
    by_cost = [layer for _, layer in sorted(zip([one.divergence for one in alone], running, strict=True))]
    tried = [closest(by_cost), *(closest(running[at:]) for at in range(len(running)))]
    before = len(running) * len(sample.batches)
    bands = [SkipBand(sample.base, warmup_tokens, layers) for layers in tried]
    return best(sample.candidates(bands, lambda done: progress(before + done, total_passes)), share)


def propose_rule(sample: Sample, share: float, warmup_tokens: int, progress: Progress) -> Candidate:
    """Cold borders and threshold of the row rule that come close to `share` and move the predictions least.

    The share of a threshold follows from the recorded cosines but for what skipping does to later tokens, so each
    candidate is measured.
    """
    refuse_unreachable(sample, share, warmup_tokens)
    num_layers = sample.base.num_layers
    stride = max(1, -(-num_layers // BORDERS))
    borders = [(a, b) for a in range(0, num_layers, stride) for b in range(0, num_layers - a, stride)]
    rules = {}
    for cold_start, cold_end in borders:
        rule = SkipSaturated(sample.base, warmup_tokens, cold_start, cold_end, -1.0)
        predicted, rule = threshold_for(sample, rule, share)
        rules[rule] = abs(predicted - share)
    # those that are far off by the cosines are not worth a pass, unless there are no others
    near = min(rules.values()) + SHARE_TOLERANCE
    chosen = [rule for rule, off in rules.items() if off <= near]
    passes = len(chosen) * len(sample.batches)
    return best(sample.candidates(chosen, lambda done: progress(done, passes)), share)


def best(candidates: Sequence[Candidate], share: float) -> Candidate:
    """The one that moves the predictions least, of those whose share is as close as it gets (to SHARE_TOLERANCE)."""
    off = min(abs(candidate.skip_share - share) for candidate in candidates)
    near = [c for c in candidates if abs(c.skip_share - share) <= off + SHARE_TOLERANCE]
    return min(near, key=lambda candidate: candidate.divergence)


def threshold_for(sample: Sample, rule: SkipSaturated, share: float) -> tuple[float, SkipSaturated]:
    """`rule` with the threshold at which the recorded cosines come closest to `share`, and what they come to."""
    total = int(sample.ffns().sum())
    later = sample.similarity[sample.step >= rule.warmup_tokens]
    middle = later[:, rule.cold_start : rule.num_layers - rule.cold_end]
    runs = ~np.isnan(middle)

    def skipped(threshold: float) -> float:
        saturated = runs & (np.where(runs, middle, -2.0) >= threshold)
        has_flipped = np.cumsum(saturated, axis=1) - saturated > 0  # by a block before this one
        return float((has_flipped & runs).sum() / total)

    low, high = -1.0, 1.0
    for _ in range(BISECTIONS):
        mid = (low + high) / 2
        low, high = (mid, high) if skipped(mid) >= share else (low, mid)
    chosen = min((round(low, 6), round(high, 6)), key=lambda threshold: abs(skipped(threshold) - share))
    return skipped(chosen), replace(rule, threshold=chosen)


def refuse_unreachable(sample: Sample, share: float, warmup_tokens: int) -> None:
    """ValueError when all blocks of all steps behind the warm-up are not as many."""
    most = float(sample.ffns(warmup_tokens).sum() / max(int(sample.ffns().sum()), 1))
    if share > most:
        raise ValueError(
            f"skip_share: {share} is out of reach: with warmup_tokens={warmup_tokens} only {most:.2f} of the blocks "
            "are in question at all; lower skip_share or warmup_tokens, or let the texts be longer (max_new_tokens)"
        )
