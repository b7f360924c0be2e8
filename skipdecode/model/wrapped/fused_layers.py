"""Layers of transformers, whole or by halves, as the kernels that run layers of ours (`Backend.fuse`).

Whether a kernel computes what a layer does is not guessed from names but found by running both: with small random
weights in float32 in place of the layer's own, and everything else of it as it is. So scales, clamps, other activations
and other rotary positions show, whatever its code looks like. Norms are looked at by themselves (`norms`).

B rows, T tokens, D width, H query heads, G key/value heads, K head dim, P positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from skipdecode.backends.backend import FusedLayer, LayerShape
from skipdecode.backends.rope import apply_rotary, rotation_at
from skipdecode.config.model import FeedForwardKind, Quantization
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.kv.static_cache import KVCache, PackedPromptsView, PaddedView
from skipdecode.kv.view import AttentionVariant, MaskRule, VariantView
from skipdecode.model.linear import Linear
from skipdecode.model.wrapped.attention import Stored, attending
from skipdecode.model.wrapped.hollow_model import Arguments, HollowModel
from skipdecode.model.wrapped.layer_kernels import (
    IDLE,
    Block,
    Fused,
    half_of,
    idle_half,
    kernel_of,
    pack_halves,
    replace_module,
    swapped,
)
from skipdecode.model.wrapped.norms import Norm, norm_of
from skipdecode.model.wrapped.sublayers import leaving_out
from skipdecode.model.wrapped.wiring import Attention, FeedForward, Wiring, gated_blocks, wiring_of

WIDTH = INNER = 64
"""Of states and feed-forward blocks in the proof; heads have their own width."""
LENGTHS = (5, 2, 4)
"""Tokens of the prompts of the proof."""
TOLERANCE = 2e-5
"""Of the distance between what a kernel and a layer make, relative to its norm, in float32."""
LARGE = 30.0
"""The factor of some activations in the proof, so that clamps show."""
FAR = 12
"""Positions of the proof that go up to the last one."""
CHUNK = 4096  # positions whose rotations are asked for at a time


Found = TypeVar("Found")


class _Given:
    """A view that notes what attention is given, and ends the layer."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.given: list[Tensor] = []

    def attend(
        self, _layer: int, q: Tensor, k: Tensor, v: Tensor, _variant: AttentionVariant | None = None
    ) -> NoReturn:
        self.given = [q, k, v]
        raise Stored


class LayerFuser:
    """Makes kernels of the layers of a model."""

    def __init__(
        self, hollow: HollowModel, config: WrappedConfig, calls: Sequence[Sequence[str]], dtype: torch.dtype
    ) -> None:
        """`calls`: the modules that each layer calls (`wiring.noting_calls`). `dtype`: of the model's weights."""
        self._hollow, self._config, self._calls, self._dtype = hollow, config, calls, dtype
        columns = max(LENGTHS)
        self._num_pad = columns - torch.tensor(LENGTHS)
        self._positions = (torch.arange(columns) - self._num_pad[:, None]).clamp(min=-1)
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randn(len(LENGTHS), columns, WIDTH, generator=generator)
        self._step = torch.randn(len(LENGTHS), 1, WIDTH, generator=generator)

    def fuse(self, number: int, quantization: Quantization | None, may_pack: Callable[[nn.Linear], bool]) -> Fused:
        """Kernels of a layer, with its weights packed in place. Of what is in none, norms and gated blocks become ours.
        `may_pack`: of which linear layers."""
        if idle_half(WIDTH, self._dtype, quantization, 1).first.product() is None:  # no kernels for this type
            return Fused()
        layer = self._hollow.layers[number]
        blocks = list(gated_blocks(layer, self._calls[number]))
        can_fuse = bool(self._config.sublayers) and not self._are_given_tokens[number]
        fused = self._fuse_halves(number, quantization, may_pack) if can_fuse else Fused()
        linears = list(fused.linears)
        for own in blocks:
            if own.out not in fused.linears and self._replace_block(layer, own, quantization, may_pack):
                linears += own.linears
        replace_norms(layer)
        return fused._replace(linears=tuple(linears))

    def _fuse_halves(
        self, number: int, quantization: Quantization | None, may_pack: Callable[[nn.Linear], bool]
    ) -> Fused:
        kv_heads, head_dim, _ = self._config.kv_shape(number)
        try:
            wiring, shape = self._prove(number, may_pack)
            return pack_halves(
                self._hollow.layers[number], wiring, shape, self._dtype, kv_heads * head_dim, quantization
            )
        except ValueError:  # int8 weights need widths in other multiples
            return Fused()

    def _replace_block(
        self,
        layer: nn.Module,
        own: FeedForward,
        quantization: Quantization | None,
        may_pack: Callable[[nn.Linear], bool],
    ) -> bool:
        """Whether the block is gated as ours are, and now is one of ours."""
        modules = dict(layer.named_modules())
        if not self._takes_weights(own, modules, may_pack):
            return False
        instead = _stand_ins(Wiring(feed_forward=own), modules, 0)
        kind: FeedForwardKind | None = _unless_it_fails(partial(_kind_of_block, layer, own, instead))
        if kind is None:
            return False
        try:
            half = half_of(own, modules, quantization, is_gated=True)
        except ValueError:
            return False
        if None in (half.first.packed, half.second.packed):
            return False
        replace_module(layer, own.block, Block(*half, kind))
        for name in own.linears:
            modules[name].register_parameter("weight", None)
        return True

    @torch.inference_mode()
    def _prove(self, number: int, may_pack: Callable[[nn.Linear], bool]) -> tuple[Wiring, LayerShape]:
        """The wiring of what is as in layers of ours, and its shape."""
        layer, (kv_heads, head_dim, v_dim) = self._hollow.layers[number], self._config.kv_shape(number)
        wiring = wiring_of(
            layer, self._calls[number], self._config.sublayers[number], self._config.hidden_size, head_dim
        )
        modules = dict(layer.named_modules())
        attention, feed_forward = wiring.attention, wiring.feed_forward

        def is_taken(half: Attention | FeedForward) -> bool:
            return self._takes_weights(half, modules, may_pack) and self._takes_norms(half, wiring.norms)

        if attention is None or head_dim != v_dim or not is_taken(attention):
            attention = None
        if feed_forward is None or not is_taken(feed_forward):
            feed_forward = None
        norm = next(iter(wiring.norms.values()), Norm("rms", 0.0))
        shape = LayerShape(1, 1, IDLE, norm.epsilon, norm=norm.kind)
        wiring = replace(wiring, attention=attention, feed_forward=feed_forward)
        instead = _stand_ins(wiring, modules, kv_heads * head_dim)
        with swapped(layer, instead):
            if attention is not None:
                heads = cast(nn.Linear, modules[attention.out]).in_features // head_dim
                asked = replace(shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
                found = _unless_it_fails(partial(self._prove_attention, number, attention, asked, instead))
                attention, shape = (None, shape) if found is None else (attention, found)
            if feed_forward is not None:
                found = _unless_it_fails(partial(self._prove_feed_forward, number, feed_forward, shape, instead))
                feed_forward, shape = (None, shape) if found is None else (feed_forward, found)
        return replace(wiring, attention=attention, feed_forward=feed_forward), shape

    def _takes_weights(
        self, half: Attention | FeedForward, modules: Mapping[str, nn.Module], may_pack: Callable[[nn.Linear], bool]
    ) -> bool:
        linears = [cast(nn.Linear, modules[name]) for name in half.linears]
        return all(may_pack(linear) and linear.weight.dtype == self._dtype for linear in linears)

    def _takes_norms(self, half: Attention | FeedForward, norms: Mapping[str, Norm]) -> bool:
        """Whether a kernel can have them: in the model's type, with one epsilon, and RMS norms of heads."""
        kind = next(iter(norms.values()))
        heads = half.head_norms if isinstance(half, Attention) else ()
        return all(
            norms[name].epsilon == kind.epsilon
            and norms[name].kind == ("rms" if name in heads else kind.kind)
            and all(own.dtype == self._dtype for own in norms[name].parameters())
            for name in half.norms
        )

    def _prove_attention(
        self, number: int, own: Attention, shape: LayerShape, instead: Mapping[str, nn.Module]
    ) -> LayerShape | None:
        """The shape with which a kernel does what the layer does up to its first residual."""
        wanted, variants = self._run_layer(number, attends=True)
        window = self._window_of(variants, shape)
        half, idle = half_of(own, instead, None, is_gated=False), partial(idle_half, WIDTH, torch.float32, None)
        for table in self._tables[number]:
            found = replace(shape, rotary_table=table, window=window)
            kernel = kernel_of(found, instead, (own, half), None, idle)
            if kernel is None or not _agree(self._run_kernel(kernel, number, attends=True), wanted):
                continue
            return found if self._agrees_far(number, own, found, half.first, instead) else None
        return None

    def _agrees_far(
        self, number: int, own: Attention, shape: LayerShape, joined: Linear, instead: Mapping[str, nn.Module]
    ) -> bool:
        """Whether attention is given what a kernel makes at any position: some models scale queries by it."""
        view = _Given(torch.linspace(0, self._config.max_position_embeddings - 1, FAR).long()[None])
        h = torch.randn(1, FAR, WIDTH, generator=torch.Generator().manual_seed(1))
        positional, named = self._hollow.arguments(view.positions)[number]
        with attending(cast(VariantView, view), number, only_stores=False), suppress(Stored):
            self._hollow.layers[number](h, *positional, **named)
        sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        made = [
            part.view(1, FAR, -1, shape.head_dim).transpose(1, 2)
            for part in torch.split(joined(instead[own.norm](h)), sizes, dim=-1)
        ]
        rotation = rotation_at(shape.rotary_table, view.positions)
        for at, name in enumerate(own.head_norms):
            made[at] = instead[name](made[at])
        # cosines of the same position may differ in their last bit, which is a large one in 16 bits
        tolerance = max(TOLERANCE, torch.finfo(self._dtype).eps)
        return _agree(view.given, [*(apply_rotary(x, rotation) for x in made[:2]), made[2]], tolerance)

    def _prove_feed_forward(
        self, number: int, own: FeedForward, shape: LayerShape, instead: Mapping[str, nn.Module]
    ) -> LayerShape | None:
        """The shape with which a kernel does what the rest of the layer does."""
        wanted, _ = self._run_layer(number, attends=False)
        half, idle = (
            half_of(own, instead, None, is_gated=bool(own.block)),
            partial(idle_half, WIDTH, torch.float32, None),
        )
        for kind in own.kinds:
            made = replace(shape, mlp=kind)
            kernel = kernel_of(made, instead, None, (own, half), idle)
            if kernel is None or not _agree(self._run_kernel(kernel, number, attends=False), wanted):
                continue
            if own.block:  # which is replaced, so that nothing else may depend on what it was
                with swapped(self._hollow.layers[number], {own.block: Block(*half, kind)}):
                    found, _ = self._run_layer(number, attends=False)
                if not _agree(found, wanted):
                    continue
            return made
        return None

    def _run_layer(self, number: int, *, attends: bool) -> tuple[list[Tensor], list[AttentionVariant | None]]:
        """What a half of the layer makes of prompts, and of a step behind them; keys and values, too. And how its
        attention differs from ours."""
        layer, parts, cache = self._hollow.layers[number], self._config.sublayers[number], self._cache(number)
        made, variants = list[Tensor](), list[AttentionVariant | None]()
        for h, positions in ((self._prompt, self._positions), (self._step, self._next_positions)):
            view = PaddedView(cache, positions, ())
            positional, named = self._hollow.arguments(view.positions)[number]
            with (
                leaving_out(layer, parts, attention=not attends, feed_forward=attends),
                attending(view, number, only_stores=False) as call,
            ):
                states = layer(h.clone(), *positional, **named)
            made.append(states[0] if isinstance(states, tuple) else states)
            variants.append(call.variant)
            cache.length += h.shape[1]
        prompt, step = made
        return [prompt[self._positions >= 0], step, *(self._stored(cache, number) if attends else ())], variants

    def _run_kernel(self, kernel: FusedLayer, number: int, *, attends: bool) -> list[Tensor]:
        """What a kernel makes of the same."""
        cache, how = self._cache(number), {"attends": attends, "runs_ffn": not attends}
        view = PackedPromptsView(cache, self._positions, ())
        prompt = view.run_fused([kernel], view.pack(self._prompt), [number], **how)
        cache.length += self._prompt.shape[1]
        step = PaddedView(cache, self._next_positions, ()).run_fused([kernel], self._step.clone(), [number], **how)
        return [prompt, step, *(self._stored(cache, number) if attends else ())]

    @cached_property
    def _next_positions(self) -> Tensor:
        return torch.tensor(LENGTHS)[:, None]

    def _cache(self, number: int) -> KVCache:
        columns = self._prompt.shape[1] + 1
        capacities = [columns if layer == number else 1 for layer in range(self._config.num_hidden_layers)]
        return KVCache.allocate(
            self._config, num_pad=self._num_pad, capacities=capacities, dtype=torch.float32, force_mask=True
        )

    def _stored(self, cache: KVCache, number: int) -> Iterator[Tensor]:
        """Keys and values of all columns that are no padding."""
        is_real = torch.arange(self._prompt.shape[1] + 1) >= self._num_pad[:, None]
        for memory in (cache.k[number], cache.v[number]):
            yield memory.transpose(1, 2)[is_real]

    def _window_of(self, variants: Sequence[AttentionVariant | None], shape: LayerShape) -> int | None:
        """The window of attention that is ours; ValueError if it is not."""
        last = variants[-1]
        if last is None:
            return None
        if last.softcap is not None or last.sinks is not None or last.scale != shape.head_dim**-0.5:
            raise ValueError("attention that no kernel takes")
        return None if last.rule is None else window_by(last.rule, self._config.max_position_embeddings)

    @cached_property
    def _are_given_tokens(self) -> list[bool]:
        """[L] whether what a layer is given beside the states follows from tokens, which no kernel is given."""
        positions, given = torch.arange(2)[None], list[Sequence[Arguments]]()
        for token in (0, 1):
            self._hollow.embed(torch.full_like(positions, token), positions)
            given.append([self._hollow.newest_arguments(number) for number in range(len(self._calls))])
        return [not _are_same(one, other) for one, other in zip(*given, strict=True)]

    @cached_property
    def _tables(self) -> list[list[Tensor | None]]:
        """[L] the rotary tables that a layer may have, None for none."""
        positions = torch.arange(self._config.max_position_embeddings)
        given: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._hollow.layers]
        for chunk in torch.split(positions, CHUNK):
            for own, (_, named) in zip(given, self._hollow.arguments(chunk[None]), strict=True):
                match named.get("position_embeddings"):
                    case (Tensor() as cos, Tensor() as sin) if cos.shape == sin.shape and cos.shape[:-1] == (
                        1,
                        len(chunk),
                    ):
                        own.append((cos[0], sin[0]))
        made: dict[tuple[int, ...], list[Tensor | None]] = {}
        found = []
        for own in given:
            key = tuple(id(cos) for cos, _ in own)  # layers of one kind are given the same tensors
            if key not in made:
                made[key] = [*([_table(*map(torch.cat, zip(*own, strict=True)))] if own else []), None]
            found.append(made[key])
        return found


def _are_same(one: Any, other: Any) -> bool:
    """Whether all tensors in them are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return _are_same(tuple(one.items()), tuple(other.items()))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return True


def _table(cos: Tensor, sin: Tensor) -> Tensor:
    """[P, r] cosines and sines of each position, which may be there twice -> [P, r] float32 as kernels take it."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        cos, sin = cos[:, :half], sin[:, :half]
    return torch.cat([cos, sin], dim=1).float()


def window_by(rule: MaskRule, num_positions: int) -> int | None:
    """The window if the rule is nothing else, None if it is causal alone. ValueError otherwise."""
    keys, zero = torch.arange(num_positions), torch.zeros(1, dtype=torch.int64)

    def allowed(query: int) -> Tensor:
        return rule(zero, zero, torch.tensor([query]), keys).expand(num_positions)

    window = int(allowed(num_positions - 1).sum())
    edges = (0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, num_positions // 2, num_positions - 1)
    for query in {query for query in edges if 0 <= query < num_positions}:
        if not torch.equal(allowed(query), (keys <= query) & (keys > query - window)):
            raise ValueError("a mask that is no window")
    return window if window < num_positions else None


@torch.inference_mode()
def _kind_of_block(layer: nn.Module, own: FeedForward, instead: Mapping[str, nn.Module]) -> FeedForwardKind | None:
    """What a gated block of a layer does, with these linear layers."""
    x, half = (
        torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0)),
        half_of(own, instead, None, is_gated=True),
    )
    with swapped(layer, instead):
        wanted = layer.get_submodule(own.block)(x)
    return next((kind for kind in own.kinds if _agree([Block(*half, kind)(x)], [wanted])), None)


def replace_norms(layer: nn.Module) -> None:
    """Norms become one call each; theirs are several of torch's."""
    for name, module in list(layer.named_modules()):
        own = next(module.parameters(recurse=False), None)
        if own is None or own.dim() != 1 or list(module.children()) or isinstance(module, Norm):
            continue
        if (norm := norm_of(module, len(own))) is not None:
            replace_module(layer, name, norm.eval())


def _unless_it_fails(prove: Callable[[], Found | None]) -> Found | None:
    """What a proof finds; None where transformers' code around what is not its own fails, or no kernel takes that."""
    try:
        return prove()
    except Exception:  # transformers and torch raise many kinds
        return None


def _stand_ins(wiring: Wiring, modules: Mapping[str, nn.Module], kv: int) -> dict[str, nn.Module]:
    """Small modules with random weights. `kv`: outputs of the keys, and of the values."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, nn.Module] = {}
    heads = () if wiring.attention is None else wiring.attention.head_norms
    for name, norm in wiring.norms.items():
        weight = next(modules[name].parameters(), None) if name in heads else None
        made[name] = norm.like(WIDTH if weight is None else len(weight), generator)

    def linear(name: str, inputs: int, factors: Tensor) -> None:
        own = nn.Linear(inputs, len(factors), cast(nn.Linear, modules[name]).bias is not None)
        own.requires_grad_(False)
        for parameter in own.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * inputs**-0.5)
            parameter.mul_(factors.view(-1, *[1] * (parameter.dim() - 1)))
        made[name] = own

    def several(names: Sequence[str], factors: Sequence[Tensor]) -> None:
        for name, own in zip(names, factors if len(names) > 1 else [torch.cat(list(factors))], strict=True):
            linear(name, WIDTH, own)

    if (attention := wiring.attention) is not None:
        queries = cast(nn.Linear, modules[attention.out]).in_features
        several(  # scores of a common size, and keys and values that a clamp would change
            attention.projections,
            [torch.full((queries,), 1 / LARGE), torch.full((kv,), LARGE), torch.full((kv,), LARGE)],
        )
        linear(attention.out, queries, torch.ones(WIDTH))
    if (feed := wiring.feed_forward) is not None:
        # where a gate is small, its curve shows, and where it is large, clamps do
        small_and_large = torch.cat([torch.ones(INNER // 2), torch.full((INNER - INNER // 2,), LARGE)])
        several(feed.inner, [small_and_large, small_and_large.flip(0)] if feed.block else [small_and_large])
        linear(feed.out, INNER, torch.ones(WIDTH))
    return made


def _agree(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = TOLERANCE) -> bool:
    return all(bool((one - other).norm() <= tolerance * other.norm()) for one, other in zip(found, wanted, strict=True))
