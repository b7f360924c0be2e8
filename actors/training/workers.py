"""Distributed training: ranks, wrapping for DDP or FSDP, and the rows of a batch that each worker takes."""

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
        # with SwiftKV the upper layers' own key and value projections are unused, without it those of SwiftKV; a batch
        # may pass by experts of a model of transformers
        has_unused = loss.model.swiftkv is not None or loss.model.config.implementation == "transformers"
        return DistributedDataParallel(loss, find_unused_parameters=has_unused)
    for block in loss.model.layers:
        if block.k_norm is not None:  # SwiftKV calls it outside of its layer's forward
            fully_shard(block.k_norm)
        fully_shard(block)
    fully_shard(loss)
    return loss


def parts_of(batch: Sequence[Pair], count: int) -> list[tuple[Sequence[Pair], float]]:
    """The batch in `count` weighted parts. A missing part is a row of weight 0, so that workers make equal calls."""
    return [(batch[i::count], 1.0) if i < len(batch) else (batch[:1], 0.0) for i in range(count)]


def inner(module: nn.Module) -> ResponseLoss:
    """The loss that `wrap` was given."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, ResponseLoss)
    return inner


def no_sync(module: nn.Module, is_last: bool) -> Any:
    """A context in which gradients are exchanged only for the last micro-batch of a step."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()
