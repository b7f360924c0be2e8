"""Sampling of one token per row with torch's operators, on any device: the reference for every back end's own kernels.

It must not ask for a back end, because kernels are tested against it while the back end is being chosen. B rows, V
vocabulary.
"""

import torch
from torch import Tensor

NO_TOKEN = -1
"""In place of a token where a logit is NaN or +inf: no number of such a row means anything."""


def likeliest(logits: Tensor) -> Tensor:
    """[B, V] -> [B] int64: the index of the largest logit, the lower one of two equal ones; NO_TOKEN where one is NaN
    or +inf."""
    return logits.argmax(dim=-1).masked_fill(_is_wrong(logits.amax(dim=-1)), NO_TOKEN)


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """Makes logits [B, V] -inf, in place, where the bit in `allowed` [B, ceil(V / 32)] int32 is 0; the logits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (allowed.contiguous().view(torch.uint8)[..., None] >> shifts) & 1  # [B, bytes, 8]
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)


def _is_wrong(largest: Tensor) -> Tensor:
    """Whether the largest logit of a row, NaN where one is, shows that the row means nothing."""
    return ~(largest < torch.inf)


def pick_by_sort(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, cuts: bool = True
) -> Tensor:
    """One token per row from [B, V] float32 logits and [B, 1] parameters, greedy at temperature 0: [B] int64. NO_TOKEN
    where a logit is NaN or +inf.

    `cuts`: whether top_k or top_p leave anything out in any row. Without them there is nothing to sort, and a row's
    token is the same, bit for bit.
    """
    greedy = temperature == 0
    # the largest becomes 0, so that a tiny temperature cannot overflow to inf - inf
    largest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - largest) / temperature.masked_fill(greedy, 1.0)
    drawn = draw(scaled, top_k, top_p, uniform) if cuts else _drawn(scaled.exp(), uniform)
    chosen = torch.where(greedy[:, 0], logits.argmax(dim=-1), drawn)
    return chosen.masked_fill(_is_wrong(largest)[:, 0], NO_TOKEN)


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from [B, V] logits after top-k and top-p ([B, 1] each): [B] int64.

    The CDF runs over token ids, not over ranks: logits that differ by rounding only, as they do from one batch shape to
    another, may swap ranks, and would swap the tokens that a number stands for.
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()  # of a token the same whatever else is kept
    return _drawn(weights.masked_fill(_is_cut(logits, top_k, top_p), 0.0), uniform)


def mask_unlikely(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B, V] logits, -inf where top-k and top-p cut, or where a token has less than `min_p` of the likeliest one's
    probability; parameters [B, 1], temperature above 0."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    is_unlikely = scaled.exp() < min_p  # the likeliest is 1, and never cut
    return logits.masked_fill(_is_cut(scaled, top_k, top_p) | is_unlikely, -torch.inf)


def _is_cut(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[B, V] bool by token id: what top-k and then top-p leave out."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    p = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = p.cumsum(dim=-1) - p
    is_cut = (before >= top_p) & (rank > 0) & (top_p < 1)  # the token that crosses top_p stays, and the first always
    return torch.zeros_like(is_cut).scatter(1, tokens, is_cut | (rank >= top_k))


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """[B, V] weights, not all 0 -> [B] int64."""
    cdf = weights.cumsum(dim=-1)
    # what was cut is no hit, even where a parallel sum is not flat across it; rounding may leave no hit at all
    hit = (cdf > uniform * cdf[:, -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.where(hit.any(dim=-1), hit.int().argmax(dim=-1), last)
