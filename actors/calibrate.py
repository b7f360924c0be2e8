"""What skipping feed-forward blocks costs a model on prompts of its own: measured, and the best choice proposed.

The model decodes sample prompts under the schedule beneath; teacher-forced passes over what it wrote then say how alike
the state is before and after every block, and how well each candidate explains that text (`skipdecode.train`, equal to
decoding). No Ray, no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skipdecode.ffn_rows import SimilarityRecorder, row_ffns
from skipdecode.ffn_skip import FFNSkip, SkipBand, SkipSaturated
from skipdecode.model import OPT
from skipdecode.plan import Schedule
from skipdecode.train import IGNORE, TeacherBatch, teacher_batch, teacher_forced_logits

Pair = tuple[list[int], list[int]]
"""Prompt tokens and the tokens that the model wrote."""

BORDERS = 12  # candidates of each cold border, at most
SHARE_TOLERANCE = 0.02  # a proposal may skip that much less than was asked for
BISECTIONS = 40  # of a threshold in [-1, 1]: to about 1e-12


@dataclass(frozen=True)
class Candidate:
    """A way to skip, and what it does to the sample."""

    schedule: FFNSkip
    skip_share: float
    """Feed-forward blocks of decode steps left out, of those that the schedule beneath runs."""
    loss: float
    """Nats per token of the text that the model wrote without skipping."""
    token_match: float
    """Share of its tokens that are still the likeliest, each given the true ones before it."""


class Sample:
    """The text that `model` wrote under `base`, in batches for teacher-forced passes."""

    def __init__(self, model: OPT, base: Schedule, pairs: Sequence[Pair], batch_rows: int) -> None:
        self.model, self.base = model, base
        ordered = sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
        pad = model.config.pad_token_id
        self.batches = [
            teacher_batch(ordered[start : start + batch_rows], pad, model.device)
            for start in range(0, len(ordered), batch_rows)
        ]
        self.similarity, self.step = self._record()

    @property
    def num_tokens(self) -> int:
        """Tokens that a decode step made."""
        return len(self.step)

    @torch.inference_mode()
    def _record(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[N, L] cosines of every token fed in decoding, NaN where the layer does not run; [N] its decode step."""
        everything = SkipSaturated(self.base, 0, 0, 0, 1.0)
        rows, steps = [], []
        for batch in self.batches:
            recorder = SimilarityRecorder(len(batch.tokens), self.model.device)
            teacher_forced_logits(self.model, batch, everything, ffns=recorder)
            fed = self._fed(batch)  # [B, T - 1]
            found = torch.full((*fed.shape, self.base.num_layers), torch.nan)
            for layer, values in recorder.similarity.items():
                own = values[:, batch.prompt_columns :].cpu()
                found[:, : own.shape[1], layer] = own
            rows.append(found[fed].numpy())
            steps.append(fed.nonzero()[:, 1].numpy())
        return np.concatenate(rows), np.concatenate(steps)

    def _fed(self, batch: TeacherBatch) -> torch.Tensor:
        """[B, T - 1] bool: y_k that was fed to make y_(k+1)."""
        return (batch.targets[:, 1:] != IGNORE).cpu()

    def ffns(self, start: int = 0) -> NDArray[np.int64]:
        """[L] blocks that tokens of decode steps `start` and later run under the schedule beneath."""
        counts: NDArray[np.int64] = (~np.isnan(self.similarity[self.step >= start])).sum(axis=0)
        return counts

    @torch.inference_mode()
    def measure(self, schedule: Schedule) -> tuple[float, float, float]:
        """(share skipped, loss, token match) under `schedule`."""
        loss = matched = tokens = skipped = 0.0
        plans = [schedule.step(k) for k in range(int(self.step.max(initial=-1)) + 1)]
        for batch in self.batches:
            B, T = batch.targets.shape
            ids = [str(row) for row in range(B)]
            rows = row_ffns(schedule, ids, T - 1, self.model.device, gather=False)
            logits = teacher_forced_logits(self.model, batch, schedule, ffns=rows)[:, 1:]
            targets = batch.targets[:, 1:]
            loss += F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            ).item()
            matched += (logits.argmax(-1) == targets)[targets != IGNORE].sum().item()
            fed = self._fed(batch)
            tokens += fed.sum().item()
            for k in range(T - 1):
                all_run = sum(self.base.step(k).ffn) - sum(plans[k].ffn) + sum(plans[k].by_row)
                ran = 0 if rows is None or not plans[k].by_row else rows.ran[fed[:, k], batch.prompt_columns + k].sum()
                skipped += all_run * int(fed[:, k].sum()) - int(ran)
        return skipped / max(int(self.ffns().sum()), 1), loss / max(tokens, 1), matched / max(tokens, 1)

    def candidate(self, schedule: FFNSkip) -> Candidate:
        return Candidate(schedule, *self.measure(schedule))

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


Progress = Callable[[int, int], None]
"""Candidates measured, and how many there are."""


def propose_layers(sample: Sample, share: float, warmup_tokens: int, progress: Progress) -> Candidate:
    """The fixed set of blocks that comes to `share` at the smallest loss.

    Tried: every run of neighbouring layers, and the layers that cost least when each is left out alone.
    """
    total, own = int(sample.ffns().sum()), sample.ffns(warmup_tokens)
    num_layers = sample.base.num_layers

    def enough(layers: Sequence[int]) -> tuple[int, ...] | None:
        """The first of `layers` that come closest to the share."""
        reached = [0.0, *np.cumsum([own[layer] for layer in layers]) / total]
        count = min(range(len(reached)), key=lambda n: abs(reached[n] - share))
        return tuple(sorted(layers[:count])) if reached[count] >= share - SHARE_TOLERANCE else None

    singles, candidates = [], []
    for layer in range(num_layers):
        singles.append(sample.candidate(SkipBand(sample.base, warmup_tokens, (layer,))).loss)
        progress(layer + 1, 2 * num_layers + 1)
    cheapest = sorted((layer for layer in range(num_layers) if own[layer]), key=lambda layer: singles[layer])
    tried = [enough(cheapest), *(enough(range(start, num_layers)) for start in range(num_layers))]
    for number, layers in enumerate(tried):
        if layers:
            candidates.append(sample.candidate(SkipBand(sample.base, warmup_tokens, layers)))
        progress(num_layers + number + 1, 2 * num_layers + 1)
    if not candidates:
        raise ValueError(_out_of_reach(share, own, total, warmup_tokens))
    return min(candidates, key=lambda candidate: candidate.loss)


def propose_rule(sample: Sample, share: float, warmup_tokens: int, progress: Progress) -> Candidate:
    """Cold borders and threshold of the row rule that come to `share` at the smallest loss.

    The share of a threshold follows from the recorded cosines but for what skipping does to later tokens, so each
    candidate is measured; the best of those that come to the share is taken.
    """
    num_layers = sample.base.num_layers
    stride = max(1, -(-num_layers // BORDERS))
    borders = [(a, b) for a in range(0, num_layers, stride) for b in range(0, num_layers - a, stride)]
    candidates = []
    for number, (cold_start, cold_end) in enumerate(borders):
        rule = SkipSaturated(sample.base, warmup_tokens, cold_start, cold_end, -1.0)
        threshold = threshold_for(sample, rule, share)
        if threshold is not None:
            candidate = sample.candidate(replace(rule, threshold=threshold))
            if abs(candidate.skip_share - share) <= SHARE_TOLERANCE:
                candidates.append(candidate)
        progress(number + 1, len(borders))
    if not candidates:
        raise ValueError(_out_of_reach(share, sample.ffns(warmup_tokens), int(sample.ffns().sum()), warmup_tokens))
    return min(candidates, key=lambda candidate: candidate.loss)


def threshold_for(sample: Sample, rule: SkipSaturated, share: float) -> float | None:
    """The threshold at which the recorded cosines skip `share`; None when even -1 skips less."""
    total = int(sample.ffns().sum())
    later = sample.similarity[sample.step >= rule.warmup_tokens]
    middle = later[:, rule.cold_start : rule.num_layers - rule.cold_end]
    runs = ~np.isnan(middle)

    def skipped(threshold: float) -> float:
        saturated = runs & (np.where(runs, middle, -2.0) >= threshold)
        has_flipped = np.cumsum(saturated, axis=1) - saturated > 0  # by a block before this one
        return float((has_flipped & runs).sum() / total)

    if skipped(-1.0) < share - SHARE_TOLERANCE:
        return None
    low, high = -1.0, 1.0
    for _ in range(BISECTIONS):
        mid = (low + high) / 2
        low, high = (mid, high) if skipped(mid) >= share else (low, mid)
    return round(low, 6)


def _out_of_reach(share: float, own: NDArray[np.int64], total: int, warmup_tokens: int) -> str:
    most = float(own.sum()) / max(total, 1)
    return (
        f"skip_share: {share} is out of reach: with warmup_tokens={warmup_tokens} only {most:.2f} of the blocks are in "
        "question at all; lower skip_share or warmup_tokens, or let the sample have longer texts (max_new_tokens)"
    )
