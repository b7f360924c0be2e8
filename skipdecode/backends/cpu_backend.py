"""The back end of CPUs: our compiled kernels where they take a weight, else oneDNN, else torch's operators.

oneDNN reorders a plain bfloat16 weight in every call, which is half of the time with few rows; here it is reordered
once. Where the choice is `torch` (`choice`), only oneDNN is left. On some instruction sets weights may be int8.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from skipdecode.backends import choice, cpu_kernels, cpu_weights
from skipdecode.backends.backend import (
    GATED,
    Activation,
    Backend,
    DecodeAttention,
    FusedLayer,
    GraphKVRange,
    KVRange,
    LayerNorms,
    LayerShape,
    PackedWeight,
    activate,
)
from skipdecode.backends.backend import Product as AnyProduct
from skipdecode.backends.block_quantization import StoredBlocks, quantize
from skipdecode.backends.cpu_layers import KVStoreKernel, LayerKernel, Product, Step
from skipdecode.backends.large_pages import large_pages, reusable_bytes
from skipdecode.config.model import Quantization


class CompiledBackend(Backend):
    """`Backend` for CPUs."""

    supports_multi_token_rows = accepts_fewer_rows = has_host_memory = True

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        return choice.choose().dtype

    @property
    def has_matrix_units(self) -> bool:  # type: ignore[override]
        return choice.choose().name == "amx"

    @property
    def why_slow(self) -> str | None:
        chosen = choice.choose()
        return f"the CPU kernels are not used: {chosen.reason}" if chosen.name == "torch" else None

    def pack(
        self,
        weight: Tensor,
        quantization: Quantization | None = None,
        *,
        is_gated: bool = False,
        blocks: StoredBlocks | None = None,
    ) -> PackedWeight | None:
        self.check(weight, quantization, is_gated=is_gated)
        if quantization == "int4":
            blocks = blocks or quantize(weight.detach(), "Q4_0")
            return _Kernel(cpu_weights.pack_blocks(blocks, weight.dtype, gated=is_gated), len(weight), is_gated)
        if quantization is not None:
            return _Kernel(cpu_weights.pack_int8(weight, gated=is_gated), len(weight), is_gated)
        if _fits_kernels(weight, is_gated):
            return _Kernel(cpu_weights.pack(weight, gated=is_gated), len(weight), is_gated)
        if onednn_lays_out(weight.dtype):
            return _OneDNN.of(weight)
        return None

    def split(self, packed: PackedWeight, sizes: Sequence[int]) -> Sequence[PackedWeight] | None:
        if not isinstance(packed, _Kernel) or packed.is_gated or any(size % 32 for size in sizes):
            return None
        ends = accumulate(sizes)
        return [
            _Kernel(cpu_weights.part_of(packed.weight, end - size, end), size)
            for size, end in zip(sizes, ends, strict=True)
        ]

    def why_no_fp8(self, device: torch.device) -> str:
        return "the kernels of CPUs have no such type"

    def check(self, weight: Tensor, quantization: Quantization | None, *, is_gated: bool = False) -> None:
        if quantization == "int4":
            check_int4(weight, is_gated=is_gated)
            return
        if quantization == "fp8" or (quantization is not None and weight.dtype != torch.bfloat16):
            super().check(weight, quantization)
        if quantization is not None:
            check_int8(weight, is_gated=is_gated)

    def fuse(
        self,
        shape: LayerShape,
        norms: LayerNorms,
        products: Sequence[AnyProduct | None],
    ) -> LayerKernel | None:
        return None if None in products else LayerKernel(shape, norms, *cast(Sequence[Product], products))

    def prepare_step(
        self,
        layers: Sequence[FusedLayer],
        rows: int,
        columns: Sequence[KVRange | GraphKVRange] | None,
        *,
        runs_ffn: bool,
    ) -> Step:
        return Step(
            cast(Sequence[LayerKernel], layers), rows, cast(Sequence[KVRange] | None, columns), runs_ffn=runs_ffn
        )

    def fuse_kv_store(
        self,
        shape: LayerShape,
        norm: nn.Module,
        products: Sequence[AnyProduct | None],
        k_norms: Sequence[nn.Module | None],
        tables: Sequence[Tensor | None],
    ) -> KVStoreKernel | None:
        if None in products:
            return None
        return KVStoreKernel(shape, norm, cast(Sequence[Product], products), k_norms, tables)

    def decode_attention(self, memory: Tensor) -> DecodeAttention | None:
        has_kernels = cpu_kernels.is_available(memory) and not torch.is_grad_enabled()  # which have no gradient
        return attend_one if has_kernels else None

    def max_prefill_tokens(self, layers: Sequence[FusedLayer | None], device: torch.device) -> int:
        """With kernels enough that threads seldom wait for each other at the end of a layer (2,048 tokens: 6 %
        slower)."""
        return 8192 if _are_kernels(layers) else super().max_prefill_tokens(layers, device)

    def supports_packed_prompts(self, layers: Sequence[FusedLayer | None], memory: Tensor) -> bool:
        return _are_kernels(layers) and self.decode_attention(memory) is not None

    def supports_shared_prefix(self, layers: Sequence[FusedLayer | None]) -> bool:
        return _are_kernels(layers)

    def is_batch_invariant(self, layers: Sequence[FusedLayer | None]) -> bool:
        return _are_kernels(layers)

    def argmax(self, logits: Tensor) -> Tensor:
        return cpu_kernels.argmax(logits) if cpu_kernels.is_available(logits) else super().argmax(logits)

    def mask(self, logits: Tensor, allowed: Tensor) -> Tensor:
        is_ours = cpu_kernels.is_available(logits) and logits.is_contiguous()
        return cpu_kernels.mask(logits, allowed) if is_ours else super().mask(logits, allowed)

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
        *,
        cuts: bool = True,
    ) -> Tensor:
        if cpu_kernels.is_available(logits):
            return cpu_kernels.draw(logits, temperature, top_k, top_p, uniform)
        return super().draw(logits, temperature, top_k, top_p, uniform, cuts=cuts)

    def allocate_cache(self, count: int, dtype: torch.dtype, device: torch.device, *, is_filled: bool) -> Tensor:
        """Zeros only where masked columns are read. A row that may generate 1,000 tokens has as many columns and fills
        few of them; zeroing all took half a second."""
        empty = torch.empty(count, dtype=dtype, device=device)
        if not cpu_kernels.is_available(empty):
            return empty.zero_()
        return self.allocate_buffers([(count,)], dtype, device)[0] if is_filled else empty

    def allocate_buffers(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return large_pages(shapes, dtype)

    @property
    def reusable_bytes(self) -> int:
        return reusable_bytes()

    def library_matmuls(self, weight: Tensor) -> list[Callable[[Tensor], Tensor]]:
        products = super().library_matmuls(weight)
        return [*products, _OneDNN.of(weight).multiply] if onednn_lays_out(weight.dtype) else products

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        return [(cpu_kernels, "attend", "attention")]

    @contextmanager
    def timed_layers(self) -> Iterator[dict[str, float]]:
        seconds: dict[str, float] = {}
        LayerKernel.seconds = found = torch.zeros(len(LayerKernel.STAGES), dtype=torch.float64)
        try:
            yield seconds
        finally:
            LayerKernel.seconds = None
            seconds |= zip(LayerKernel.STAGES, found.tolist(), strict=True)


CPU = CompiledBackend()


def _are_kernels(layers: Sequence[FusedLayer | None]) -> bool:
    return all(isinstance(layer, LayerKernel) for layer in layers)


def attend_one(
    q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange, *, window: int | None = None
) -> Tensor:
    """`DecodeAttention` by the kernel: q [B, H, 1, K] -> [B, H, 1, K]."""
    assert isinstance(columns, KVRange), "these kernels read no GraphKVRange"
    flat = [x[:, :, 0].flatten(1) for x in (q, k, v) if x is not None]  # [B, heads x K] each
    if len({x.stride() for x in flat}) > 1:  # after a rotary embedding they are separate tensors
        flat = list(torch.split(torch.cat(flat, dim=1), [x.shape[1] for x in flat], dim=1))
    new = (flat[1], flat[2]) if len(flat) == 3 else None
    k_all, v_all, first, last, slots, shared = columns[:6]
    out = cpu_kernels.attend(flat[0], k_all, v_all, first, last, new, slots=slots, shared=shared, window=window)
    return out.view(q.shape)


def check_int4(weight: Tensor, *, is_gated: bool = False) -> None:
    """ValueError where no kernel can take int4 weights in place of this weight."""
    chosen = choice.choose()
    if chosen.no_int4 is not None:
        raise ValueError(f"quantization: no int4 weights here: {chosen.no_int4}")
    if not cpu_weights.multiplies(weight.dtype):
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"quantization: no int4 weights in {kind}, which the back end {chosen.name} does not multiply")
    _check_shape("int4", weight, is_gated)


def check_int8(weight: Tensor, *, is_gated: bool = False) -> None:
    """ValueError where no kernel can take int8 weights in place of this bfloat16 weight."""
    if (problem := choice.choose().no_int8) is not None:
        raise ValueError(f"quantization: no int8 weights here: {problem}")
    _check_shape("int8", weight, is_gated)
    if (problem := choice.int8_misfit(inputs := weight.shape[1])) is not None:
        raise ValueError(f"quantization: int8 weights cannot have {inputs} inputs: {problem}")


def _check_shape(quantization: Quantization, weight: Tensor, is_gated: bool) -> None:
    if is_gated and len(weight) % (2 * cpu_weights.GATES):
        gates = len(weight) // 2
        raise ValueError(f"quantization: {quantization} weights need gates in a multiple of 16, and these are {gates}")
    if (inputs := weight.shape[1]) % 32:
        raise ValueError(
            f"quantization: {quantization} weights need inputs in a multiple of 32; {inputs} is no multiple of 32"
        )


def onednn_lays_out(dtype: torch.dtype) -> bool:
    """Whether oneDNN can reorder weights of this type on this CPU; where it cannot, it would raise."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)


def _fits_kernels(weight: Tensor, is_gated: bool) -> bool:
    fits = weight.shape[1] % 32 == 0 and not (is_gated and len(weight) % (2 * cpu_weights.GATES))
    return fits and cpu_weights.multiplies(weight.dtype)


@dataclass
class _Kernel:
    weight: cpu_weights.Weight
    outputs: int
    is_gated: bool = False

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        return cpu_kernels.linear(x, self.weight, self.outputs, bias, activation=activation, residual=residual)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self(x, None))

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        return cpu_kernels.argmax_linear(x, self.weight, self.outputs, allowed)

    def ordered(self, bias: Tensor) -> Tensor:
        return cpu_weights.interleave(bias) if self.is_gated else bias

    def product(self, bias: Tensor | None) -> Product:
        return Product(self.weight, self.outputs, bias, self.is_gated)


@dataclass
class _OneDNN:
    """A weight that oneDNN has reordered, with the operators that `torch.compile` uses in frozen graphs."""

    weight: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "_OneDNN":
        """Reorders the weight."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()))

    def multiply(self, x: Tensor) -> Tensor:
        return self(x, None)

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        y: Tensor
        if residual is not None:
            assert activation == "none", "one of the two"
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, bias, "add")
            return y
        name = "relu" if activation == "relu" else "none"
        y = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, name, [], "")
        return activate(y, activation) if activation in GATED else y

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self(x, None))

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        logits = self(x, None)
        return CPU.argmax(logits if allowed is None else CPU.mask(logits, allowed))

    def ordered(self, bias: Tensor) -> Tensor:
        return bias

    def product(self, bias: Tensor | None) -> None:
        return None
