"""SwiftKV (`skipdecode.model.swiftkv`) in layers of transformers whose attention projects by `q_proj`, `k_proj` and
`v_proj`.

The state that all upper layers share is what layer l, the first of them, projects itself, so the norm is that layer's
own. For a call other modules stand in place of its projections: a query projection of SwiftKV, and what gives keys and
values that have been made already. Norms of heads and rotary positions are the layer's.

B rows, T tokens, D width, C outputs of `kv`.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skipdecode.backends.backend import PackedWeight
from skipdecode.backends.device import backend_on
from skipdecode.backends.rope import RotaryTables
from skipdecode.config.model import Quantization, SwiftKVConfig
from skipdecode.config.wrapped import SWIFTKV_FILE
from skipdecode.kv.view import KVView
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear
from skipdecode.model.swiftkv import SwiftKV

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class _Projected(Exception):
    """Ends a layer with the input of its projections."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Stop(nn.Module):
    def forward(self, x: Tensor) -> NoReturn:
        raise _Projected(x)


class _Given(nn.Module):
    """Gives what has been projected already, or zeros of `width`, whatever its input."""

    def __init__(self, made: Tensor | None = None, *, width: int = 0) -> None:
        super().__init__()
        self.made, self.width = made, width

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.width) if self.made is None else self.made


def find_attention(layer: nn.Module) -> nn.Module:
    """The module of a layer that has PROJECTIONS; ValueError if there is none, or more."""
    found = [
        module
        for module in layer.modules()
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS)
    ]
    if len(found) != 1:
        raise ValueError(f"{type(layer).__name__} has no {', '.join(PROJECTIONS)} of its own in its attention")
    return found[0]


def _linear(attention: nn.Module, name: str) -> nn.Linear:
    found = attention.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


@contextmanager
def projecting(attention: nn.Module, **instead: nn.Module) -> Iterator[None]:
    """Meanwhile these modules stand in place of the projections with their names."""
    own = {name: attention._modules[name] for name in instead}
    attention._modules.update(instead)
    try:
        yield
    finally:
        attention._modules.update(own)


@contextmanager
def asking(attention: nn.Module, query: nn.Module) -> Iterator[None]:
    """Meanwhile queries are those of `query`, and keys and values are nothing: they are stored already."""
    blank = {name: _Given(width=_linear(attention, name).out_features) for name in PROJECTIONS[1:]}
    with projecting(attention, q_proj=query, **blank):
        yield


class WrappedSwiftKV(SwiftKV):
    """A query projection per upper layer, and a fused K/V projection."""

    def __init__(self, layers: Sequence[nn.Module], shape: SwiftKVConfig) -> None:
        """`layers`: all of the model. Weights are uninitialised. ValueError where a layer's projections are no linear
        layers of its own, or differ within a group."""
        nn.Module.__init__(self)  # it has other weights than ours
        self.first, self.group_size = shape.kv_layers, shape.group_size
        attentions = [find_attention(layer) for layer in layers[self.first :]]
        self.__dict__["_layers"] = attentions  # past nn.Module, for which they would be submodules
        self._widths = [[_linear(one, name).out_features for name in PROJECTIONS] for one in attentions]
        """Of queries, keys and values."""
        for number, (_, *own) in enumerate(self._widths):
            _, *wanted = self._widths[number // self.group_size * self.group_size]
            if own != wanted:
                raise ValueError(
                    f"swiftkv.group_size is {self.group_size}: layer {self.first + number} has {own} outputs of K and "
                    f"V, and the first of its group {wanted}"
                )
        query, key = (_linear(attentions[0], name) for name in PROJECTIONS[:2])
        inputs, where, dtype = query.in_features, query.weight.device, query.weight.dtype
        self.q = nn.ModuleList(
            Linear(inputs, width, query.bias is not None, where, dtype) for width, _, _ in self._widths
        )
        # [group][K, V] along its rows
        self._sizes = [k + v for _, k, v in self._widths[:: self.group_size]]
        self.kv = nn.Linear(inputs, sum(self._sizes), key.bias is not None, where, dtype)
        self._packed: list[PackedWeight] = []  # the parts of `kv.weight`, one per group

    @torch.no_grad()
    def copy_teacher(self, blocks: Sequence[Layer]) -> None:
        for query, attention in zip(self.q, self._attentions, strict=True):
            query.load_state_dict(_linear(attention, "q_proj").state_dict())
        for name, own in self.kv.named_parameters():
            parts = [
                torch.cat([getattr(_linear(one, part), name) for part in PROJECTIONS[1:]]) for one in self._attentions
            ]
            groups = [parts[at : at + self.group_size] for at in range(0, len(parts), self.group_size)]
            own.copy_(torch.cat([torch.stack(group).mean(dim=0) for group in groups]))

    @property
    def _attentions(self) -> list[nn.Module]:
        """Of the layers from `first` on."""
        attentions: list[nn.Module] = self.__dict__["_layers"]
        return attentions

    def pack(self, quantization: Quantization | None, layers: Sequence[Layer], rotary_tables: RotaryTables) -> None:
        for number in range(self.first, len(layers)):
            self.query(number).pack(quantization)
        backend = backend_on(self.kv.weight.device)
        packed = [backend.pack(part.contiguous(), quantization) for part in torch.split(self.kv.weight, self._sizes)]
        if None not in packed:
            self._packed = [part for part in packed if part is not None]
            self.kv.register_parameter("weight", None)

    def state(self, h: Tensor, kv: KVView, layers: Sequence[Layer]) -> Tensor:
        return self._input(h, kv, layers, self.first)

    def teacher_kv(self, h: Tensor, kv: KVView, layers: Sequence[Layer], number: int) -> Tensor:
        x, attention = self._input(h, kv, layers, number), self._attentions[number - self.first]
        return torch.cat([_linear(attention, name)(x) for name in PROJECTIONS[1:]], dim=-1)

    def _input(self, h: Tensor, kv: KVView, layers: Sequence[Layer], number: int) -> Tensor:
        with projecting(self._attentions[number - self.first], q_proj=_Stop()):
            try:
                layers[number].store(h, kv, number)
            except _Projected as ended:
                return ended.x
        raise AssertionError("a layer that does not project")

    def write(self, h: Tensor, kv: KVView, attn: Sequence[bool], layers: Sequence[Layer]) -> None:
        x = self.state(h, kv, layers)
        for group in sorted({self.group(layer) for layer in range(self.first, len(attn)) if attn[layer]}):
            leader = self.leader(group)
            q, k, v = self._widths[leader - self.first]
            keys, values = torch.split(self._project(x, group), [k, v], dim=-1)
            with projecting(
                self._attentions[leader - self.first],
                q_proj=_Given(width=q),
                k_proj=_Given(keys),
                v_proj=_Given(values),
            ):
                layers[leader].store(h, kv, leader)

    def _project(self, x: Tensor, group: int) -> Tensor:
        end = list(accumulate(self._sizes))[group]
        rows = slice(end - self._sizes[group], end)
        bias = None if self.kv.bias is None else self.kv.bias[rows]
        return self._packed[group](x, bias) if self._packed else F.linear(x, self.kv.weight[rows], bias)


def check_shapes(folder: Path, layers: Sequence[nn.Module], shape: SwiftKVConfig) -> None:
    """ValueError if SWIFTKV_FILE in `folder` does not hold weights of SwiftKV for these layers. Reads its header."""
    try:
        with safe_open(folder / SWIFTKV_FILE, "pt") as file:
            stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder / SWIFTKV_FILE}: cannot be read, and swiftkv in config.json asks for it: {error}"
        ) from error
    wanted = {name: list(value.shape) for name, value in WrappedSwiftKV(layers, shape).state_dict().items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise ValueError(
                f"{folder / SWIFTKV_FILE}: tensor {name!r} is {stored.get(name)}, swiftkv in config.json asks for "
                f"{wanted.get(name)}"
            )


def load_weights(swiftkv: SwiftKV, folder: Path) -> None:
    """Those of `save_weights`, which `check_shapes` has compared."""
    swiftkv.load_state_dict(load_file(folder / SWIFTKV_FILE))


def save_weights(swiftkv: SwiftKV, folder: Path, dtype: torch.dtype) -> None:
    """Writes SWIFTKV_FILE beside config.json."""
    state = swiftkv.state_dict()
    tensors = {name: value.to(device="cpu", dtype=dtype).contiguous() for name, value in state.items()}
    save_file(tensors, folder / SWIFTKV_FILE)
    shutil.copymode(folder / "config.json", folder / SWIFTKV_FILE)  # safetensors makes it readable by its owner only
