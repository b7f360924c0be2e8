"""A `Decoder` whose layers are transformers' own.

It decodes by torch's operators. What it cannot do yet is refused where a job is checked (`pipeline.resolve_model`):
SwiftKV, quantization, several devices, fixed shapes of batches.

B rows, T tokens, D width, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from skipdecode.backends.rope import RotaryTables
from skipdecode.config.model import KVCacheDtype, Quantization
from skipdecode.config.wrapped import Sublayers, WrappedConfig
from skipdecode.kv.view import KVView, VariantView
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear
from skipdecode.model.wrapped.attention import Stored, attending
from skipdecode.model.wrapped.hollow_model import HollowModel
from skipdecode.model.wrapped.sublayers import leaving_out


class WrappedLayer(Layer):
    """A decoder layer of transformers, as the layer loop calls it."""

    def __init__(self, layer: nn.Module, hollow: HollowModel, number: int, sublayers: Sublayers | None) -> None:
        """`sublayers`: None if the layer runs whole or not at all."""
        nn.Module.__init__(self)  # it has none of the weights of ours
        self.layer, self.hollow, self.number, self.sublayers = layer, hollow, number, sublayers
        self.kernel = self.query_kernel = None

    def forward(
        self, h: Tensor, kv: KVView, number: int, *, attends: bool, runs_ffn: bool, query: Linear | None = None
    ) -> Tensor:
        if query is not None:
            raise ValueError("prefill.method: layers of transformers have no queries of SwiftKV")
        if not attends:
            return self.add_feed(h) if runs_ffn else h
        with self._leaving_out(attention=False, feed_forward=not runs_ffn):
            return _states(self._run(h, kv, number, only_stores=False))

    def add_feed(self, h: Tensor) -> Tensor:
        with self._leaving_out(attention=True, feed_forward=False):
            # what attention alone would have used
            positional, named = self.hollow.newest_arguments(self.number)
            return _states(self.layer(h, *positional, **named))

    def post_norm(self, h: Tensor) -> Tensor:
        return h  # a layer with a norm behind its blocks runs whole

    def _leaving_out(self, *, attention: bool, feed_forward: bool) -> AbstractContextManager[None]:
        if not (attention or feed_forward):
            return nullcontext()
        assert self.sublayers is not None, "layers that run whole or not at all"
        return leaving_out(self.layer, self.sublayers, attention=attention, feed_forward=feed_forward)

    def store(self, h: Tensor, kv: KVView, number: int) -> None:
        with suppress(Stored):
            self._run(h, kv, number, only_stores=True)

    def _run(self, h: Tensor, kv: KVView, number: int, *, only_stores: bool) -> Any:
        view = cast(VariantView, kv)
        positional, named = self.hollow.arguments(view.positions)[number]
        with attending(view, number, only_stores=only_stores):
            return self.layer(h, *positional, **named)


def _states(made: Any) -> Tensor:
    """Of what a layer of transformers gives."""
    states: Tensor = made[0] if isinstance(made, tuple) else made
    return states


class WrappedDecoder(Decoder):
    """Around a `...ForCausalLM` that was made with `attn_implementation=ATTENTION`."""

    config: WrappedConfig

    def __init__(self, model: Any, config: WrappedConfig) -> None:
        nn.Module.__init__(self)  # it has none of the weights of ours
        self.config = config
        self.model: Any = model
        self.placement = self.packed_head = self.quantization = self.swiftkv = self.lm_head = None
        self.has_fp8_cache = False
        self.hollow = HollowModel(model, config.num_hidden_layers)
        # past nn.Module, for which each layer would be there twice
        parts = config.sublayers or [None] * config.num_hidden_layers
        self.__dict__["_layers"] = [
            WrappedLayer(layer, self.hollow, number, own)
            for number, (layer, own) in enumerate(zip(self.hollow.layers, parts, strict=True))
        ]

    @property
    def layers(self) -> list[Layer]:
        layers: list[Layer] = self.__dict__["_layers"]
        return layers

    @property
    def _any_weight(self) -> Tensor:
        weight: Tensor = next(self.model.parameters())
        return weight

    @property
    def device(self) -> torch.device:
        return self._any_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._any_weight.dtype

    @property
    def is_batch_invariant(self) -> bool:
        return False

    @property
    def has_unpacked_head(self) -> bool:
        return False

    def rotary_tables_on(self, device: torch.device) -> RotaryTables:
        return ()  # layers rotate by themselves

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if tokens.shape[1] == 1:  # a row that has got NO_TOKEN is fed until the host has read that
            tokens = tokens.clamp(min=0)
        return self.hollow.embed(tokens, positions)

    def head(self, h: Tensor) -> Tensor:
        return self.hollow.head(h)

    def head_into(self, h: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self.head(h))

    def pack(self, quantization: Quantization | None = None, kv_cache_dtype: KVCacheDtype = "auto") -> Decoder:
        if kv_cache_dtype != "auto":
            raise ValueError(f"model.kv_cache_dtype: {kv_cache_dtype} is for families with kernels of ours")
        if quantization is not None:
            raise ValueError(f"model.quantization: {quantization} weights are for families with kernels of ours")
        return self

    def with_swiftkv(self, kv_layers: int, group_size: int = 1) -> Decoder:
        raise ValueError("model.swiftkv: a model of transformers' implementation cannot have it yet")

    def without_swiftkv(self) -> Decoder:
        return self

    def train(self, mode: bool = True) -> Self:
        return super().train(False)  # no dropout, as in our own layers
