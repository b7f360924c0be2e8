"""Layers of transformers as kernels: which are, that they make what the layers made, and what keeps one from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from skipdecode.model.decoder import Decoder
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.model.wrapped.fused_layers import window_by
from skipdecode.model.wrapped.layer_kernels import Block
from skipdecode.model.wrapped.norms import Norm, norm_of
from tests.skipdecode.model.wrapped.test_packing import TOLERANCE, distance, load, states_of, wanted_of
from tests.support.cpu_backends import NAMES, Kind, kind
from tests.support.wrapped_models import L

__all__ = ["kind"]
pytestmark = pytest.mark.skipif(not NAMES, reason="no kernels for this CPU")


def kernels_of(model: Decoder) -> str:
    """Of each layer: L if the whole is a kernel, A if its attention is, F if its feed-forward block is."""
    assert isinstance(model, WrappedDecoder)
    assert model.packed is not None
    found = ((one.layer, one.attention, one.feed_forward, True) for one in model.packed.fused)
    return "".join("LAF-"[[half is None for half in halves].index(False)] for halves in found)


KERNELS = {
    "L": "llama gemma3_text phi3 cwm gemma ministral3 olmo seed_oss",  # four norms, windows, fused projections
    "A": "qwen3_moe mixtral starcoder2 nemotron arcee",  # experts, other activations
    "F": "gemma2 glm4 helium ernie4_5",  # soft caps, neighbours in a head that are rotated together
    "-": "gpt_oss olmo2",  # sinks and experts, norms of outputs alone
}
FAST = ("llama", "gemma3_text", "phi3", "qwen3_moe", "gemma2", "glm4", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param(name, letter * L, marks=[] if name in FAST else [pytest.mark.slow])
        for letter, names in KERNELS.items()
        for name in names.split()
    ],
)
def test_what_is_as_in_our_layers_is_a_kernel(name: str, wanted: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    before = states_of(model)
    model.pack()
    assert kernels_of(model) == wanted
    assert distance(states_of(model), before) < TOLERANCE[None][torch.float32]


@pytest.mark.parametrize(("name", "norms"), [("olmo2", 4), ("cohere", 1), ("phi", 1)])
def test_norms_and_gated_blocks_outside_of_kernels_are_ours(name: str, norms: int, tmp_path: Path) -> None:
    """One call each: of layers with norms behind their blocks, and of layers with blocks side by side."""
    model = load(name, tmp_path)
    before = states_of(model)
    model.pack()
    inside = [module for layer in model.hollow.layers for module in layer.modules()]
    assert sum(isinstance(module, Norm) for module in inside) == norms * L
    assert sum(isinstance(module, Block) for module in inside) == (0 if name == "phi" else L)
    assert model.packed is not None
    assert model.packed.num_packed == model.packed.num_linears
    assert distance(states_of(model), before) < TOLERANCE[None][torch.float32]


def test_clamps_of_keys_and_values_show(tmp_path: Path) -> None:
    for clip, wanted in ((None, "L"), (8.0, "F")):
        model = load("olmo", tmp_path / str(clip), clip_qkv=clip)
        assert kernels_of(model.pack()) == L * wanted


def test_scales_that_only_late_positions_have_show(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    for start, wanted in ((128, "L"), (64, "F")):
        rope["original_max_position_embeddings"] = start
        model = load("ministral3", tmp_path / str(start), rope_parameters=rope, max_position_embeddings=128)
        assert kernels_of(model.pack()) == L * wanted


@pytest.mark.parametrize("name", ["gemma3_text", "gemma2", pytest.param("starcoder2", marks=pytest.mark.slow)])
def test_kernels_make_what_plain_weights_make(name: str, kind: Kind, tmp_path: Path) -> None:
    """In every type and quantization."""
    dtype, quantization = kind
    model, wanted = load(name, tmp_path, dtype), wanted_of(name, kind, tmp_path)
    model.pack(quantization)
    assert "-" not in kernels_of(model)
    assert distance(states_of(model), wanted) < TOLERANCE[quantization][dtype]


def _other_epsilon(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon *= 1.1


def _clamp(layer: Any) -> None:
    class Clamped(type(layer.mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))

    layer.mlp.__class__ = Clamped


def _gelu(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _gelu_by_tanh(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU(approximate="tanh")


def _scale(layer: Any) -> None:
    layer.self_attn.scaling *= 1.1


def _double(layer: Any) -> None:
    class Doubled(type(layer.self_attn.o_proj)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer.self_attn.o_proj.__class__ = Doubled


def _share(layer: Any) -> None:
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (_other_epsilon, "A"),
        (_clamp, "A"),
        (_gelu, "A"),
        (_gelu_by_tanh, "L"),
        (_share, "A"),
        (_scale, "F"),
        (_double, "F"),
    ],
)
def test_a_layer_that_differs_is_none(change: Callable[[Any], None], wanted: str, tmp_path: Path) -> None:
    """Only the half that is as ours, and the logits are those of plain weights all the same."""
    model = load("llama", tmp_path)
    change(model.hollow.layers[1])
    before = states_of(model)
    model.pack()
    assert kernels_of(model) == f"L{wanted}LLLL"
    assert distance(states_of(model), before) < TOLERANCE[None][torch.float32]


def test_norms_are_told_apart() -> None:
    width, generator = 48, torch.Generator().manual_seed(1)
    weight = torch.randn(width, generator=generator)
    x = torch.randn(3, width, generator=generator)
    for make, wanted, epsilon in (
        (lambda: LlamaRMSNorm(width, eps=1e-5), "rms", 1e-5),
        (lambda: GemmaRMSNorm(width, eps=1e-6), "rms", 1e-6),
        (lambda: nn.RMSNorm(width, eps=2e-5), "rms", 2e-5),
        (lambda: nn.LayerNorm(width, eps=1e-5), "layer", 1e-5),
        (lambda: nn.LayerNorm(width, eps=1e-5, bias=False), "layer", 1e-5),
    ):
        module = make()
        module.weight.data.copy_(weight)
        found = norm_of(module, width)
        assert found is not None
        assert (found.kind, found.epsilon) == (wanted, epsilon)
        torch.testing.assert_close(found(x), module(x))
        assert norm_of(module, width // 2) is None
    for other in (nn.SiLU(), nn.Identity(), nn.Linear(width, width), nn.PReLU(width)):
        assert norm_of(other, width) is None


def test_windows_are_told_from_other_masks() -> None:
    def window(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 5)

    def chunks(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 5 == query // 5)

    def causal(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    assert window_by(window, 64) == 5
    assert window_by(causal, 64) is None
    with pytest.raises(ValueError, match="no window"):
        window_by(chunks, 64)
