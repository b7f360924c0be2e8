"""Several workers as one: who they are, how the loss is wrapped for them, which rows of a batch are whose."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from skipdecode.training.loss import ResponseLoss

Pair = tuple[list[int], list[int]]
"""(prompt tokens with BOS, response tokens with EOS)"""


def rank_and_size() -> tuple[int, int]:
    """(rank, number of workers)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wrap(loss: ResponseLoss, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    if rank_and_size()[1] == 1:
        return loss
    if parallel == "ddp":
        # under SwiftKV the upper layers' own K and V are not run, and without it its weights are not
        return DistributedDataParallel(loss, find_unused_parameters=loss.model.swift is not None)
    for block in loss.model.layers:
        if block.k_norm is not None:  # keys from elsewhere go through it too (SwiftKV), outside of its layer's call
            fully_shard(block.k_norm)
        fully_shard(block)
    fully_shard(loss)
    return loss


def parts_of(batch: Sequence[Pair], count: int) -> list[tuple[Sequence[Pair], float]]:
    """The batch in `count` parts; where rows run out, a row that weighs nothing: every worker makes the same calls."""
    return [(batch[i::count], 1.0) if i < len(batch) else (batch[:1], 0.0) for i in range(count)]


def inner(module: nn.Module) -> ResponseLoss:
    """What `_wrap` wrapped."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, ResponseLoss)
    return inner


def no_sync(module: nn.Module, is_last: bool) -> Any:
    """Gradients are exchanged with the last micro-batch of a step only."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()
