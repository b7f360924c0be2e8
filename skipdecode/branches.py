"""Teacher-forced passes of several schedules over the same rows: the prompts once, and the responses of each.

Schedules differ in what they run of responses; of prompts they run the same, or they run under SwiftKV. Keys and values
of a prompt are made once, with their gradient, and every schedule's responses attend to them. Each has the states that
`skipdecode.forced` has for it alone, at the price of the responses; and under SwiftKV prompts stop where they do in
decoding. For training: nothing here decodes.

B rows, P prompt columns, T response tokens, D width, G heads of keys and values, K head dim.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from skipdecode.decoder import Decoder
from skipdecode.extents import Extents
from skipdecode.ffns import ALL_ROWS
from skipdecode.forced import ForcedView, TeacherBatch, column_extents
from skipdecode.kv.view import causal_mask, diagonal
from skipdecode.layer_loop import run_layers
from skipdecode.plan import LayerPlan, Schedule, kv_owners

Kept = Mapping[int, tuple[Tensor, Tensor]]
"""By layer, keys and values of prompts: [B, G, P - 1, K] each."""


class Keeper(UserDict[int, tuple[Tensor, Tensor]]):
    """For what a layer keeps: no dict, of which FSDP would give the layer a copy."""


class Branches:
    """The rows of a batch, to be continued under one schedule or many. The last token of a prompt belongs to its
    continuations, since its state gives the first new token."""

    def __init__(self, model: Decoder, batch: TeacherBatch, *, recompute: bool = False) -> None:
        """`recompute`: for the backward pass, only the inputs of layers are kept."""
        self.model, self.batch, self.recompute = model, batch, recompute
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        last = model.config.max_position_embeddings - 1
        self._positions = (columns - batch.num_pad[:, None]).clamp(min=-1, max=last)
        self._valid = (columns >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, P + T - 1]
        self._has_padding = bool(batch.num_pad.any())
        self._kept: dict[tuple[LayerPlan, tuple[int, ...], bool], Kept] = {}

    def states(self, schedule: Schedule) -> Tensor:
        """[B, T, D]: what enters the head for each response token. Without gradients it may use what a pass with them
        has made, not the other way round."""
        assert schedule.is_settled, f"{schedule} leaves blocks to rows, which nobody trains"
        model, start = self.model, self.batch.prompt_columns - 1
        tokens, positions = self.batch.tokens[:, start:], self._positions[:, start:]
        plans = [schedule.step(k) for k in range(tokens.shape[1] - 1)]
        owners = tuple(kv_owners(schedule, model.config.kv_group_size))
        seen = causal_mask(tokens.shape[1], start + tokens.shape[1], tokens.device)
        mask = self._valid & seen if self._has_padding else seen[None, None]
        kv = BranchView(positions, mask, model.rotations, owners, before=self._prompts(schedule.prefill(), owners))
        extents = column_extents(schedule.prefill(), plans, 1, ALL_ROWS)
        h, _ = run_layers(model, model.embed(tokens, positions), kv, extents, recompute=self.recompute)
        return h

    def _prompts(self, plan: LayerPlan, owners: tuple[int, ...]) -> Kept:
        with_gradient = (plan, owners, True)
        key = with_gradient if with_gradient in self._kept else (plan, owners, torch.is_grad_enabled())
        if key not in self._kept:
            self._kept[key] = self._run_prompts(plan, owners)
        return self._kept[key]

    def _run_prompts(self, plan: LayerPlan, owners: Sequence[int]) -> Kept:
        end, model = self.batch.prompt_columns - 1, self.model
        if not end:
            return {}
        tokens, positions = self.batch.tokens[:, :end], self._positions[:, :end]
        mask: Tensor | None = None
        if self._has_padding:
            device = tokens.device
            mask = self._valid[..., :end] & causal_mask(end, end, device) | diagonal(end, end, device)
        kv = PromptView(positions, mask, model.rotations, owners)
        extents = Extents.of_plan(plan, is_prompt=True)
        is_sharded = plan.kv_layers is None and isinstance(model.layers[0], FSDPModule)
        if is_sharded:
            extents = replace(extents, narrows_at=None)  # a layer's weights are gathered for whole calls alone
        h, _ = run_layers(model, model.embed(tokens, positions), kv, extents, recompute=self.recompute)
        kept = {**kv.shared, **kv.kept}
        if not is_sharded:
            return kept
        nothing = 0.0 * h.sum()  # and for a backward pass through what such a call gives: nobody else wants the last's
        return {layer: (k + nothing, v + nothing) for layer, (k, v) in kept.items()}


@dataclass
class PromptView(ForcedView):
    """Keeps keys and values of all layers."""

    kept: Keeper = field(default_factory=Keeper)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None and v is not None:
            self.kept[layer] = (k, v)
        return super().attend(layer, q, k, v)

    def part(self, where: slice) -> "PromptView":
        assert where.stop is None, "prompts run whole"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, ForcedView]:
        """Keys and values of the prompt are there, and nobody wants a state: a column that sees itself alone."""
        shared = {layer: (k[:, :, -1:], v[:, :, -1:]) for layer, (k, v) in self.shared.items()}
        return h[:, -1:], ForcedView(self.positions[:, -1:], None, self.table, self.owners, shared)


@dataclass
class BranchView(ForcedView):
    """Attends to the columns of the prompt, and to its own."""

    before: Kept = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:
            layer = self.owners[layer]
            k, v = (t[:, :, : q.shape[2]] for t in self.shared[layer])
        if layer in self.before:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(self.before[layer], (k, v), strict=True))
        return super().attend(layer, q, k, v)

    def part(self, where: slice) -> "BranchView":
        old = self.positions.shape[1]
        n = old if where.stop is None else where.stop
        if n == old:
            return self
        assert self.mask is not None
        mask = self.mask[:, :, :n, : self.mask.shape[-1] - (old - n)]
        return BranchView(self.positions[:, :n], mask, self.table, self.owners, self.shared, before=self.before)
