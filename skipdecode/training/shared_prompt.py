"""Teacher-forced passes under several schedules over the same rows, which run the prompts only once.

Schedules differ in the layers that responses run; prompts run all layers, or run under SwiftKV. Keys and values of the
prompts are computed once, with gradients, and the responses of every schedule attend to them. The states are those of
`skipdecode.model.teacher_forcing` for each schedule alone. With prompts of 234 tokens and responses of 25, four
schedules cost about as much as one full pass (a quarter of four passes). Under SwiftKV prompts stop where they do in
decoding.

B rows, P prompt columns, T response tokens, D width, G KV heads, K head dim.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from skipdecode.kv.view import AttentionVariant, causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import FFNExecutor, ffn_executor
from skipdecode.model.layer_loop import layer_call, run_layers
from skipdecode.model.teacher_forcing import ForcedView, TeacherBatch, token_ranges
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers

PromptKV = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values of the prompts by layer, [B, G, P - 1, K] each."""


class PromptKVDict(UserDict[int, tuple[Tensor, Tensor]]):
    """A dict that FSDP does not copy when it is passed to a layer, as it does with plain dicts."""


class SharedPromptForward:
    """Runs the responses of a batch under one or several schedules. The last prompt token counts to the responses,
    because its state predicts the first response token."""

    def __init__(self, model: Decoder, batch: TeacherBatch, *, recompute: bool = False) -> None:
        """`recompute`: only the layers' inputs and the prompts' keys and values are kept for the backward pass."""
        assert model.placement is None, "layers on several devices"
        self._is_sharded = isinstance(model.layers[0], FSDPModule)
        # every FSDP worker must make the same calls, so there has to be a prompt pass
        if batch.prompt_columns == 1 and self._is_sharded:
            batch = replace(batch, tokens=F.pad(batch.tokens, (1, 0)), num_pad=batch.num_pad + 1, prompt_columns=2)
        self.model, self.batch, self.recompute = model, batch, recompute
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        last = model.config.max_position_embeddings - 1
        self._positions = (columns - batch.num_pad[:, None]).clamp(min=-1, max=last)  # [B, P + T - 1]
        self._valid = (columns >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, P + T - 1]
        self._has_padding = bool(batch.num_pad.any())
        # by the prompts' plan and sharing map, and whether they were run with gradients
        self._prompt_kv: dict[tuple[LayerPlan, tuple[int, ...], bool], PromptKV] = {}

    def states(self, schedules: Sequence[Schedule]) -> list[Tensor]:
        """[B, T, D] for each schedule: the states from which the LM head predicts the response tokens. Prompts that
        were run with gradients are reused without them, but not the other way round."""
        B, device = len(self.batch.targets), self.batch.tokens.device
        passes = [self._begin(one, ffn_executor(one, B, device, gather=False)) for one in schedules]
        together = [one_pass for one_pass in passes if one_pass.can_run_together]
        for one_pass in passes:
            if one_pass not in together:
                self._run(one_pass)
        self._run_together(together)
        return [one_pass.h for one_pass in passes]

    def state(self, schedule: Schedule, ffns: FFNExecutor) -> Tensor:
        """[B, T, D] under one schedule whose feed-forward blocks `ffns` runs."""
        one_pass = self._begin(schedule, ffns)
        self._run(one_pass)
        return one_pass.h

    def _begin(self, schedule: Schedule, ffns: FFNExecutor) -> "ResponsePass":
        model, start = self.model, self.batch.prompt_columns - 1
        tokens, positions = self.batch.tokens[:, start:], self._positions[:, start:]
        plans = [schedule.step(k) for k in range(tokens.shape[1] - 1)]
        kv_owner = tuple(kv_owner_of_layers(schedule, model.config.kv_group_size))
        seen = causal_mask(tokens.shape[1], start + tokens.shape[1], tokens.device)
        mask = self._valid & seen if self._has_padding else seen[None, None]
        kv = ResponseView(
            positions,
            mask,
            model.rotary_tables,
            kv_owner,
            before=self._prompts(schedule.prefill(), kv_owner),
            positions_before=self._positions[:, :start],
        )
        ffns.start_pass(plans, 1)
        ranges = token_ranges(schedule.prefill(), plans, 1, ffns)
        return ResponsePass(model.embed(tokens, positions), kv, ranges, ffns)

    def _run(self, one_pass: "ResponsePass") -> None:
        given = one_pass.h, one_pass.kv, one_pass.ranges
        one_pass.h, _ = run_layers(self.model, *given, ffns=one_pass.ffns, recompute=self.recompute)

    def _run_together(self, passes: Sequence["ResponsePass"]) -> None:
        """Runs each layer once for the columns of all passes: responses are short, and products of few rows are
        slow."""
        call = layer_call(recompute=self.recompute)
        views: dict[tuple[int, ...], ConcatenatedView] = {}
        for i, layer in enumerate(self.model.layers):
            widths = [one_pass.columns(i) for one_pass in passes]
            if not any(widths):
                continue
            key, running = tuple(widths), [one_pass for one_pass, width in zip(passes, widths, strict=True) if width]
            if key not in views:
                views[key] = ConcatenatedView.of([one_pass.kv.part(slice(one_pass.columns(i))) for one_pass in running])
            h = torch.cat([one_pass.h[:, : one_pass.columns(i)] for one_pass in running], dim=1)
            made = call(layer, h, kv=views[key], number=i, attends=True, runs_ffn=True)
            for one_pass, own in zip(running, torch.split(made, list(filter(None, widths)), dim=1), strict=True):
                rest = one_pass.h[:, own.shape[1] :]
                one_pass.h = torch.cat([own, rest], dim=1) if rest.shape[1] else own

    def _prompts(self, plan: LayerPlan, kv_owner: tuple[int, ...]) -> PromptKV:
        with_gradient = (plan, kv_owner, True)
        key = with_gradient if with_gradient in self._prompt_kv else (plan, kv_owner, torch.is_grad_enabled())
        if key not in self._prompt_kv:
            self._prompt_kv[key] = self._run_prompts(plan, kv_owner)
        return self._prompt_kv[key]

    def _run_prompts(self, plan: LayerPlan, kv_owner: Sequence[int]) -> PromptKV:
        end, device = self.batch.prompt_columns - 1, self.batch.tokens.device
        if not end:
            return {}
        mask: Tensor | None = None
        if self._has_padding:
            mask = self._valid[..., :end] & causal_mask(end, end, device) | diagonal(end, end, device)
        positions = self._positions[:, :end]
        copies = self.recompute or not torch.is_grad_enabled()
        kv = PromptView(positions, mask, self.model.rotary_tables, kv_owner, copies=copies)
        h = self.model.embed(self.batch.tokens[:, :end], positions)
        if self._is_sharded and plan.swiftkv_from is None:
            return self._run_whole(h, kv, plan)
        first = LayerRanges.of_plan(
            plan, is_prompt=True
        ).last_token_from  # of this layer only keys and values are needed
        assert first is not None, "a prompt that runs nothing"
        below = replace(plan, attn=_before(first, plan.attn), ffn=_before(first, plan.ffn))
        h, _ = run_layers(self.model, h, kv, LayerRanges.of_plan(below), recompute=self.recompute)
        if plan.swiftkv_from is None:
            self.model.layers[first].store(h, kv, first)
        else:
            assert self.model.swiftkv is not None, "a plan for upper layers' K/V from one state, and a model without"
            self.model.swiftkv.write(h, kv, plan.attn, self.model.layers)
        return {**kv.shared, **kv.kept}

    def _run_whole(self, h: Tensor, kv: "PromptView", plan: LayerPlan) -> PromptKV:
        """Runs the last layer whole, too: FSDP gathers a layer's weights only for whole calls, and for the backward
        pass only if their output has a gradient, hence the sum times zero."""
        h, _ = run_layers(self.model, h, kv, LayerRanges.of_plan(plan), recompute=self.recompute)
        nothing = 0.0 * h.sum()
        return {layer: (k + nothing, v + nothing) for layer, (k, v) in kv.kept.items()}


def _before(first: int, runs: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(own and layer < first for layer, own in enumerate(runs))


@dataclass(eq=False)
class ResponsePass:
    """The responses under one schedule, on their way through the layers."""

    h: Tensor
    """[B, T, D]"""
    kv: "ResponseView"
    ranges: LayerRanges
    ffns: FFNExecutor

    @property
    def can_run_together(self) -> bool:
        """Whether it can share calls of layers: attention and feed-forward run for the same columns and for all rows,
        and every layer has keys and values of its own."""
        e = self.ranges
        return e.attn == e.ffn and e.swiftkv_from is None and not any(e.deferred_ffns)

    def columns(self, layer: int) -> int:
        """The number of columns that run a layer."""
        part = self.ranges.attn[layer]
        return 0 if part is None else int(part.stop)


@dataclass
class PromptView(ForcedView):
    """Prompts, whose keys and values are kept for all layers."""

    kept: PromptKVDict = field(default_factory=PromptKVDict)
    copies: bool = False
    """Copies them, so that the projection they are a slice of can be freed; otherwise the backward pass keeps it
    anyway."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        assert k is not None
        assert v is not None
        if self.copies:
            k, v = k.contiguous(), v.contiguous()
        self.kept[layer] = (k, v)
        return super().attend(layer, q, k, v, variant)

    def part(self, where: slice) -> "PromptView":
        assert where.stop is None, "prompts run whole"
        return self


@dataclass
class ResponseView(ForcedView):
    """Responses, which attend to the prompt's columns and to their own."""

    before: PromptKV = field(default_factory=dict)
    positions_before: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[B, P - 1] int64: the positions of the keys in `before`."""

    @property
    def key_positions(self) -> Tensor:
        return torch.cat([self.positions_before, self.positions], dim=1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        if k is None or v is None:
            layer = self.kv_owner[layer]
            k, v = (t[:, :, : q.shape[2]] for t in self.shared[layer])
        if layer in self.before:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(self.before[layer], (k, v), strict=True))
        return super().attend(layer, q, k, v, variant)

    def part(self, where: slice) -> "ResponseView":
        old = self.positions.shape[1]
        n = old if where.stop is None else where.stop
        if n == old:
            return self
        assert self.mask is not None
        mask = self.mask[:, :, :n, : self.mask.shape[-1] - (old - n)]
        return replace(self, positions=self.positions[:, :n], mask=mask, moved={})


@dataclass
class ConcatenatedView(ForcedView):
    """The columns of several passes side by side, each of which attends to its own and to the prompt's."""

    views: Sequence[ResponseView] = ()

    @classmethod
    def of(cls, views: Sequence[ResponseView]) -> "ConcatenatedView":
        return cls(torch.cat([view.positions for view in views], dim=1), None, views[0].tables, (), views=views)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        """q [B, H, n, K] for the columns of all passes."""
        assert k is not None
        assert v is not None
        widths = [view.positions.shape[1] for view in self.views]
        parts = zip(self.views, *(torch.split(t, widths, dim=2) for t in (q, k, v)), strict=True)
        return torch.cat([view.attend(layer, *own, variant) for view, *own in parts], dim=2)
