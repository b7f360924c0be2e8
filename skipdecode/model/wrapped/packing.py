"""Linear layers of a model of transformers as packed products (`skipdecode.model.linear`), for inference.

On CPUs they become parts of kernels where a layer does what ours do (`fused_layers`). What is no `nn.Linear` stays as
it is: experts in one tensor, `Conv1D`, subclasses with a forward pass of their own. So do weights that two modules
share, and those that the model reads past the layer's forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import PackedWeight
from skipdecode.backends.device import backend_on
from skipdecode.config.model import Quantization
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.linear import Linear, head_blocks, pack_head
from skipdecode.model.wrapped.fused_layers import LayerFuser
from skipdecode.model.wrapped.hollow_model import HollowModel
from skipdecode.model.wrapped.layer_kernels import Fused
from skipdecode.model.wrapped.wiring import noting_calls


class Packed(NamedTuple):
    """What was packed."""

    num_packed: int
    """Linear layers, the LM head included."""
    num_linears: int
    """How many there are."""
    head: PackedWeight | None
    """Set if the LM head has been taken out of the model, which then gives the states that it multiplies."""
    fused: Sequence[Fused] = ()
    """[L] the kernels of each layer; empty if it has been asked for none."""

    def __str__(self) -> str:
        """For people."""
        counts = {
            "layers": sum(one.layer is not None for one in self.fused),
            "attention blocks": sum(one.attention is not None for one in self.fused),
            "feed-forward blocks": sum(one.feed_forward is not None for one in self.fused),
        }
        kernels = [f"{count} {what}" for what, count in counts.items() if count]
        linears = f"{self.num_packed} of {self.num_linears} linear layers are packed, the rest is torch's"
        return f"{' and '.join(kernels)} are kernels, {linears}" if kernels else linears


class Place(NamedTuple):
    """Where a linear layer is."""

    parent: nn.Module
    name: str

    @property
    def linear(self) -> nn.Linear:
        found = self.parent.get_submodule(self.name)
        assert isinstance(found, nn.Linear)
        return found

    @property
    def kind(self) -> tuple[type[nn.Module], str]:
        """The same for all experts of a layer, of which a token meets a few."""
        return type(self.parent), self.name


def pack_linears(
    model: nn.Module,
    hollow: HollowModel,
    config: WrappedConfig,
    quantization: Quantization | None,
    *,
    dtype: torch.dtype,
    run: Callable[[], object],
    fuses: bool,
) -> Packed:
    """Packs the linear layers of the layers and the LM head in place, one after the other, so that no weight is there
    twice but that of a tied head. `fuses`: layers that are as ours become kernels.

    `run` calls the model for a token, to see which weights it reads by itself. Weights of another type than `dtype`,
    such as a router's in float32, are not quantized. ValueError, and nothing has changed, where the device's back end
    cannot quantize one of the others.
    """
    inner = [
        Place(module, name)
        for layer in hollow.layers
        for module in layer.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    head = [Place(*found) for found in [hollow.find_head()] if found is not None]
    with _watching([place.linear for place in inner + head]) as was_read, noting_calls(hollow.layers) as calls:
        run()
        read = {place.kind for place in inner + head if was_read(place.linear)}
    shared = _shared_weights(model)
    own = [place for place in inner if place.kind not in read and id(place.linear.weight) not in shared]
    own += [place for place in head if place.kind not in read]
    asked = {place: quantization if place.linear.weight.dtype == dtype else None for place in own}
    for place in own:  # check everything before packing anything
        backend_on(place.linear.weight.device).check(place.linear.weight, asked[place])
    packed_head, fused = None, list[Fused]()
    if head and own[-1:] == head and hollow.has_plain_head():
        packed_head = _take_out(own.pop(), asked[head[0]])
    if fuses:
        fuser = LayerFuser(hollow, config, calls, dtype)
        left = {id(place.linear): place for place in own}
        for number, layer in enumerate(hollow.layers):
            linears = dict(layer.named_modules())
            fused.append(fuser.fuse(number, quantization, may_pack=lambda one: id(one) in left))
            for name in fused[-1].linears:
                own.remove(left[id(linears[name])])
    count = sum(_pack(place, asked[place], is_head=place in head) for place in own) + (packed_head is not None)
    count += sum(len(one.linears) for one in fused)
    return Packed(count, len(inner + head), packed_head, fused)


def _pack(place: Place, quantization: Quantization | None, *, is_head: bool) -> bool:
    """Whether the back end packs it."""
    theirs = place.linear
    packed = Linear(theirs.in_features, theirs.out_features, bias=False, device=torch.device("meta"))
    packed.weight, packed.bias = theirs.weight, theirs.bias
    packed.blocks = head_blocks(theirs.weight, quantization) if is_head else None
    packed.pack(quantization)
    if packed.packed is not None:
        setattr(place.parent, place.name, packed.eval())
    return packed.packed is not None


def _take_out(head: Place, quantization: Quantization | None) -> PackedWeight | None:
    packed = pack_head(head.linear.weight, quantization)
    if packed is not None:
        setattr(head.parent, head.name, nn.Identity())
    return packed


def _shared_weights(model: nn.Module) -> set[int]:
    """Of parameters that several modules have, their ids."""
    seen, shared = set[int](), set[int]()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


class _Watched(nn.Linear):
    """A linear layer that notes when its weight is read past its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return F.linear(x, weight, self._parameters["bias"])

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name == "weight":
            self.__dict__["was_read"] = True
        return super().__getattr__(name)


@contextmanager
def _watching(linears: Sequence[nn.Linear]) -> Iterator[Callable[[nn.Linear], bool]]:
    """Meanwhile notes whose weights are read; gives a function that says whether one's was."""
    for linear in linears:
        linear.__class__ = _Watched
    try:
        yield lambda linear: "was_read" in linear.__dict__
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear
            linear.__dict__.pop("was_read", None)
