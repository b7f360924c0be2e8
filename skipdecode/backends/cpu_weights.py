"""Weights in the layout that the CPU kernels read: with 4, 2 or 1 bytes per weight (`cpp/gemm.h`), or in blocks
(`cpp/blocks.h`)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends import choice
from skipdecode.backends.block_quantization import BLOCK, NUM_BYTES, BlockKind, StoredBlocks, quantize
from skipdecode.backends.cpu_library import Kind, function
from skipdecode.backends.large_pages import LargePages

GATES = 16
"""Rows of a gate that lie together in a packed weight, before as many rows of the up projection (`interleave`)."""
PART = 64  # blocks of 32 outputs that are quantised at a time
FORMATS: dict[BlockKind, int] = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 3}
"""The values of `BlockFormat` in `cpp/micro_blocks.h`."""
_WEIGHTS = LargePages()


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the back end has kernels for weights of this type."""
    name = choice.choose().name
    has_bfloat16 = name == "amx" or (name == "avx512" and "avx512_bf16" in choice.cpu_flags())
    return name != "torch" and (dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16))


def interleave(gated: Tensor) -> Tensor:
    """[2 F, ...], gate above up projection -> 16 rows of the gate, 16 of the up projection, and so on."""
    assert len(gated) % (2 * GATES) == 0, gated.shape
    return gated.reshape(2, -1, GATES, *gated.shape[1:]).transpose(0, 1).reshape(gated.shape)


def pack(weight: Tensor, *, gated: bool = False) -> Tensor:
    """A weight [out, in], in a multiple of 32, in the order in which `linear` reads it.

    Every 32 outputs and 32 inputs are two tiles of 16 outputs, in lines of 64 bytes with four bytes of each output.
    `gated`: for `swiglu`, the gate above the up projection, each with a multiple of 16 rows.
    """
    weight = interleave(weight.detach()) if gated else weight
    outputs, inputs = weight.shape
    assert multiplies(weight.dtype), weight.dtype
    assert inputs % 32 == 0, inputs
    weight = weight.detach().contiguous()
    packed = _WEIGHTS.empty((-(-outputs // 32), inputs // 32, 2, 512), weight.dtype)
    function("pack", weight.dtype)(outputs, inputs, weight.data_ptr(), packed.data_ptr())
    return packed


class Int8Weight(NamedTuple):
    """A weight [out, in] as integers in [-127, 127] times a scale per output, packed (`pack_int8`)."""

    tiles: Tensor
    """[out / 32, in / 64, 2, 16, 16, 4] int8."""
    scales: Tensor
    """[out] float32, padded to a multiple of 32."""
    totals: Tensor
    """[out] int32, padded likewise: the sum of each output's integers."""
    inputs: int


class BlockWeight(NamedTuple):
    """A weight [out, in] in blocks of 32 inputs, packed (`pack_blocks`)."""

    blocks: Tensor
    """[out / 32, in / 32, bytes] uint8, `Blocks` of `cpp/micro_blocks.h`."""
    kind: BlockKind
    rows: torch.dtype
    """The type of what it multiplies."""


Weight = Tensor | Int8Weight | BlockWeight
"""A packed weight, as `pack`, `pack_int8` or `pack_blocks` returns it."""


class Operand(NamedTuple):
    """A packed weight as a kernel takes it."""

    kind: Kind
    tiles: Tensor
    inputs: int
    rows: torch.dtype
    """The type of what it multiplies."""
    pointers: tuple[int, ...]
    """Addresses of the tiles and, for int8, of scales and totals; behind that of blocks, their format."""


def part_of(packed: Weight, start: int, stop: int | None = None) -> Weight:
    """The part of a packed weight for the outputs from `start`, a multiple of 32, to `stop`, another one; None: to the
    last."""
    blocks = slice(start // 32, None if stop is None else stop // 32)
    if isinstance(packed, Int8Weight):
        tiles, scales, totals, _ = packed
        return packed._replace(tiles=tiles[blocks], scales=scales[start:stop], totals=totals[start:stop])
    if isinstance(packed, BlockWeight):
        return packed._replace(blocks=packed.blocks[blocks])
    return packed[blocks]


def operand_of(packed: Weight, outputs: int) -> Operand:
    """A packed weight with so many outputs for a kernel; AssertionError for one of another shape."""
    for tensor in [packed] if isinstance(packed, Tensor) else packed:
        assert not isinstance(tensor, Tensor) or tensor.is_contiguous(), tensor.stride()
    if isinstance(packed, Int8Weight):
        pointers = packed.tiles.data_ptr(), packed.scales.data_ptr(), packed.totals.data_ptr()
        found = Operand("int8", packed.tiles, packed.inputs, torch.bfloat16, pointers)
    elif isinstance(packed, BlockWeight):
        kind: Kind = "blocks_float32" if packed.rows == torch.float32 else "blocks_bfloat16"
        inputs, address = BLOCK * packed.blocks.shape[1], (packed.blocks.data_ptr(), FORMATS[packed.kind])
        found = Operand(kind, packed.blocks, inputs, packed.rows, address)
    else:
        found = Operand(packed.dtype, packed, 32 * packed.shape[1], packed.dtype, (packed.data_ptr(),))
    assert found.tiles.shape[0] == -(-outputs // 32), (outputs, found.tiles.shape)
    return found


def pack_int8(weight: Tensor, *, gated: bool = False) -> Int8Weight:
    """Quantises a weight [out, in], in a multiple of 32, so that the largest of an output becomes 127. `gated` as in
    `pack`."""
    weight = interleave(weight.detach()) if gated else weight
    outputs, inputs = weight.shape
    assert choice.int8_misfit(inputs) is None, choice.int8_misfit(inputs)
    steps, blocks = -(-inputs // 64), -(-outputs // 32)
    packed = _WEIGHTS.empty((blocks, steps, 2, 16, 16, 4), torch.int8)
    scales, totals = torch.empty(32 * blocks), torch.empty(32 * blocks, dtype=torch.int32)
    for at in range(0, blocks, PART):  # in float32 a weight is four times as large
        part = weight.detach()[32 * at : 32 * (at + PART)].float()
        part = F.pad(part, (0, -inputs % 64, 0, -len(part) % 32))
        own = slice(32 * at, 32 * at + len(part))
        scales[own] = part.abs().amax(dim=1) / 127.0
        whole = (part / scales[own].clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        packed[at : at + PART] = whole.view(-1, 2, 16, steps, 16, 4).permute(0, 3, 1, 4, 2, 5)
        totals[own] = whole.sum(dim=1, dtype=torch.int32)
    return Int8Weight(packed, scales, totals, inputs)


def pack_blocks(blocks: StoredBlocks, rows: torch.dtype, *, gated: bool = False) -> BlockWeight:
    """Blocks as a GGUF file has them, in the order in which `linear` reads them; their bytes stay as they are, but for
    the sign of those of 8 bits. `rows`: the type of what they multiply; `gated` as in `pack`."""
    outputs, inputs = blocks.shape
    num_bytes, most = NUM_BYTES[blocks.kind], 32 * PART
    head, tail = (2, 32) if blocks.kind == "Q8_0" else (num_bytes - 16, 16)  # scales and minima, numbers
    packed = _WEIGHTS.empty((-(-outputs // 32), inputs // BLOCK, 32 * num_bytes), torch.uint8)
    order = torch.arange(outputs)
    order = interleave(order) if gated else order
    for at in range(0, outputs, most):
        part = F.pad(blocks.rows(order[at : at + most]), (0, 0, 0, 0, 0, -min(most, outputs - at) % 32))
        count = len(part) // 32
        into = packed[at // 32 : at // 32 + count]  # [n, in / 32, bytes]
        numbers = part[..., head:].view(count, 2, 16, -1, tail // 4, 4)  # [n, tile, output, in / 32, line, 4]
        lines = numbers.permute(0, 3, 1, 4, 2, 5).reshape(count, -1, 32 * tail)
        into[..., : 32 * tail] = lines ^ 128 if blocks.kind == "Q8_0" else lines
        halves = (
            part[..., :head].reshape(count, 32, -1, head // 2, 2).permute(0, 2, 3, 1, 4)
        )  # [n, in / 32, half, output]
        into[..., 32 * tail :] = halves.reshape(count, -1, 32 * head)
    return BlockWeight(packed, blocks.kind, rows)


def pack_int4(weight: Tensor, *, gated: bool = False) -> BlockWeight:
    """Quantises a weight [out, in], in a multiple of 32, to 4 bits (`block_quantization.quantize`) and packs it.
    `gated` as in `pack`."""
    return pack_blocks(quantize(weight.detach(), "Q4_0"), weight.dtype, gated=gated)
