"""The draw of tokens on a CPU: what `skipdecode.sampler.pick_by_sort` gives, without putting whole rows in order.

Sorting the 49,152 logits of a row takes longer than a small model needs to make them. The cut of top-k and top-p mostly
lies among the `HEAD` largest, and blocks of rows stay in the caches. A row's token never depends on its company.
"""

import torch
from torch import Tensor

BLOCK = 32  # rows at a time
HEAD = 512  # logits that are put in order first; all of a row only where the cut lies behind them


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """`pick` of [B, V] logits with [B, 1] parameters, but for rows at temperature 0, whose token means nothing: [B]."""
    parts = (torch.split(part, BLOCK) for part in (logits, temperature, top_k, top_p, uniform))
    return torch.cat([_draw_block(block.float(), *own) for block, *own in zip(*parts, strict=True)])


def _draw_block(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    is_greedy = temperature == 0
    # the largest becomes 0, so that a tiny temperature cannot overflow to inf - inf
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.masked_fill(is_greedy, 1.0)
    weights = logits.exp()  # in proportion to p, and the same for a token whatever else is kept
    top_k, top_p = top_k.masked_fill(is_greedy, logits.shape[-1]), top_p.masked_fill(is_greedy, 1.0)
    if ((top_k < logits.shape[-1]) | (top_p < 1)).any():
        weights = weights.masked_fill(~kept_tokens(logits, weights, top_k, top_p), 0.0)
    cdf = weights.cumsum(dim=-1)  # one term after another: flat across what is cut
    whole = cdf[:, -1:].contiguous()
    at = torch.searchsorted(cdf, uniform * whole, right=True)
    return torch.minimum(at, torch.searchsorted(cdf, whole))[:, 0].clamp(max=logits.shape[-1] - 1)


def kept_tokens(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens top-k and top-p leave of [B, V] logits: [B, V] bool. `weights` [B, V]: 1 for the likeliest."""
    width = logits.shape[-1]
    mass = weights.cumsum(dim=-1)[:, -1:]  # not `sum`, whose rounding changes with the number of rows
    kept, edge = _cut_within(min(HEAD, width), logits, top_k, top_p, mass)
    if len(wide := (kept == 0).nonzero()[:, 0]):
        kept[wide], edge[wide] = _cut_within(width, logits[wide], top_k[wide], top_p[wide], mass[wide])
    keeps = logits >= edge
    if len(tied := (keeps.sum(dim=-1, keepdim=True) > kept).nonzero()[:, 0]):  # the lower ids stay
        more, ties = logits[tied] > edge[tied], logits[tied] == edge[tied]
        keeps[tied] = more | (ties & (ties.cumsum(dim=-1) <= kept[tied] - more.sum(dim=-1, keepdim=True)))
    return keeps


def _cut_within(head: int, logits: Tensor, top_k: Tensor, top_p: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens top-k and top-p leave, and the smallest logit of these: [B, 1] each. 0 tokens where the cut lies
    behind the `head` largest. `mass` [B, 1]: the weight of all tokens, where that of the largest is 1.
    """
    width = logits.shape[-1]
    ordered = logits.topk(head, dim=-1).values
    rank = torch.arange(head)
    weights = (ordered - ordered[:, :1]).exp().masked_fill(rank >= top_k, 0.0)
    reached = weights.cumsum(dim=-1)
    wanted = top_p * torch.where(top_k >= width, mass, reached[:, -1:])
    stays = reached - weights < wanted  # what lies before it is not enough: the token that crosses top_p, too
    stays = (rank < top_k) & (stays | (rank == 0) | (top_p >= 1))
    kept = stays.sum(dim=-1, keepdim=True)
    edge = ordered.gather(1, kept - 1)
    is_whole = (top_p >= 1) & (top_k >= width)
    is_here = (top_k <= head) | ((top_k >= width) & (top_p < 1) & (reached[:, -1:] >= wanted)) | (head == width)
    kept, edge = kept.masked_fill(is_whole, width), edge.masked_fill(is_whole, -torch.inf)
    return kept.masked_fill(~(is_here | is_whole), 0), edge
