"""Steps whose tokens have places in the cache (`KVRange.slots`): bit for bit those of rows that lie side by side."""

import pytest
import torch

from skipdecode.backends.backend import KVRange
from skipdecode.backends.cpu_layers import LayerKernel, Step
from skipdecode.config.model import Quantization
from tests.support.cpu_backends import kind, num_threads
from tests.support.cuda_models import random_model

__all__ = ["kind"]  # a fixture

LAYERS, COLUMNS, SPARE = 2, 24, 3  # rows of the cache that nobody has


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 70])  # of 70, two threads take their own through all layers
@pytest.mark.parametrize("order", ["rising", "any"])
@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meeting"])
def test_tokens_at_places_are_rows(
    kind: tuple[torch.dtype, Quantization | None], rows: int, order: str, meets: bool, threads: int
) -> None:
    """`meets`: some have a second token, in the next column, among the others. They see each other's keys in order."""
    dtype, quantization = kind
    model = random_model("llama", layers=LAYERS, dtype=dtype).pack(quantization)
    kernels = [layer.kernel for layer in model.layers if isinstance(layer.kernel, LayerKernel)]
    rng = torch.Generator().manual_seed(rows)
    table = torch.randperm(rows + SPARE, generator=rng)[:rows]
    places = table.sort().values if order == "rising" else table
    last = torch.randint(0, COLUMNS - 1, (rows,), generator=rng)
    shape = (rows + SPARE, model.config.num_kv_heads, COLUMNS, model.config.head_dim)
    memory = [tuple(torch.randn(shape, generator=rng).to(dtype) for _ in "kv") for _ in kernels]
    h = torch.randn(rows, 1, model.config.hidden_size, generator=rng).to(dtype)
    second = torch.arange(0, rows, 3) if meets else torch.empty(0, dtype=torch.int64)
    h2 = torch.randn(len(second), 1, model.config.hidden_size, generator=rng).to(dtype)

    wanted = [tuple(held[places].clone() for held in pair) for pair in memory]
    made = Step(kernels, rows, [KVRange(k, v, torch.zeros_like(last), last) for k, v in wanted], feeds=True)(h.clone())
    if meets:
        own = [tuple(held[second].clone() for held in pair) for pair in wanted]
        bounds = torch.zeros_like(second), last[second] + 1
        made2 = Step(kernels, len(second), [KVRange(k, v, *bounds) for k, v in own], feeds=True)(h2.clone())
        for pair, owned in zip(wanted, own, strict=True):
            for held, new in zip(pair, owned, strict=True):
                held[second] = new
        made = torch.cat([made, made2])

    mixed = torch.randperm(len(made), generator=rng) if order == "any" else torch.arange(len(made))
    where = torch.cat([places, places[second]])[mixed].contiguous()
    at = torch.cat([last, last[second] + 1])[mixed].contiguous()
    columns = [KVRange(k, v, torch.zeros_like(at), at, slots=where) for k, v in memory]
    before = [tuple(held.clone() for held in pair) for pair in memory]
    with num_threads(threads):
        ours = Step(kernels, len(at), columns, feeds=True)(torch.cat([h, h2])[mixed].contiguous())
    assert torch.equal(ours, made[mixed])
    for pair, ended, begun in zip(memory, wanted, before, strict=True):
        for held, rows_then, all_before in zip(pair, ended, begun, strict=True):
            all_before[places] = rows_then
            assert torch.equal(held, all_before), "something else was written, or not all"
