"""A `Decoder` whose layers are transformers' own.

Layers that do what ours do are kernels of the device's back end (`fused_layers`). In the others attention and products
go to it, and everything between them is torch's operators. What it cannot do yet is refused where a job is checked
(`pipeline.resolve_model`): several devices, fixed shapes of batches.

B rows, T tokens, D width, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from skipdecode.backends.backend import FusedLayer
from skipdecode.backends.rope import RotaryTables
from skipdecode.config.model import KVCacheDtype, Quantization, SwiftKVConfig
from skipdecode.config.wrapped import Sublayers, WrappedConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.kv.view import KVView, VariantView
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear
from skipdecode.model.wrapped.attention import Stored, attending
from skipdecode.model.wrapped.hollow_model import HollowModel
from skipdecode.model.wrapped.layer_kernels import Fused
from skipdecode.model.wrapped.packing import Packed, pack_linears
from skipdecode.model.wrapped.sublayers import leaving_out
from skipdecode.model.wrapped.swiftkv import WrappedSwiftKV, asking, find_attention
from skipdecode.schedules.schedule import FullDepth


class WrappedLayer(Layer):
    """A decoder layer of transformers, as the layer loop calls it."""

    def __init__(self, layer: nn.Module, hollow: HollowModel, number: int, sublayers: Sublayers | None) -> None:
        """`sublayers`: None if the layer runs whole or not at all."""
        nn.Module.__init__(self)  # it has none of the weights of ours
        self.layer, self.hollow, self.number, self.sublayers = layer, hollow, number, sublayers
        self.query_kernel = None
        self.fused = Fused()
        """Its kernels, once the model is packed."""

    @property
    def kernel(self) -> FusedLayer | None:  # type: ignore[override]
        return self.fused.layer

    def forward(
        self, h: Tensor, kv: KVView, number: int, *, attends: bool, runs_ffn: bool, query: Linear | None = None
    ) -> Tensor:
        if query is None and kv.has_kernels and self.fused != Fused():
            return self._run_fused(h.contiguous(), kv, number, attends=attends, runs_ffn=runs_ffn)
        if not attends:
            return self.add_feed(h) if runs_ffn else h
        with self._leaving_out(attention=False, feed_forward=not runs_ffn):
            if query is None:
                return _states(self._run(h, kv, number))
            with asking(self.attention, query):
                return _states(self._run(h, kv, number, is_stored=True))

    def _run_fused(self, h: Tensor, kv: KVView, number: int, *, attends: bool, runs_ffn: bool) -> Tensor:
        """`forward` by kernels, as far as there are any. They work in place."""
        whole, attention, feed_forward, _ = self.fused
        if whole is not None:
            return kv.run_fused([whole], h, [number], attends=attends, runs_ffn=runs_ffn)
        if attends and attention is not None:
            h = kv.run_fused([attention], h, [number], attends=True, runs_ffn=False)
            return self.add_feed(h) if runs_ffn else h
        if attends:
            with self._leaving_out(attention=False, feed_forward=feed_forward is not None or not runs_ffn):
                h = _states(self._run(h, kv, number))
        if not runs_ffn or (attends and feed_forward is None):
            return h
        if feed_forward is None:
            return self.add_feed(h)
        return kv.run_fused([feed_forward], h.contiguous(), [number], attends=False, runs_ffn=True)

    @cached_property
    def attention(self) -> nn.Module:
        """The module with the layer's projections, where SwiftKV needs them."""
        return find_attention(self.layer)

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
        if self.kernel is not None and self.kernel.store is not None and kv.stores_by_kernel:
            return kv.store_by_kernel(self.kernel.store, h, {0: number})
        with suppress(Stored):
            self._run(h, kv, number, only_stores=True)

    def _run(self, h: Tensor, kv: KVView, number: int, *, only_stores: bool = False, is_stored: bool = False) -> Any:
        view = cast(VariantView, kv)
        positional, named = self.hollow.arguments(view.positions)[number]
        with attending(view, number, only_stores=only_stores, is_stored=is_stored):
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
        self.placement = self.packed_head = self.quantization = self.lm_head = None
        self.packed: Packed | None = None
        """Which linear layers are packed, once `pack` has been called."""
        self.has_fp8_cache = False
        self.hollow = HollowModel(model, config.num_hidden_layers)
        # past nn.Module, for which each layer would be there twice
        parts = config.sublayers or [None] * config.num_hidden_layers
        self.__dict__["_layers"] = [
            WrappedLayer(layer, self.hollow, number, own)
            for number, (layer, own) in enumerate(zip(self.hollow.layers, parts, strict=True))
        ]

        has_shared = config.swiftkv is not None and config.swiftkv.num_shared(config) > 0
        self.swiftkv = WrappedSwiftKV(self.hollow.layers, cast(SwiftKVConfig, config.swiftkv)) if has_shared else None

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
    def packing(self) -> str | None:
        return None if self.packed is None else str(self.packed)

    @property
    def is_batch_invariant(self) -> bool:
        return False

    @property
    def has_unpacked_head(self) -> bool:
        return False

    def rotary_tables_on(self, device: torch.device) -> RotaryTables:
        return ()  # layers rotate by themselves

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if tokens.dim() == 1:  # packed prompts
            return self.hollow.embed(tokens[None], positions[None])[0]
        if tokens.shape[1] == 1:  # a row that has got NO_TOKEN is fed until the host has read that
            tokens = tokens.clamp(min=0)
        return self.hollow.embed(tokens, positions)

    def head_states(self, h: Tensor) -> Tensor:
        return self.hollow.head(h)

    def head(self, h: Tensor) -> Tensor:
        made = self.hollow.head(h)
        return made if self.packed_head is None else self.packed_head(made, None)

    def head_into(self, h: Tensor, out: Tensor) -> Tensor:
        if self.packed_head is None:
            return out.copy_(self.hollow.head(h))
        return self.packed_head.into(self.hollow.head(h), out)

    def pack(self, quantization: Quantization | None = None, kv_cache_dtype: KVCacheDtype = "auto") -> Decoder:
        """`Decoder.pack` of what `pack_linears` packs; the rest stays as it is."""
        if kv_cache_dtype != "auto":
            raise ValueError(f"model.kv_cache_dtype: {kv_cache_dtype} is for families with kernels of ours")
        if quantization == "fp8":
            raise ValueError("model.quantization: fp8 weights are for families with kernels of ours")
        if self.packed is not None:
            assert quantization == self.quantization, "packed already"
            return self
        self.packed = pack_linears(
            self.model,
            self.hollow,
            self.config,
            quantization,
            dtype=self.dtype,
            run=self._run_a_token,
            # SwiftKV puts modules of its own in place of projections; kernels of GPUs are tested with our families
            fuses=self.swiftkv is None and self.device.type == "cpu",
        )
        for layer, fused in zip(self.__dict__["_layers"], self.packed.fused, strict=False):
            layer.fused = fused
        if self.swiftkv is not None:
            self.swiftkv.pack(quantization, self.layers, ())
        self.packed_head, self.quantization = self.packed.head, quantization
        return self

    @torch.inference_mode()
    def _run_a_token(self) -> None:
        """At full depth, behind nothing."""
        full, num_pad = FullDepth(len(self.layers)), torch.zeros(1, dtype=torch.int64, device=self.device)
        cache = KVCache.allocate(self.config, num_pad=num_pad, capacities=[1] * len(self.layers), dtype=self.dtype)
        self(num_pad[:, None], num_pad[:, None], cache, full.step(0))

    def with_swiftkv(self, kv_layers: int, group_size: int = 1) -> Decoder:
        other = self._with(SwiftKVConfig(kv_layers, group_size))
        if other.swiftkv is not None:
            other.swiftkv.copy_teacher(self.layers)
        return other

    def _with(self, shape: SwiftKVConfig | None) -> Decoder:
        assert not self.is_packed, "packed weights cannot be shared"
        return WrappedDecoder(self.model, replace(self.config, swiftkv=shape)).eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        return super().train(False)  # no dropout, as in our own layers
