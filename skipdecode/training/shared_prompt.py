"""Teacher-forced passes of several schedules over the same rows: the prompts once, and the responses of each.

Schedules differ in what they run of responses; of prompts they run the same, or they run under SwiftKV. Keys and values
of a prompt are made once, with their gradient, and every schedule's responses attend to them. Each has the states that
`skipdecode.model.teacher_forcing` has for it alone, at the price of the responses; and under SwiftKV prompts stop
where they do in
decoding. For training: nothing here decodes.

B rows, P prompt columns, T response tokens, D width, G heads of keys and values, K head dim.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from skipdecode.kv.view import causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import FFNExecutor, ffn_executor
from skipdecode.model.layer_loop import layer_call, run_layers
from skipdecode.model.teacher_forcing import ForcedView, TeacherBatch, token_ranges
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.plan import LayerPlan, Schedule, kv_sharing_map

Kept = Mapping[int, tuple[Tensor, Tensor]]
"""By layer, keys and values of prompts: [B, G, P - 1, K] each."""


class Keeper(UserDict[int, tuple[Tensor, Tensor]]):
    """For what a layer keeps: no dict, of which FSDP would give the layer a copy."""


class Branches:
    """The rows of a batch, to be continued under one schedule or many. The last token of a prompt belongs to its
    continuations, since its state gives the first new token."""

    def __init__(self, model: Decoder, batch: TeacherBatch, *, recompute: bool = False) -> None:
        """`recompute`: for the backward pass, only the inputs of layers are kept, and keys and values of prompts."""
        assert model.placement is None, "layers on several devices"
        self._is_sharded = isinstance(model.layers[0], FSDPModule)
        # every worker makes the same calls: a pass over prompts, too
        if batch.prompt_columns == 1 and self._is_sharded:
            batch = replace(batch, tokens=F.pad(batch.tokens, (1, 0)), num_pad=batch.num_pad + 1, prompt_columns=2)
        self.model, self.batch, self.recompute = model, batch, recompute
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        last = model.config.max_position_embeddings - 1
        self._positions = (columns - batch.num_pad[:, None]).clamp(min=-1, max=last)  # [B, P + T - 1]
        self._valid = (columns >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, P + T - 1]
        self._has_padding = bool(batch.num_pad.any())
        self._kept: dict[tuple[LayerPlan, tuple[int, ...], bool], Kept] = {}  # by what prompts run, and with a gradient

    def states(self, schedules: Sequence[Schedule]) -> list[Tensor]:
        """[B, T, D] of each: what enters the head for each response token. Without gradients it may use what a pass
        with them has made, not the other way round."""
        B, device = len(self.batch.targets), self.batch.tokens.device
        branches = [self._begin(one, ffn_executor(one, B, device, gather=False)) for one in schedules]
        together = [branch for branch in branches if branch.runs_whole_layers]
        for branch in branches:
            if branch not in together:
                self._run(branch)
        self._run_together(together)
        return [branch.h for branch in branches]

    def state(self, schedule: Schedule, ffns: FFNExecutor) -> Tensor:
        """[B, T, D] of one schedule, whose feed-forward blocks `ffns` runs: in the columns of the prompt's last token
        and of the response tokens that are fed."""
        branch = self._begin(schedule, ffns)
        self._run(branch)
        return branch.h

    def _begin(self, schedule: Schedule, ffns: FFNExecutor) -> "Branch":
        model, start = self.model, self.batch.prompt_columns - 1
        tokens, positions = self.batch.tokens[:, start:], self._positions[:, start:]
        plans = [schedule.step(k) for k in range(tokens.shape[1] - 1)]
        sharing_map = tuple(kv_sharing_map(schedule, model.config.kv_group_size))
        seen = causal_mask(tokens.shape[1], start + tokens.shape[1], tokens.device)
        mask = self._valid & seen if self._has_padding else seen[None, None]
        kv = BranchView(
            positions, mask, model.rotary_table, sharing_map, before=self._prompts(schedule.prefill(), sharing_map)
        )
        ffns.start_pass(plans, 1)
        ranges = token_ranges(schedule.prefill(), plans, 1, ffns)
        return Branch(model.embed(tokens, positions), kv, ranges, ffns)

    def _run(self, branch: "Branch") -> None:
        given = branch.h, branch.kv, branch.ranges
        branch.h, _ = run_layers(self.model, *given, ffns=branch.ffns, recompute=self.recompute)

    def _run_together(self, branches: Sequence["Branch"]) -> None:
        """Each layer once for the columns of all that run it: a response is short, and a product of few rows slow."""
        call = layer_call(recompute=self.recompute)
        views: dict[tuple[int, ...], JointView] = {}
        for i, layer in enumerate(self.model.layers):
            widths = [branch.columns(i) for branch in branches]
            if not any(widths):
                continue
            key, running = tuple(widths), [branch for branch, width in zip(branches, widths, strict=True) if width]
            if key not in views:
                views[key] = JointView.of([branch.kv.part(slice(branch.columns(i))) for branch in running])
            h = torch.cat([branch.h[:, : branch.columns(i)] for branch in running], dim=1)
            made = call(layer, h, kv=views[key], number=i, attends=True, feeds=True)
            for branch, own in zip(running, torch.split(made, list(filter(None, widths)), dim=1), strict=True):
                rest = branch.h[:, own.shape[1] :]
                branch.h = torch.cat([own, rest], dim=1) if rest.shape[1] else own

    def _prompts(self, plan: LayerPlan, sharing_map: tuple[int, ...]) -> Kept:
        with_gradient = (plan, sharing_map, True)
        key = with_gradient if with_gradient in self._kept else (plan, sharing_map, torch.is_grad_enabled())
        if key not in self._kept:
            self._kept[key] = self._run_prompts(plan, sharing_map)
        return self._kept[key]

    def _run_prompts(self, plan: LayerPlan, sharing_map: Sequence[int]) -> Kept:
        end, device = self.batch.prompt_columns - 1, self.batch.tokens.device
        if not end:
            return {}
        mask: Tensor | None = None
        if self._has_padding:
            mask = self._valid[..., :end] & causal_mask(end, end, device) | diagonal(end, end, device)
        positions = self._positions[:, :end]
        copies = self.recompute or not torch.is_grad_enabled()
        kv = PromptView(positions, mask, self.model.rotary_table, sharing_map, copies=copies)
        h = self.model.embed(self.batch.tokens[:, :end], positions)
        if self._is_sharded and plan.kv_layers is None:
            return self._run_whole(h, kv, plan)
        first = LayerRanges.of_plan(plan, is_prompt=True).last_token_at  # nobody wants more of it than keys and values
        assert first is not None, "a prompt that runs nothing"
        below = replace(plan, attn=_before(first, plan.attn), ffn=_before(first, plan.ffn))
        h, _ = run_layers(self.model, h, kv, LayerRanges.of_plan(below), recompute=self.recompute)
        if plan.kv_layers is None:
            self.model.layers[first].store(h, kv, first)
        else:
            assert self.model.swift is not None, "a plan for upper layers' K/V from one state, and a model without"
            self.model.swift.write(h, kv, plan.attn, self.model.layers)
        return {**kv.shared, **kv.kept}

    def _run_whole(self, h: Tensor, kv: "PromptView", plan: LayerPlan) -> Kept:
        """FSDP gathers a layer's weights for whole calls, and again for the backward pass of what a call gives: which
        of the last layer nobody would want."""
        h, _ = run_layers(self.model, h, kv, LayerRanges.of_plan(plan), recompute=self.recompute)
        nothing = 0.0 * h.sum()
        return {layer: (k + nothing, v + nothing) for layer, (k, v) in kv.kept.items()}


def _before(first: int, runs: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(own and layer < first for layer, own in enumerate(runs))


@dataclass(eq=False)
class Branch:
    """The responses under one schedule, in the layers."""

    h: Tensor
    """[B, T, D]"""
    kv: "BranchView"
    ranges: LayerRanges
    ffns: FFNExecutor

    @property
    def runs_whole_layers(self) -> bool:
        """Attention and feed-forward of the same columns, over keys and values of its own, for all rows."""
        e = self.ranges
        return e.attn == e.ffn and e.kv_layers is None and not any(e.deferred_ffns)

    def columns(self, layer: int) -> int:
        """That run it."""
        part = self.ranges.attn[layer]
        return 0 if part is None else int(part.stop)


@dataclass
class PromptView(ForcedView):
    """Keeps keys and values of all layers."""

    kept: Keeper = field(default_factory=Keeper)
    copies: bool = False
    """Of them, so that what a layer projects beside them is not kept with them; else the backward pass has it all."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        assert v is not None
        if self.copies:
            k, v = k.contiguous(), v.contiguous()
        self.kept[layer] = (k, v)
        return super().attend(layer, q, k, v)

    def part(self, where: slice) -> "PromptView":
        assert where.stop is None, "prompts run whole"
        return self


@dataclass
class BranchView(ForcedView):
    """Attends to the columns of the prompt, and to its own."""

    before: Kept = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:
            layer = self.sharing_map[layer]
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
        return BranchView(self.positions[:, :n], mask, self.table, self.sharing_map, self.shared, before=self.before)


@dataclass
class JointView(ForcedView):
    """The columns of several branches side by side, each of which attends to its own and to the prompt's."""

    views: Sequence[BranchView] = ()

    @classmethod
    def of(cls, views: Sequence[BranchView]) -> "JointView":
        return cls(torch.cat([view.positions for view in views], dim=1), None, views[0].table, (), views=views)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [B, H, n, K] of the columns of all."""
        assert k is not None
        assert v is not None
        widths = [view.positions.shape[1] for view in self.views]
        parts = zip(self.views, *(torch.split(t, widths, dim=2) for t in (q, k, v)), strict=True)
        return torch.cat([view.attend(layer, *own) for view, *own in parts], dim=2)
