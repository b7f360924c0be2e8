"""The share of drafts that full depth would accept, measured on texts that it wrote, in one pass per schedule.

A draft after token k runs its layers over the keys and values that full depth has for the tokens before k. The texts
are known, so drafts after all of their tokens are made side by side, one token each.

B rows, P prompt positions, T response tokens, n positions of a pass, G heads of keys and values, S positions of full
depth, K head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skipdecode.backends.rope import RotaryTables
from skipdecode.kv.view import AttentionVariant, allowed_by, attention, causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import ALL_ROWS
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.teacher_forcing import IGNORE, ForcedView, TeacherBatch, token_ranges
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.schedule import FullDepth, Schedule


class DraftedText:
    """A batch of greedy texts of a model at full depth, with the keys and values that it has for them."""

    @torch.inference_mode()
    def __init__(self, model: Decoder, batch: TeacherBatch) -> None:
        self._model, self._batch = model, batch
        positions, device = batch.tokens.shape[1], batch.tokens.device
        offsets = torch.arange(positions, device=device)
        self._positions = (offsets - batch.num_pad[:, None]).clamp(min=-1)  # [B, P + T - 1]
        valid = (offsets >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, S]
        mask = valid & causal_mask(positions, positions, device) | diagonal(positions, positions, device)
        num_layers = model.config.num_hidden_layers
        view = KeepingView(self._positions, mask, model.rotary_tables, range(num_layers))
        ranges = LayerRanges.of_plan(FullDepth(num_layers).prefill())
        run_layers(model, model.embed(batch.tokens, self._positions), view, ranges)
        self._full = view.shared
        self._fed = batch.targets[:, 1:] != IGNORE  # [B, T - 1] y_k that is fed to make y_(k+1)

    @property
    def num_tokens(self) -> int:
        """Tokens that decode steps made."""
        return int(self._fed.sum())

    @torch.inference_mode()
    def hits(self, drafts: Schedule) -> Tensor:
        """[B, T - 1] bool: whether the token drafted after y_k is y_(k+1); False at padding."""
        batch, P = self._batch, self._batch.prompt_columns
        tokens, positions = batch.tokens[:, P:], self._positions[:, P:]  # [B, T - 1]
        ranges = token_ranges(drafts.prefill(), [drafts.step(k) for k in range(tokens.shape[1])], 0, ALL_ROWS)
        view = DraftView(
            positions, None, self._model.rotary_tables, (), full=self._full, num_pad=batch.num_pad, prompt_positions=P
        )
        h, _ = run_layers(self._model, self._model.embed(tokens, positions), view, ranges)
        hits = torch.zeros_like(self._fed)
        hits[self._fed] = self._model.argmax(h[self._fed]) == batch.targets[:, 1:][self._fed]
        return hits


@dataclass
class KeepingView(ForcedView):
    """The view of a pass at full depth whose keys and values are kept in `shared`."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        assert k is not None
        assert v is not None
        self.store(layer, k.contiguous(), v.contiguous())  # a copy, which does not hold the queries' memory
        return super().attend(layer, q, k, v, variant)

    def part(self, where: slice) -> "KeepingView":
        return self  # every layer runs every position


@dataclass
class DraftView(ForcedView):
    """The view of a pass that drafts after every response token: each sees full depth before it, and itself."""

    full: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, [B, G, S, K]."""
    num_pad: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[B] int64: positions of left padding."""
    prompt_positions: int = 0
    masks: dict[int, Tensor] = field(default_factory=dict)
    """By the number of positions that a layer runs, which most layers have in common."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        assert k is not None
        assert v is not None
        keys, values = (torch.cat(parts, dim=2) for parts in zip(self.full[layer], (k, v), strict=True))
        n, num_full = q.shape[2], self.full[layer][0].shape[2]
        if n not in self.masks:
            self.masks[n] = self._mask(n, num_full)
        mask = self.masks[n]
        if variant is not None and variant.rule is not None:
            full = torch.arange(num_full, device=mask.device) - self.num_pad[:, None]
            mask = mask & allowed_by(variant.rule, torch.cat([full, self.positions], dim=1), n)
        return attention(q, keys, values, mask, variant)

    def _mask(self, n: int, num_full: int) -> Tensor:
        """[B, 1, n, S + n] bool."""
        device = self.num_pad.device
        at, own = torch.arange(num_full, device=device), torch.arange(n, device=device)
        is_before = at < (self.prompt_positions + own)[:, None]  # [n, S]
        before = is_before & (at >= self.num_pad[:, None, None])  # [B, n, S]
        return torch.cat([before, diagonal(n, n, device).expand(len(before), -1, -1)], dim=2)[:, None]

    def part(self, where: slice) -> "DraftView":
        n = self.positions.shape[1] if where.stop is None else where.stop
        return replace(self, positions=self.positions[:, :n])

    def on(self, device: torch.device, tables: RotaryTables) -> "DraftView":
        raise AssertionError("drafts are measured on one device")
