"""The teacher-forced pass under a schedule, which is exact and cheap.

The tokens that run a layer are always the first n_l of the sequence, since budgets never grow. So layer `l` runs on
`h[:, :n_l]` with plain causal attention and leaves the rest alone, and the result equals decoding with a cache. Prompts
are left-padded to a common length and responses right-padded, so that rows of any lengths share columns.

Training (`skipdecode.training.loss`), scoring and calibration use it. It goes through the same layer loop as decoding.

B rows, P prompt columns, T response tokens, D width, V vocabulary, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from skipdecode.backends.backend import FusedKVStore, FusedLayer
from skipdecode.backends.rope import RotaryTables, Rotations
from skipdecode.kv.view import AttentionVariant, allowed_by, attention, causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import FFNExecutor, ffn_executor
from skipdecode.model.layer_loop import run_layers
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.layer_ranges import LayerRanges, Range
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers

IGNORE = -100  # torch's cross_entropy default


@dataclass(frozen=True)
class TeacherBatch:
    tokens: Tensor
    """[B, P + T - 1] int64: left-padded prompts, then all response tokens but the last."""
    targets: Tensor
    """[B, T] int64: the response tokens, followed by `ignore_index` -100."""
    num_pad: Tensor
    """[B] int64: columns of left padding."""
    prompt_columns: int


def teacher_batch(
    pairs: Sequence[tuple[list[int], list[int]]], pad_token_id: int, device: torch.device | str = "cpu"
) -> TeacherBatch:
    """The batch of pairs (prompt tokens, response tokens with EOS), neither of which may be empty."""
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
    model: Decoder, batch: TeacherBatch, schedule: Schedule, *, recompute: bool = False, ffns: FFNExecutor | None = None
) -> Tensor:
    """[B, T, V] float32: the logits that decoding under `schedule` has for each response token, in one pass.

    `recompute` keeps only the input of each layer for the backward pass (activation checkpointing). `ffns` runs
    the feed-forward blocks; None: as `schedule` asks for.
    """
    return model.head(teacher_forced_states(model, batch, schedule, recompute=recompute, ffns=ffns)).float()


def teacher_forced_states(
    model: Decoder, batch: TeacherBatch, schedule: Schedule, *, recompute: bool = False, ffns: FFNExecutor | None = None
) -> Tensor:
    """[B, T, D]: the states before the LM head for each response token."""
    B, columns = batch.tokens.shape
    P, device = batch.prompt_columns, batch.tokens.device
    plans = [schedule.step(k) for k in range(columns - P)]
    offsets = torch.arange(columns, device=device)
    positions = (offsets - batch.num_pad[:, None]).clamp(min=-1, max=model.config.max_position_embeddings - 1)
    mask: Tensor | None = None
    if bool(batch.num_pad.any()):
        valid = (offsets >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, S]
        mask = valid & causal_mask(columns, columns, device) | diagonal(columns, columns, device)
    ffns = ffns or ffn_executor(schedule, B, device, gather=False)
    ffns.start_pass(plans, P)
    ranges = token_ranges(schedule.prefill(), plans, P, ffns)
    kv = ForcedView(positions, mask, model.rotary_tables, kv_owner_of_layers(schedule, model.config.kv_group_size))
    h, _ = run_layers(model, model.embed(batch.tokens, positions), kv, ranges, ffns=ffns, recompute=recompute)
    return h[:, P - 1 :]


def token_ranges(prompt: LayerPlan, plans: Sequence[LayerPlan], prompt_columns: int, ffns: FFNExecutor) -> LayerRanges:
    """The tokens that run each sublayer, always the first ones: the prompt (none of it is fed where `prompt_columns` is
    0), and the decode steps that run it."""

    def runs(layer: int, sublayer: str) -> Range:
        columns = prompt_columns + sum(getattr(plan, sublayer)[layer] for plan in plans)
        return slice(columns) if columns else None

    attn, ffn = (tuple(runs(layer, name) for layer in range(len(prompt.attn))) for name in ("attn", "ffn"))
    # the first plan that defers blocks will do: layers of later steps are among those of earlier ones
    deferred = next(filter(None, map(ffns.deferred, plans)), ())
    return LayerRanges(attn, ffn, deferred, prompt.swiftkv_from, axis=1)


@dataclass
class ForcedView:
    """A `KVView` of whole sequences: K and V are those of this pass, and are not stored."""

    positions: Tensor
    """[B, n] int64"""
    mask: Tensor | None
    """[B, 1, n, n] bool; None: causal, no padding."""
    tables: RotaryTables
    """The rotary ones of all layers."""
    kv_owner: Sequence[int]
    """[L] the layer whose K/V each layer attends to, if it has none of its own."""
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """SwiftKV: K and V [B, G, S, K] of all columns, by the layer that stores them."""
    moved: dict[torch.device, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """`positions` and `mask` by device: layers that alternate between devices ask for each many times."""

    has_kernels = stores_by_kernel = False

    @property
    def key_positions(self) -> Tensor:
        """[B, S] int64: the positions of the keys, the last of which are those of the pass."""
        return self.positions

    @cached_property
    def rotations(self) -> Rotations:
        return Rotations(self.tables, self.positions)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        if k is None or v is None:
            k, v = (t[:, :, : q.shape[2]] for t in self.shared[self.kv_owner[layer]])
        mask = self.mask
        if variant is not None and variant.rule is not None:
            allowed = allowed_by(variant.rule, self.key_positions, q.shape[2])
            mask = allowed if mask is None else allowed & mask
        return attention(q, k, v, mask, variant)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.shared[layer] = (k, v)

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        raise AssertionError("kernels have no gradient")

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        raise AssertionError("kernels have no gradient")

    def part(self, where: slice) -> "ForcedView":
        n = self.positions.shape[1] if where.stop is None else where.stop
        if n == self.positions.shape[1]:
            return self
        mask = None if self.mask is None else self.mask[:, :, :n, :n]
        return ForcedView(self.positions[:, :n], mask, self.tables, self.kv_owner, self.shared)

    def on(self, device: torch.device, tables: RotaryTables) -> "ForcedView":
        self.moved.setdefault(self.positions.device, (self.positions, self.mask))
        if device not in self.moved:
            mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
            self.moved[device] = self.positions.to(device, non_blocking=True), mask
        return ForcedView(*self.moved[device], tables, self.kv_owner, self.shared, self.moved)

    def last(self, h: Tensor) -> tuple[Tensor, "ForcedView"]:
        raise AssertionError("all tokens' states are wanted")
