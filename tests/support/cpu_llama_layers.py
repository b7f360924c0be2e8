"""Llama's layer in plain torch: RMS norms, heads that share keys, rotation, SwiGLU, norms of heads.

Written here from the definitions; nothing of the decoder is used but what packs weights.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from skipdecode.backends import cpu_weights
from skipdecode.backends.backend import LayerNorms, LayerShape
from skipdecode.backends.cpu_backend import CPU
from skipdecode.backends.cpu_layers import LayerKernel, Product
from skipdecode.config.model import Quantization
from skipdecode.model.linear import product

EPSILON = 1e-5
POSITIONS = 80


@dataclass(frozen=True)
class Spec:
    """A layer: width D, H and G heads of K, F numbers in between, r that turn."""

    width: int
    heads: int
    groups: int
    dim: int
    ffn: int = 64
    rotary: int = 0
    has_bias: bool = False
    has_head_norms: bool = False
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "geglu", "relu"] = "swiglu"
    is_pre: bool = True
    has_norm_bias: bool = field(default=False, kw_only=True)
    has_out_norms: bool = field(default=False, kw_only=True)
    window: int | None = field(default=None, kw_only=True)

    def shape(self) -> LayerShape:
        table = rotary_table(self.rotary) if self.rotary else None
        return LayerShape(
            self.heads, self.groups, self.dim, EPSILON, self.is_pre, norm=self.norm, mlp=self.mlp, rotary_table=table,
            window=self.window,
        )  # fmt: skip


def rotary_table(rotary: int) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()


def rotate(x: Tensor, positions: Tensor, rotary: int) -> Tensor:
    """x [..., K] at `positions` [...], as Hugging Face does it: x cos + rotate_half(x) sin."""
    if not rotary:
        return x
    angles = rotary_table(rotary)[positions.clamp(max=POSITIONS - 1)]
    cos, sin = (torch.cat([half, half], dim=-1) for half in angles.chunk(2, dim=-1))
    turning, rest = x[..., :rotary], x[..., rotary:]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON) * weight


class Norm(nn.Module):
    """A weight, and no attribute `bias`, as Hugging Face's RMS norms have it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class LlamaLayer:
    """Random weights; as a kernel, and as a plain computation in float32 with the same weights."""

    def __init__(self, spec: Spec, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        self.spec, self.dtype, self.quantization = spec, dtype, quantization
        D, H, G, K = spec.width, spec.heads, spec.groups, spec.dim
        inner = spec.ffn * (1 if spec.mlp == "relu" else 2)
        self.sizes = {"qkv": ((H + 2 * G) * K, D), "out": (D, H * K), "fc1": (inner, D), "fc2": (D, spec.ffn)}
        self.weights = {n: (torch.randn(size) * size[1] ** -0.5).to(dtype) for n, size in self.sizes.items()}
        biased = [*(["qkv", "fc1"] if spec.has_bias else [])]
        self.biases = {name: (torch.randn(self.sizes[name][0]) * 0.5).to(dtype) for name in biased}
        names = [("attn", D), ("ffn", D), *([("q", K), ("k", K)] if spec.has_head_norms else [])]
        names += [("attn_out", D), ("ffn_out", D)] if spec.has_out_norms else []
        self.norms = {name: (1 + 0.3 * torch.randn(size)).to(dtype) for name, size in names}
        self.norm_bias = (0.3 * torch.randn(D)).to(dtype) if spec.has_norm_bias else None

    def product(self, name: str, rows: int | None = None) -> Product:
        gated = name == "fc1" and self.spec.mlp != "relu"
        bias = self.biases.get(name)
        if bias is not None and gated:
            bias = cpu_weights.interleave(bias)
        packed = CPU.pack(self.weights[name][:rows], self.quantization, is_gated=gated)
        made = product(packed, bias if bias is None else bias[:rows])
        assert made is not None
        return made

    def module(self, name: str) -> nn.Module | None:
        if name not in self.norms:
            return None
        norm = Norm(self.norms[name])
        if self.norm_bias is not None and name not in ("q", "k"):
            norm.bias = nn.Parameter(self.norm_bias, requires_grad=False)
        return norm

    def kernel(self, *, only_queries: bool = False) -> LayerKernel:
        queries = self.spec.heads * self.spec.dim
        attn, ffn = self.module("attn"), self.module("ffn")
        assert attn is not None
        assert ffn is not None
        parts = [self.product("qkv", queries if only_queries else None)]
        parts += [self.product(name) for name in ("out", "fc1", "fc2")]
        norms = LayerNorms(
            attn, ffn, self.module("q"), self.module("k"), self.module("attn_out"), self.module("ffn_out")
        )
        return LayerKernel(self.spec.shape(), norms, *parts)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[name].float(), self.biases.get(name)
        if self.quantization:
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            weight = (weight / scales).round() * scales
        return F.linear(x, weight, None if bias is None else bias.float())

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.norms[name].float(), None if self.norm_bias is None else self.norm_bias.float()
        if self.spec.norm == "rms" or name in ("q", "k"):
            return rms(x, weight)
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)

    def queries_keys_values(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D] at positions [T] -> [T, H, K], [T, G, K], [T, G, K]"""
        spec = self.spec
        x = self.linear("qkv", self.norm("attn", h) if spec.is_pre else h).view(len(h), -1, spec.dim)
        q, k, v = x.split([spec.heads, spec.groups, spec.groups], dim=1)
        if spec.has_head_norms:
            q, k = self.norm("q", q), self.norm("k", k)
        return *(rotate(part, positions[:, None].expand(part.shape[:2]), spec.rotary) for part in (q, k)), v

    def attend(self, h: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [T, H, K] over k, v [T or 1, S, G, K], mask [T, S] -> [T, D]"""
        k, v = (x.repeat_interleave(self.spec.heads // self.spec.groups, dim=2) for x in (k, v))
        scores = torch.einsum("thk,tshk->ths", q, k.expand(len(q), -1, -1, -1)) * self.spec.dim**-0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
        out = torch.einsum("ths,tshk->thk", weights, v.expand(len(q), -1, -1, -1)).flatten(1)
        out = self.linear("out", out)
        h = h + (self.norm("attn_out", out) if self.spec.has_out_norms else out)
        return h if self.spec.is_pre else self.norm("attn", h)

    def feed(self, h: Tensor) -> Tensor:
        x = self.linear("fc1", self.norm("ffn", h) if self.spec.is_pre else h)
        if self.spec.mlp == "relu":
            x = x.relu()
        else:
            gate, other = x.chunk(2, dim=-1)
            cubic = 0.7978845608 * (gate + 0.044715 * gate**3)
            x = other * (gate / (1 + torch.exp(-gate)) if self.spec.mlp == "swiglu" else gate * (1 + cubic.tanh()) / 2)
        out = self.linear("fc2", x)
        h = h + (self.norm("ffn_out", out) if self.spec.has_out_norms else out)
        return h if self.spec.is_pre else self.norm("ffn", h)

    def read(self, h: Tensor, *, attends: bool = True, runs_ffn: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """A prompt h [T, D] -> [T, D], and its keys and values [T, G, K]."""
        q, k, v = self.queries_keys_values(h, torch.arange(len(h)))
        if attends:
            mask = torch.ones(len(h), len(h), dtype=torch.bool).tril()
            h = self.attend(h, q, k[None], v[None], mask.triu(1 - (self.spec.window or len(h))))
        return self.feed(h) if runs_ffn else h, k, v

    def step(
        self,
        h: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor,
        last: Tensor,
        *,
        is_new: bool,
        attends: bool,
        runs_ffn: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, D], k, v [B, G, S, K] -> [B, D], and the cache with the new column."""
        if attends:
            q, new_k, new_v = self.queries_keys_values(h, last - first)
            k, v = k.clone(), v.clone()
            if is_new:
                k[torch.arange(len(h)), :, last], v[torch.arange(len(h)), :, last] = new_k, new_v
            columns = torch.arange(k.shape[2])
            mask = (columns >= first[:, None]) & (columns <= last[:, None])
            if self.spec.window is not None:
                mask &= columns > last[:, None] - self.spec.window
            h = self.attend(h, q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.feed(h) if runs_ffn else h, k, v


REAL = [
    Spec(576, 9, 3, 64, 1536, 64),  # SmolLM2-135M
    Spec(128, 4, 4, 32, 352, 32),  # a demo model
    Spec(1024, 16, 8, 128, 96, 128, has_head_norms=True),  # Qwen3-0.6B: heads wider than the model
    Spec(512, 8, 1, 64, 96, 64, has_bias=True),  # Qwen2's biases
    Spec(96, 12, 4, 96, 96, 24, norm="layer", mlp="relu", has_bias=True, has_norm_bias=True),  # StableLM's parts
    Spec(160, 20, 1, 80, 32, 80),  # more queries than registers hold
    Spec(640, 4, 1, 256, 2048, 256, has_head_norms=True, mlp="geglu", has_out_norms=True, window=9),  # Gemma 3 270M
    Spec(96, 4, 2, 24, 64, 24, window=1),
    Spec(96, 4, 2, 24, 64, 24, has_bias=True, has_out_norms=True, window=34),
]
SMALL = [
    (32, 1, 1, 32), (64, 6, 2, 16), (96, 3, 1, 32), (64, 8, 1, 64), (32, 4, 2, 80), (64, 2, 1, 128), (64, 8, 2, 12),
    (160, 9, 3, 32), (96, 2, 2, 96), (64, 14, 2, 48), (128, 32, 4, 7), (32, 4, 4, 24),
]  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    width, heads, groups, dim = draw(st.sampled_from(SMALL))
    rotary = draw(st.sampled_from([0, dim // 2 * 2, dim // 4 * 2, 2]))
    flags = [draw(st.booleans()) for _ in range(3)]
    norm: Literal["rms", "layer"] = draw(st.sampled_from(["rms", "rms", "layer"]))
    mlp: Literal["swiglu", "geglu", "relu"] = draw(st.sampled_from(["swiglu", "swiglu", "geglu", "relu"]))
    window = draw(st.sampled_from([None, None, 1, 2, 5, 31, 33]))
    ffn = draw(st.sampled_from([32, 64, 96, 160]))
    has_norm_bias = norm == "layer" and draw(st.booleans())
    bias, head_norms, is_post = flags
    has_out_norms = not is_post and draw(st.booleans())
    return Spec(width, heads, groups, dim, ffn, rotary, bias, head_norms, norm, mlp, not is_post,
                has_norm_bias=has_norm_bias, has_out_norms=has_out_norms, window=window)  # fmt: skip


LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of the largest number, as in cpu_layers.py


def assert_close(made: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert made.shape == wanted.shape
    difference, limit = (made.float() - wanted).abs().max(), LIMIT[dtype] * float(wanted.abs().max())
    assert difference <= limit, (float(difference), limit)
