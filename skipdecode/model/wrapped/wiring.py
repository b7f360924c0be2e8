"""How a layer of transformers is wired: which of its modules are called, in which order, if that is as in layers of
ours. What they compute is another question (`skipdecode.model.wrapped.fused_layers`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn

from skipdecode.config.model import FeedForwardKind
from skipdecode.config.wrapped import Sublayers
from skipdecode.model.wrapped.norms import Norm, norm_of


@dataclass(frozen=True)
class Attention:
    """The modules from the states to the first residual, by their names in the layer."""

    norm: str
    projections: tuple[str, ...]
    """Of queries, keys and values; or one for all of them."""
    head_norms: tuple[str, ...]
    """Of queries and keys, or none."""
    out: str
    out_norm: str | None

    @property
    def linears(self) -> tuple[str, ...]:
        return *self.projections, self.out

    @property
    def norms(self) -> tuple[str, ...]:
        return self.norm, *self.head_norms, *([self.out_norm] if self.out_norm else [])


@dataclass(frozen=True)
class FeedForward:
    """Those from there to the second one."""

    norm: str
    inner: tuple[str, ...]
    """Gate and up projection, or one linear layer."""
    out: str
    out_norm: str | None
    block: str
    """The module with nothing but these linear layers; only of a gated block."""
    kinds: tuple[FeedForwardKind, ...]
    """Of which it may be one."""

    @property
    def linears(self) -> tuple[str, ...]:
        return *self.inner, self.out

    @property
    def norms(self) -> tuple[str, ...]:
        return self.norm, *([self.out_norm] if self.out_norm else [])


@dataclass(frozen=True)
class Wiring:
    attention: Attention | None = None
    """None if it is none of ours."""
    feed_forward: FeedForward | None = None
    norms: dict[str, Norm] = field(default_factory=dict)
    """All that were called outside of attention and feed-forward block, and those of heads."""


@contextmanager
def noting_calls(layers: Sequence[nn.Module]) -> Iterator[Sequence[list[str]]]:
    """Meanwhile notes the names of the modules without children that each layer calls, in their order."""
    calls: list[list[str]] = [[] for _ in layers]
    hooks = [
        module.register_forward_pre_hook(lambda *_, own=own, name=name: own.append(name))
        for layer, own in zip(layers, calls, strict=True)
        for name, module in layer.named_modules()
        if not list(module.children())
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def wiring_of(layer: nn.Module, called: Sequence[str], parts: Sublayers, width: int, head_dim: int) -> Wiring:
    """Of a layer that has called these modules."""

    def part_of(name: str) -> str:
        top = name.partition(".")[0]
        return "attention" if top == parts.attention else "feed" if top in parts.feed_forward else "norm"

    modules = dict(layer.named_modules())
    called = [name for name in called if list(modules[name].parameters()) or part_of(name) == "norm"]
    norms, order = dict[str, Norm](), list[str]()
    for name in called:
        if part_of(name) != "norm":
            order.append(part_of(name))
        elif (norm := norm_of(modules[name], width)) is not None:
            norms[name] = norm
            order.append("norm")
        elif list(modules[name].parameters()):
            return Wiring()
    outside: list[str | None] = [*norms]
    match [part for part, same in groupby(order) for _ in range(len(list(same)) if part == "norm" else 1)]:
        case ["norm", "attention", "norm", "feed"] if len(outside) == 2:
            before, out_norm, behind, last_norm = outside[0], None, outside[1], None
        case ["norm", "attention", "norm", "norm", "feed", "norm"] if len(outside) == 4:
            before, out_norm, behind, last_norm = outside
        case _:
            return Wiring()
    assert before is not None
    assert behind is not None
    own = {part: [name for name in called if part_of(name) == part] for part in ("attention", "feed")}
    attention = _attention(modules, own["attention"], modules[parts.attention], before, out_norm)
    for name in () if attention is None else attention.head_norms:
        norm = norm_of(modules[name], head_dim)
        if norm is None:
            attention = None
            break
        norms[name] = norm
    blocks = [modules[name] for name in parts.feed_forward]
    return Wiring(attention, _feed_forward(modules, own["feed"], blocks, behind, last_norm), norms)


def gated_blocks(layer: nn.Module, called: Sequence[str]) -> Iterator[FeedForward]:
    """Modules anywhere in a layer that have a gate, an up and a down projection, which were called."""
    modules = dict(layer.named_modules())
    by_owner: dict[str, list[str]] = {}
    for name in called:
        if type(modules[name]) is nn.Linear:
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    for owner, linears in by_owner.items():
        found = _feed_forward(modules, linears, [modules[owner]], "", None)
        if found is not None and found.block:
            yield found


def _attention(
    modules: dict[str, nn.Module], called: Sequence[str], module: nn.Module, norm: str, out_norm: str | None
) -> Attention | None:
    linears, others = _told_apart(modules, called)
    if len(linears) not in (2, 4) or len(others) not in (0, 2) or not _has_only(modules, linears, [module]):
        return None
    return Attention(norm, tuple(linears[:-1]), tuple(others), linears[-1], out_norm)


def _feed_forward(
    modules: dict[str, nn.Module], called: Sequence[str], blocks: Sequence[nn.Module], norm: str, out_norm: str | None
) -> FeedForward | None:
    linears, others = _told_apart(modules, called)
    if len(linears) not in (2, 3) or others or not _has_only(modules, linears, blocks):
        return None
    *inner, out = linears
    made, taken = sum(_linear(modules, name).out_features for name in inner), _linear(modules, out).in_features
    if made == taken and len(inner) == 1:
        return FeedForward(norm, tuple(inner), out, out_norm, "", ("relu",))
    owners = {name.rpartition(".")[0] for name in linears}
    if made != 2 * taken or len(owners) != 1 or owners == {""}:
        return None
    return FeedForward(norm, tuple(inner), out, out_norm, owners.pop(), ("swiglu", "geglu"))


def _told_apart(modules: dict[str, nn.Module], called: Sequence[str]) -> tuple[list[str], list[str]]:
    """Linear layers and others; all of them others if one was called twice."""
    if len(set(called)) != len(called):
        return [], list(called)
    linears = [name for name in called if type(modules[name]) is nn.Linear]
    return linears, [name for name in called if name not in linears]


def _has_only(modules: dict[str, nn.Module], linears: Sequence[str], owners: Sequence[nn.Module]) -> bool:
    """Whether no other matrices are in the owners, which another token might need."""
    found = {id(parameter) for owner in owners for parameter in owner.parameters() if parameter.dim() > 1}
    return found == {id(_linear(modules, name).weight) for name in linears}


def _linear(modules: dict[str, nn.Module], name: str) -> nn.Linear:
    found = modules[name]
    assert isinstance(found, nn.Linear)
    return found
