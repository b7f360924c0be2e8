"""The decoder: the weights of a model of any family, and its forward call: embedding, the layer loop, the LM head.

At full depth it is numerically the Hugging Face model of the family in eval mode. The loop over layers is in
`layer_loop`, a layer in `layer`, and reading and saving weights in `skipdecode.checkpoint.weights`.

B rows, T new tokens, D width, E embedding width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import FusedLayer, PackedWeight
from skipdecode.backends.block_quantization import StoredBlocks
from skipdecode.backends.device import backend_on, check_kernels
from skipdecode.backends.fp8 import FP8
from skipdecode.backends.rope import RotaryTables, rotary_tables
from skipdecode.config.model import WEIGHT_BYTES, DecoderConfig, KVCacheDtype, Quantization, SwiftKVConfig
from skipdecode.kv.static_cache import KVCache, PackedPromptsView, PaddedView
from skipdecode.kv.view import KVView
from skipdecode.model.ffn_executor import ALL_ROWS, FFNExecutor
from skipdecode.model.kv_scales import scale_keys_and_values, why_no_scales
from skipdecode.model.layer import Layer, make_norm
from skipdecode.model.layer_loop import run_layers, run_placed
from skipdecode.model.linear import Linear, pack_head, product
from skipdecode.model.pipeline_parallel import Placement, in_phases
from skipdecode.model.sampler import argmax, mask
from skipdecode.model.swiftkv import SwiftKV
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.layer_ranges import LayerRanges


class Decoder(nn.Module):
    """A decoder-only model of the family and shape that `config` gives."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, embed = config.hidden_size, config.embed_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, embed)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings + config.position_offset, width)
            if config.rope is None
            else None
        )
        self.project_in = nn.Linear(embed, width, bias=False) if embed != width else None
        self.project_out = nn.Linear(width, embed, bias=False) if embed != width else None
        self.blocks = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.final_norm = make_norm(config, width) if config.has_final_norm else None
        self.lm_head = None if config.has_tied_head else nn.Linear(embed, config.vocab_size, bias=False)
        has_shared = config.swiftkv is not None and config.swiftkv.num_shared(config) > 0
        self.swiftkv = SwiftKV(config) if has_shared else None
        self.placement: Placement | None = None
        """The device of each layer, if they are on several."""
        self.head_blocks: StoredBlocks | None = None
        """What a file has of the LM head's weight, until it is packed as int4 (`Linear.blocks`)."""
        self.packed_head: PackedWeight | None = None
        """The LM head's weight in the layout of the back end; None if it is not packed."""
        self._rotations: dict[torch.device, RotaryTables] = {}
        self.quantization: Quantization | None = None
        """The quantization of packed weights."""
        self.has_fp8_cache = False
        """Keys and values are stored in FP8, and the weights have their scales (`skipdecode.model.kv_scales`)."""

    def pack(self, quantization: Quantization | None = None, kv_cache_dtype: KVCacheDtype = "auto") -> "Decoder":
        """Lays weights out as the device's back end reads them (`skipdecode.model.linear`), in place; returns the
        model.

        From then on the model can only decode: it cannot be trained, saved, copied or converted. A tied embedding stays
        beside the packed copy that the LM head uses. Nothing happens where the back end packs nothing; `quantization`
        is then a ValueError. `kv_cache_dtype`: the type of keys and values; ValueError where the back end does not
        take it.
        """
        wants_fp8_cache = kv_cache_dtype == "fp8"
        if self.is_packed:
            assert (quantization, wants_fp8_cache) == (self.quantization, self.has_fp8_cache), "packed already"
            return self
        if wants_fp8_cache:
            self._use_fp8_cache()
        check_kernels(self.config, self.dtype, self.device, self.kv_dtype, quantization)
        backend, linears = backend_on(self.device), [m for m in self.modules() if isinstance(m, Linear)]
        backend.check(self.head_weight, quantization)  # check everything before packing anything
        for linear in linears:
            backend.check(linear.weight, quantization, is_gated=linear.is_gated)
        has_blocks = self.head_blocks is not None or any(linear.blocks is not None for linear in linears)
        assert quantization == "int4" or not has_blocks, "loaded to be packed as int4"
        self.packed_head = pack_head(self.head_weight, quantization, self.head_blocks)
        self.head_blocks = None
        if self.lm_head is not None and self.packed_head is not None:
            self.lm_head.register_parameter("weight", None)
        for linear in linears:
            linear.pack(quantization)
        if self.swiftkv is not None:
            self.swiftkv.pack(quantization, self.layers, self.rotary_tables)
        for i, layer in enumerate(self.layers):
            query = self.swiftkv.query(i) if self.swiftkv is not None and i >= self.swiftkv.first else None
            layer.fuse(self.rotary_tables_on(self.device_of(i))[i], query)
        self.quantization = quantization
        return self

    def _use_fp8_cache(self) -> None:
        """Stores keys and values in FP8 from now on; ValueError where that is not supported."""
        problem = backend_on(self.device).why_no_fp8(self.device) or why_no_scales(self.config)
        if problem is None and self.dtype not in (torch.bfloat16, torch.float32):
            problem = f"scales would round the weights of {str(self.dtype).removeprefix('torch.')}; bfloat16 has room"
        if problem is not None:
            raise ValueError(f"model.kv_cache_dtype: no keys and values in fp8 here: {problem}; auto stores them as is")
        if not self.has_fp8_cache:
            scale_keys_and_values(self.config, self.layers, self.swiftkv)
            self.has_fp8_cache = True

    def with_swiftkv(self, kv_layers: int, group_size: int = 1) -> "Decoder":
        """A model that shares these weights and adds those of SwiftKV, initialised from them
        (`SwiftKV.copy_teacher`)."""
        other = self._with(SwiftKVConfig(kv_layers, group_size))
        if other.swiftkv is not None:
            other.swiftkv.to(dtype=self.dtype).to_empty(device=self.device)
            other.swiftkv.copy_teacher(self.layers)
        return other

    def without_swiftkv(self) -> "Decoder":
        """A model that shares these weights and has no SwiftKV."""
        return self._with(None)

    def _with(self, shape: SwiftKVConfig | None) -> "Decoder":
        """A model that shares these weights, with uninitialised SwiftKV weights of that shape, or without any."""
        assert not self.is_packed, "packed weights cannot be shared"
        with torch.device("meta"):
            other = Decoder(replace(self.config, swiftkv=shape))
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("swiftkv.")}
        other.load_state_dict(own, strict=False, assign=True)
        return other.eval().requires_grad_(False)

    @property
    def is_packed(self) -> bool:
        return any(isinstance(module, Linear) and module.packed is not None for module in self.modules())

    @property
    def packing(self) -> str | None:
        """What of the weights is packed, for people; None if that goes without saying."""
        return None

    @property
    def max_prefill_tokens(self) -> int:
        """The most prompt tokens that go through the model at once (`Backend.max_prefill_tokens`)."""
        return backend_on(self.device).max_prefill_tokens(self._fused, self.device)

    @property
    def supports_shared_prefix(self) -> bool:
        """True if rows can read one copy of a prefix that they share (`Backend.supports_shared_prefix`)."""
        return self.placement is None and backend_on(self.device).supports_shared_prefix(self._fused)

    @property
    def is_batch_invariant(self) -> bool:
        """True if a token's logits are bitwise the same whatever else is in the batch."""
        by_kernels = self.project_in is None and product(self.packed_head, None) is not None
        return by_kernels and self.placement is None and backend_on(self.device).is_batch_invariant(self._fused)

    def supports_packed_prompts(self, memory: Tensor) -> bool:
        """True if prompts can be fed without padding into a cache like `memory` [B, G, S, K]."""
        return self.placement is None and backend_on(self.device).supports_packed_prompts(self._fused, memory)

    @property
    def why_padded(self) -> str | None:
        """Why prompts are fed with padding, which without it takes less time (`Backend.why_padded`); None if they have
        none, or if there is no other way here."""
        if self.placement is not None:
            return None
        return backend_on(self.device).why_padded(self._fused, self.dtype, self.device)

    @property
    def _fused(self) -> list[FusedLayer | None]:
        """[L] the back end's kernel of each layer; None for layers that run as separate operators."""
        return [layer.kernel for layer in self.layers]

    @property
    def weight_itemsize(self) -> float:
        """Bytes per weight that a matrix product reads."""
        return self.dtype.itemsize if self.quantization is None else WEIGHT_BYTES[self.quantization]

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a number of keys and values in caches."""
        return self.kv_dtype.itemsize

    @property
    def has_matrix_units(self) -> bool:
        """True if matrix products run on matrix units."""
        return backend_on(self.device).has_matrix_units

    @property
    def layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.blocks))

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values in caches."""
        return FP8 if self.has_fp8_cache else self.dtype

    @property
    def rotary_tables(self) -> RotaryTables:
        """The rotary tables of all layers on the model's device."""
        return self.rotary_tables_on(self.device)

    def rotary_tables_on(self, device: torch.device) -> RotaryTables:
        if device not in self._rotations:
            with torch.inference_mode(False):  # a backward pass may need them
                self._rotations[device] = rotary_tables(self.config, device)
        return self._rotations[device]

    def device_of(self, layer: int) -> torch.device:
        return self.device if self.placement is None else self.placement.of_layers[layer]

    @property
    def head_weight(self) -> Tensor:
        """[V, E] the unpacked weight of the LM head, in a model that `has_unpacked_head`."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [...] int64 -> [..., D]. Position 0 is a row's first token, -1 is padding."""
        # A row that has got NO_TOKEN is fed until the host has read that.
        if tokens.dim() == 2 and tokens.shape[1] == 1:
            tokens = tokens.clamp(min=0)
        h: Tensor = self.embed_tokens(tokens)
        if (scale := self.config.embed_scale) != 1.0:
            h = h * float(torch.tensor(scale, dtype=h.dtype))  # rounded first, as transformers does
        if self.project_in is not None:
            h = self.project_in(h)
        if self.embed_positions is not None:
            h = h + self.embed_positions(positions + self.config.position_offset)
        return h

    def head(self, h: Tensor) -> Tensor:
        """Final norm and LM head: [..., D] -> logits [..., V]."""
        x = self.head_states(h)
        if self.packed_head is not None:
            return self.packed_head(x, None)
        logits: Tensor = F.linear(x, self.head_weight)
        return logits

    def head_into(self, h: Tensor, out: Tensor) -> Tensor:
        """`head` of [B, D], written to `out` [B, V] and returned. Not for training."""
        x = self.head_states(h)
        if self.packed_head is not None:
            return self.packed_head.into(x, out)
        return torch.mm(x, self.head_weight.t(), out=out)

    def argmax(self, h: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The most likely token, the lower id if two are equal: [B, D] -> [B] int64. Packed heads write no logits.
        `allowed` [B, ceil(V / 32)] int32: a bit for each token that a row may have; None: all."""
        if self.packed_head is not None:
            return self.packed_head.argmax(self.head_states(h), allowed)
        logits = self.head(h)
        return argmax(logits if allowed is None else mask(logits, allowed))

    @property
    def has_unpacked_head(self) -> bool:
        """True if the LM head has an unpacked weight, which a packed head has only if it is tied to the embedding."""
        return self.head_weight is not None

    def head_states(self, h: Tensor) -> Tensor:
        """Final norm and output projection: [..., D] -> the input [..., E] of the LM head."""
        if self.final_norm is not None:
            h = self.final_norm(h)
        if self.project_out is not None:
            h = self.project_out(h)
        return h

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        plan: LayerPlan,
        ffns: FFNExecutor = ALL_ROWS,
        *,
        return_argmax: bool = False,
        num_cached: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Feeds T tokens per row after those in `cache`, and stores their K/V: [B, T] int64 -> logits [B, V] of the
        last.

        `ffns` runs the batch's feed-forward blocks. `return_argmax`: return the most likely token [B] int64 instead.
        `num_cached` [B]: leading prompt tokens that are already cached, here or in a shared prefix; `tokens` are the
        rest. `lengths` [B]: how many of a prompt's `tokens` are no padding; None: not known on the host, or of no
        concern since the batch has a fixed shape, so that on a GPU prompts keep their padding.
        """
        T = tokens.shape[1]
        is_prompt = num_cached is not None or (T > 1 and cache.length == 0)
        ranges = LayerRanges.of_plan(plan, ffns.deferred(plan), is_prompt=is_prompt)
        if self.placement is not None:
            assert num_cached is None, "shared prefixes need all layers on one device"
            last = self._forward_pipelined(self.placement, tokens, positions, cache, ranges)
            cache.length += T
            return self.argmax(last) if return_argmax else self.head(last)
        kv: KVView = PaddedView(cache, positions, self.rotary_tables)
        knows_lengths = lengths is not None or backend_on(self.device).has_host_memory
        if ranges.last_token_from is not None and knows_lengths and self.supports_packed_prompts(cache.k[0]):
            kv = prompts = PackedPromptsView(cache, positions, self.rotary_tables, num_cached, lengths)
            tokens, positions = prompts.pack(tokens), prompts.pack(positions)  # then h is [N, D]
        h, kv = run_layers(self, self.embed(tokens, positions), kv, ranges, ffns=ffns)
        last = (h if h.dim() == 3 else kv.last(h)[0])[:, -1]
        cache.length += T
        return self.argmax(last) if return_argmax else self.head(last)

    def _forward_pipelined(
        self, placement: Placement, tokens: Tensor, positions: Tensor, cache: KVCache, ranges: LayerRanges
    ) -> Tensor:
        """`forward` over several devices, up to the LM head: [B, T] -> the last token's states [B, D], on the first
        device."""
        runs = []
        for rows, part in cache.parts(placement.num_parts):
            kv = PaddedView(part, positions[rows], self.rotary_tables)
            runs.append(run_placed(self, placement, self.embed(tokens[rows], positions[rows]), kv, ranges))
        return torch.cat([h[:, -1] for h, _ in in_phases(runs)])
