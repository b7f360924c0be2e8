"""Least-squares initialisation of SwiftKV's keys and values.

SwiftKV computes them from one state by a linear map, so the best map over some texts has a closed form: with x the
normed state that enters layer l and y what the upper layers project themselves, W = (x'x + ridge)^-1 x'y over all
tokens. The paper (arXiv 2410.03960, 3.2) starts from copies of the layers' own projections.

B rows, P prompt columns, T response tokens, N tokens of them, D width, C outputs of `SwiftKV.kv`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.kv.view import causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import IGNORE, ForcedView, TeacherBatch

RIDGE = 1e-4  # share of the mean diagonal of x'x, so that directions which no text has do not decide on weights


class SwiftKVLeastSquares:
    """Accumulates the sums over tokens that determine the weights. Sums of several workers can be added."""

    def __init__(self, model: Decoder) -> None:
        """`model` must have SwiftKV's weights; `solve` replaces those of keys and values."""
        assert model.swiftkv is not None, "a model whose layers all have their own"
        assert model.placement is None, "layers on several devices"
        self.model, self.added = model, model.swiftkv
        width, outputs = model.config.hidden_size, self.added.kv.weight.shape[0]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=model.device)

        self.count, self.x, self.y = zeros(1), zeros(width), zeros(outputs)
        self.xx, self.xy = zeros(width, width), zeros(width, outputs)

    @property
    def sums(self) -> list[Tensor]:
        """The accumulated sums in float64: tokens [1], x [D], y [C], x'x [D, D], x'y [D, C]."""
        return [self.count, self.x, self.y, self.xx, self.xy]

    @torch.no_grad()
    def add(self, batch: TeacherBatch) -> None:
        """Adds all tokens of `batch`, at full depth."""
        x, y = (t.double() for t in self._tokens(batch))
        for total, new in zip(self.sums, (torch.tensor(len(x)), x.sum(0), y.sum(0), x.T @ x, x.T @ y), strict=True):
            total += new

    @torch.no_grad()
    def solve(self) -> None:
        """Sets weight and bias of `SwiftKV.kv` to the least-squares solution."""
        assert self.count, "no tokens were added"
        xx, xy, kv = self.xx, self.xy, self.added.kv
        if kv.bias is not None:  # it fits the means, the weight the rest
            xx = xx - torch.outer(self.x, self.x) / self.count
            xy = xy - torch.outer(self.x, self.y) / self.count
        ridge = RIDGE * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        weight = torch.linalg.solve(xx + ridge, xy).T  # [C, D]
        kv.weight.copy_(weight)
        if kv.bias is not None:
            kv.bias.copy_((self.y - weight @ self.x) / self.count)

    def _tokens(self, batch: TeacherBatch) -> tuple[Tensor, Tensor]:
        """x [N, D] and y [N, C]."""
        model, columns = self.model, batch.tokens.shape[1]
        offsets = torch.arange(columns, device=batch.tokens.device)
        last = model.config.max_position_embeddings - 1
        positions = (offsets - batch.num_pad[:, None]).clamp(min=-1, max=last)
        is_prompt = offsets[: batch.prompt_columns] >= batch.num_pad[:, None]
        is_token = torch.cat([is_prompt, batch.targets[:, 1:] != IGNORE], dim=1)  # [B, P + T - 1]
        seen = causal_mask(columns, columns, offsets.device)
        mask = is_token[:, None, None] & seen | diagonal(columns, columns, offsets.device)
        view = ForcedView(positions, mask, model.rotary_tables, range(len(model.layers)))
        h, found = model.embed(batch.tokens, positions), list[Tensor]()
        for number, layer in enumerate(model.layers):
            if number == self.added.first:
                x = self.added.state(h, view, model.layers)[is_token]
            if number >= self.added.first:
                found.append(self.added.teacher_kv(h, view, model.layers, number)[is_token])
            if number + 1 < len(model.layers):
                h = layer(h, kv=view, number=number, attends=True, runs_ffn=True)
        return x, torch.cat(self._by_group(found), dim=-1)

    def _by_group(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The mean over the layers of each group, which is nearest to all of them."""
        size = self.added.group_size
        return [torch.stack(list(found[at : at + size])).mean(dim=0) for at in range(0, len(found), size)]
