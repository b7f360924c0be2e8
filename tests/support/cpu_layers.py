"""Layers of OPT as one call of a CPU back end, as calls of its parts, and in float32."""

import copy

import torch

from skipdecode.config.model import Quantization
from skipdecode.families.opt import OPTConfig
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear

SHAPES = [(32, 1), (64, 2), (96, 3), (96, 4), (128, 4), (160, 2), (192, 3), (256, 2)]  # width, heads
# Of the largest output: bfloat16's last bit is 2^-8, and weights are rounded too; float32 sums in another order.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def layers(
    width: int,
    heads: int,
    *,
    dtype: torch.dtype,
    is_plain: bool = False,
    is_post: bool = False,
    ffn_dim: int = 64,
    quantization: Quantization | None = None,
) -> tuple[Layer, Layer, Layer]:
    """One layer with random weights: as one call, as calls of its parts, and in float32."""
    config = OPTConfig(
        vocab_size=8, hidden_size=width, num_hidden_layers=1, ffn_dim=ffn_dim, num_attention_heads=heads,
        enable_bias=not is_plain, layer_norm_elementwise_affine=not is_plain, do_layer_norm_before=not is_post,
    )  # fmt: skip
    block = Layer(config, 0).requires_grad_(False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    block = block.to(dtype)
    exact = copy.deepcopy(block).float()
    for linear in (block.qkv, block.out_proj, block.fc1, block.fc2):
        linear.pack(quantization)
    for linear in exact.modules():
        if quantization and isinstance(linear, Linear):
            scales = linear.weight.abs().amax(dim=1, keepdim=True) / 127
            linear.weight.copy_((linear.weight / scales).round() * scales)
    parts = copy.copy(block)
    block.fuse(None)
    assert block.kernel is not None
    assert parts.kernel is None
    return block, parts, exact
