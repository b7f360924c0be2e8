"""Weights in blocks of 32 inputs, as GGUF files have them: types, and how a plain weight is quantised to them.

No calibration data, and no other types than those that the kernels read (`cpp/blocks.h`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BlockKind = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK = 32
"""Inputs in a block."""
NUM_BYTES: dict[BlockKind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Of a block: its scale in float16, in Q4_1 its minimum, then 16 bytes of two numbers, or 32 numbers of 8 bits."""
STEPS = tuple(8 + 0.2 * i for i in range(-6, 7))
"""How many steps the largest number of a block may be away from 0, of those that `quantize` tries."""
PART = 1 << 14  # blocks that are quantised, or checked, at a time


class BlockRows(NamedTuple):
    """Rows of a weight as blocks, perhaps in a file that is mapped."""

    raw: Tensor
    """[rows, in / 32, bytes] uint8"""
    order: Tensor | None = None
    """[rows] int64: where in `raw` each row is; None: in this order."""
    name: str = "a weight"
    """For errors."""


@dataclass(frozen=True)
class StoredBlocks:
    """A weight [out, in] as its blocks, perhaps of several tensors above each other, that are read when needed."""

    kind: BlockKind
    parts: Sequence[BlockRows]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part.raw) for part in self.parts), BLOCK * self.parts[0].raw.shape[1]

    def rows(self, numbers: Tensor) -> Tensor:
        """The rows with these numbers: [n, in / 32, bytes] uint8. ValueError names a tensor with a scale or a minimum
        that is NaN or infinite."""
        first, made = 0, self.parts[0].raw.new_empty((len(numbers), *self.parts[0].raw.shape[1:]))
        for raw, order, name in self.parts:
            own = (numbers >= first) & (numbers < first + len(raw))
            at = numbers[own] - first
            made[own] = found = raw[at if order is None else order[at]]
            self._check(found, name)
            first += len(raw)
        return made

    def check(self) -> None:
        """The ValueError of `rows`, for any of them."""
        for raw, _, name in self.parts:
            for part in torch.split(raw, max(1, PART // raw.shape[1])):
                self._check(part, name)

    def _check(self, raw: Tensor, name: str) -> None:
        halves = raw[..., : 4 if self.kind == "Q4_1" else 2].contiguous().view(torch.float16)
        if not bool(halves.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity")


def quantize(weight: Tensor, kind: Literal["Q4_0", "Q8_0"]) -> StoredBlocks:
    """The blocks of a weight [out, in], in a multiple of 32.

    Q8_0: the largest number of a block becomes 127. Q4_0: of the scales by which that number is STEPS away from 0, the
    one with the smallest squared error after the scale has been set to its least squares; numbers are -8 to 7 times it.
    ValueError for a weight that is not finite, or too large for scales in float16.
    """
    outputs, inputs = weight.shape
    assert inputs % BLOCK == 0, inputs
    made = torch.empty(outputs * inputs // BLOCK, NUM_BYTES[kind], dtype=torch.uint8)
    whole = weight.reshape(-1, BLOCK)
    for at in range(0, len(whole), PART):
        part = whole[at : at + PART].float()
        scales, numbers = _to_8_bits(part) if kind == "Q8_0" else _to_4_bits(part)
        if not bool(scales.isfinite().all()):
            raise ValueError("holds NaN, infinity, or a number too large for blocks with scales in float16")
        made[at : at + PART, :2] = scales.view(torch.uint8).view(-1, 2)
        made[at : at + PART, 2:] = numbers
    return StoredBlocks(kind, [BlockRows(made.view(outputs, inputs // BLOCK, -1))])


def dequantize(blocks: StoredBlocks) -> Tensor:
    """The weight [out, in] in float32, exactly."""
    raw = blocks.rows(torch.arange(blocks.shape[0]))
    scales = raw[..., :2].contiguous().view(torch.float16).float()
    if blocks.kind == "Q8_0":
        return (scales * raw[..., 2:].contiguous().view(torch.int8)).view(blocks.shape)
    numbers = torch.cat([raw[..., -16:] & 15, raw[..., -16:] >> 4], dim=-1).float()
    if blocks.kind == "Q4_0":
        return (scales * (numbers - 8)).view(blocks.shape)
    return (scales * numbers + raw[..., 2:4].contiguous().view(torch.float16).float()).view(blocks.shape)


def _to_8_bits(part: Tensor) -> tuple[Tensor, Tensor]:
    scales = (part.abs().amax(dim=1, keepdim=True) / 127).half()
    numbers = (part / scales.float().clamp(min=1e-30)).round().clamp(-127, 127)
    return scales, numbers.to(torch.int8).view(torch.uint8)


def _to_4_bits(part: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 32] -> scales [n, 1] float16 and numbers + 8, those of the first 16 in the low bits: [n, 16] uint8."""
    top = part.gather(1, part.abs().argmax(dim=1, keepdim=True))
    best = part.new_full((len(part), 1), torch.inf)
    scales, numbers = torch.where(top == 0, 0.0, torch.nan), torch.zeros_like(part)  # NaN: too large for any scale
    for steps in STEPS:
        tried = torch.where(top == 0, 0, -steps / top)  # the largest is negative, where there is a step more
        whole = (part * tried).round().clamp(-8, 7)
        scale = (part * whole).sum(1, keepdim=True) / (whole * whole).sum(1, keepdim=True).clamp(min=1)
        scale = scale.half().float()
        error = (part - scale * whole).square().sum(1, keepdim=True)
        is_better = error < best
        best, scales = torch.where(is_better, error, best), torch.where(is_better, scale, scales)
        numbers = torch.where(is_better, whole, numbers)
    scales = torch.where(part.isfinite().all(dim=1, keepdim=True), scales, torch.nan)
    shifted = (numbers + 8).to(torch.uint8)
    return scales.half(), shifted[:, :16] | shifted[:, 16:] << 4
