"""Packed products in models of transformers: the same results, no weight in memory twice, and what is left alone."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from skipdecode.backends.device import backend_on
from skipdecode.checkpoint.weights import load_model
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import Linear
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.schedules.schedule import FullDepth
from tests.support.cpu_backends import Kind, backend, int8_backend, kind, nearest
from tests.support.wrapped_models import VOCAB, L, save

__all__ = ["backend", "int8_backend", "kind"]
TOLERANCE = {None: {torch.float32: 1e-5, torch.bfloat16: 3e-2}, "int8": {torch.bfloat16: 6e-2}}
TOLERANCE["int4"] = {torch.float32: 4e-2, torch.bfloat16: 6e-2}
"""Of the distance of logits, relative to their norm; for int4, whose inputs have 8 bits, to those of its weights."""
ROWS, TOKENS = 3, 7


def load(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **others: object) -> WrappedDecoder:
    save(kind, folder, **others)
    model = load_model(folder, dtype=dtype, implementation="transformers")
    assert isinstance(model, WrappedDecoder)
    return model


@torch.inference_mode()
def states_of(model: Decoder) -> Tensor:
    """[B, D] behind the last layer, of a prompt and a step behind it."""
    ids = torch.arange(ROWS * (TOKENS + 1)).view(ROWS, -1) * 31 % VOCAB
    num_pad, full = torch.tensor([0, 2, 3]), FullDepth(L)
    cache = KVCache.allocate(model.config, num_pad=num_pad, capacities=[TOKENS + 1] * L, dtype=model.dtype)
    positions = (torch.arange(TOKENS) - num_pad[:, None]).clamp(min=-1)
    model(ids[:, :TOKENS], positions, cache, full.prefill())
    return model(ids[:, TOKENS:], cache.next_positions[:, None], cache, full.step(0))


def wanted_of(name: str, kind: Kind, folder: Path) -> Tensor:
    """`states_of` plain weights, or of what int4 makes of them."""
    dtype, quantization = kind
    exact = load(name, folder, dtype)
    for path, linear in exact.named_modules():
        if quantization == "int4" and type(linear) is nn.Linear:
            linear.weight = nn.Parameter(nearest(linear.weight, "int4", is_head=path.endswith("lm_head")))
    return states_of(exact)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float(((found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)).max())


@pytest.mark.parametrize("name", ["olmo2", "gemma2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_logits_are_those_of_plain_weights(name: str, kind: Kind, tmp_path: Path) -> None:
    """Of a plain head, of one with a soft cap, and beside experts."""
    dtype, quantization = kind
    model, wanted = load(name, tmp_path, dtype), wanted_of(name, kind, tmp_path)
    assert model.pack(quantization) is model
    assert model.is_packed
    found = states_of(model)
    assert found.dtype == dtype
    if name == "qwen3_moe" and dtype != torch.float32:
        return  # a token near the border between two experts may go to the other one
    assert distance(found, wanted) < TOLERANCE[quantization][dtype]


@pytest.mark.parametrize(
    ("name", "is_plain"), [("olmo2", True), ("gemma2", False), ("phi", False), ("cohere", False), ("gpt_neox", True)]
)
def test_heads_give_the_most_likely_token(name: str, is_plain: bool, tmp_path: Path) -> None:
    """By the fused argmax where logits are nothing but a product: no soft cap (Gemma 2), bias (Phi) or scale
    (Cohere)."""
    model = load(name, tmp_path)
    h = torch.randn(ROWS, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model.head(h)
        model.pack()
        assert (model.packed_head is not None) == is_plain
        torch.testing.assert_close(model.head(h), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.head_into(h, torch.empty(ROWS, VOCAB)), wanted, rtol=1e-4, atol=1e-4)
        assert model.argmax(h).tolist() == wanted.argmax(dim=-1).tolist()
        allowed = torch.full((ROWS, -(-VOCAB // 32)), 0b10, dtype=torch.int32)  # every 32nd token, from 1 on
        assert model.argmax(h, allowed).tolist() == (32 * wanted[:, 1::32].argmax(dim=-1) + 1).tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_there_twice(tied: bool, tmp_path: Path) -> None:
    """But that of a head that is tied to the embedding, as in our own families."""
    model = load("olmo2", tmp_path, tie_word_embeddings=tied)
    plain = [weakref.ref(one.weight) for one in model.modules() if type(one) is nn.Linear]
    embedding = model.model.get_input_embeddings().weight
    model.pack()
    gc.collect()
    left = [weight for one in plain if (weight := one()) is not None]
    assert len(plain) == 7 * L + 1
    assert [weight is embedding for weight in left] == [True] * tied
    assert model.packed is not None
    assert (model.packed.num_packed, model.packed.num_linears) == (len(plain), len(plain))
    assert model.pack() is model


def test_what_the_model_reads_by_itself_is_left(tmp_path: Path) -> None:
    """And what two of its modules share."""
    model = load("olmo2", tmp_path)
    layers = model.hollow.layers

    class Reader(type(layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.down_proj.weight.dtype))

    for layer in layers:
        layer.mlp.__class__ = Reader
    layers[1].self_attn.o_proj.weight = layers[0].self_attn.o_proj.weight
    wanted = states_of(model)
    model.pack()
    assert distance(states_of(model), wanted) < TOLERANCE[None][torch.float32]
    left = {name for name, one in model.model.named_modules() if type(one) is nn.Linear}
    shared = {f"model.layers.{number}.self_attn.o_proj" for number in (0, 1)}
    assert left == {f"model.layers.{number}.mlp.down_proj" for number in range(L)} | shared
    assert model.packing == f"{6 * L - 1} of {7 * L + 1} linear layers are packed, the rest is torch's"


def test_experts_and_routers_stay_as_they_are(tmp_path: Path) -> None:
    model = load("qwen3_moe", tmp_path)
    before = {name: one.data_ptr() for name, one in model.model.named_parameters() if one.dim() == 3}
    model.pack()
    assert len(before) == 2 * L
    assert before == {name: one.data_ptr() for name, one in model.model.named_parameters() if one.dim() == 3}
    assert model.packed is not None
    assert model.packed.num_packed == 4 * L + 1


def test_int8_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    model = load("olmo2", tmp_path)
    with pytest.raises(ValueError, match="quantization: int8 weights are for bfloat16 on CPUs, and this is float32"):
        model.pack("int8")
    assert not model.is_packed
    assert model.packing is None


def test_int8_takes_what_is_in_the_models_type(int8_backend: str, tmp_path: Path) -> None:
    """A layer in float32 beside it is packed as it is."""
    assert backend_on(torch.device("cpu")).dtype == "bfloat16", int8_backend
    model = load("olmo2", tmp_path, torch.bfloat16)

    class InFloat32(type(model.hollow.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(x.dtype)

    block = model.hollow.layers[0].mlp
    block.__class__ = InFloat32
    block.float()
    wanted = states_of(model)
    model.pack("int8")
    assert isinstance(block.down_proj, Linear)
    assert block.down_proj.packed is not None
    assert distance(states_of(model), wanted) < TOLERANCE["int8"][torch.bfloat16]
