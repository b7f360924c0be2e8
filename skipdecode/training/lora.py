"""LoRA adapters (arXiv 2106.09685) for training: A and B beside the linear layers of a frozen model, saved as PEFT
does.

A layer computes x W^T + scale * x A^T B^T, with A initialised as by PEFT and B with zeros. Adapters are read and merged
in `skipdecode.checkpoint.lora_adapter`; the training loop is `actors.training.trainer`.

B rows, T columns, r the rank.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from skipdecode.checkpoint.lora_adapter import CONFIG_FILE, KEY, WEIGHTS_FILE, Adapter, open_adapter, tensor_name
from skipdecode.checkpoint.weights import adapter_of, hf_parts
from skipdecode.config.model import DecoderConfig
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import Linear
from skipdecode.schedules.trained import SCHEDULE_FILE, TRAINED_FILE

PEFT_NAME = re.compile(r"model\.(.+)\.lora_([AB])\.default\.weight")
LINEARS = ("qkv", "out_proj", "fc1", "fc2")  # of a layer


@dataclass(frozen=True)
class LoraShape:
    rank: int
    alpha: float
    """The scale of B A is alpha / rank."""
    targets: tuple[str, ...]
    """Last components of Hugging Face's names of linear layers: q_proj, fc1, ..."""


class Lora(nn.Module):
    """A and B for some parts of a fused linear layer. `parts`: (last name, rows) of all parts, in order."""

    def __init__(self, linear: Linear, parts: Sequence[tuple[str, int]], shape: LoraShape) -> None:
        super().__init__()
        self.parts, self.scale = tuple(parts), shape.alpha / shape.rank
        own, new = [(name, rows) for name, rows in parts if name in shape.targets], linear.weight.new_zeros
        self._own = [name for name, _ in own]  # ParameterDict does not keep this order
        self.a = nn.ParameterDict({name: new(shape.rank, linear.in_features) for name, _ in own})
        self.b = nn.ParameterDict({name: new(rows, shape.rank) for name, rows in own})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the adapter to y [B, T, out], the layer's output for x [B, T, in].

        All parts are one product with zero blocks, which is faster than splitting y and joining it again.
        """
        a = self.scale * torch.cat([self.a[name] for name in self._own])  # [r x parts with an adapter, in]
        z = F.linear(x, a)
        return torch.addmm(y.flatten(0, -2), z.flatten(0, -2), self._all_b().t()).view_as(y)

    def _all_b(self) -> Tensor:
        """[out, r x parts with an adapter]: each B at its rows and columns, zeros elsewhere."""
        some = self.b[self._own[0]]
        blocks, width, at = [], len(self._own) * some.shape[1], 0
        for name, rows in self.parts:
            b = self.b[name] if name in self._own else some.new_zeros(rows, 0)
            blocks.append(F.pad(b, (at, width - at - b.shape[1])))
            at += b.shape[1]
        return torch.cat(blocks)


def linear_names(config: DecoderConfig) -> list[str]:
    """The names that `LoraShape.targets` may contain."""
    if isinstance(config, WrappedConfig):
        return list(dict.fromkeys(name for name, _ in config.linears))
    return [name.rpartition(".")[2] for part in LINEARS for name in config.layer_parts[part]]


def add_lora(model: Decoder, shape: LoraShape, seed: int, start: Adapter | None = None) -> None:
    """Adds A and B to the target layers of `model`, which can then only be trained. They start from the adapter
    `start`, which must have that shape (`check_start`). Without it A depends only on the seed, not on the device, and B
    is zero, so that the model's outputs do not change. In a model of transformers they are modules of PEFT."""
    assert not model.is_packed, "packed weights cannot be trained"
    if isinstance(model.config, WrappedConfig):
        from skipdecode.model.wrapped.adapter import add_adapter  # loads transformers

        begun = None if start is None else {module: start.matrices(module) for module in start.modules}
        add_adapter(model.model, rank=shape.rank, alpha=shape.alpha, targets=shape.targets, seed=seed, start=begun)
        return
    generator = torch.Generator().manual_seed(seed)
    for number, layer in enumerate(model.layers):
        for name in LINEARS:
            linear = cast(Linear, getattr(layer, name))
            named = list(_parts(model.config, number, name))
            parts = [(last, rows or linear.out_features) for last, _, rows in named]
            if not {last for last, _ in parts} & set(shape.targets):
                continue
            lora = Lora(linear, parts, shape)
            for a in lora.a.values():
                drawn = torch.empty(a.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                a.data.copy_(drawn)
            for last, module, _ in named:
                if start is not None and last in shape.targets:
                    a, b = start.matrices(module)
                    lora.a[last].data.copy_(a)
                    lora.b[last].data.copy_(b)
            linear.lora = lora


def check_start(folder: Path, shape: LoraShape, config: DecoderConfig, source: Path) -> None:
    """ValueError, which names `model.adapter`, if training the model in `source` cannot continue from the adapter in
    `folder`."""
    if isinstance(config, WrappedConfig):
        from skipdecode.model.wrapped.adapter import linears_of_folder  # loads transformers

        linears = linears_of_folder(source)
        adapter, modules = open_adapter(folder, linears, ()), list(linears)
    else:
        with torch.device("meta"):
            adapter = adapter_of(folder, Decoder(config))
        numbers = range(config.num_hidden_layers)
        modules = [module for number in numbers for part in LINEARS for _, module, _ in _parts(config, number, part)]
    wanted = {module for module in modules if module.rpartition(".")[2] in shape.targets}
    if other := min(wanted ^ adapter.modules, default=None):
        has = "has none for" if other in wanted else "has one for"
        raise ValueError(f"{KEY}: train.lora.targets does not fit it: it {has} {other!r}")
    for module in sorted(wanted):
        rank, scale = adapter.keys.rank(module), adapter.keys.scale(module)
        if rank != shape.rank or not math.isclose(scale, shape.alpha / shape.rank, rel_tol=1e-6):
            raise ValueError(
                f"{KEY}: has rank {rank} and alpha {scale * rank:g} at {module!r}, and train.lora asks for "
                f"{shape.rank} and {shape.alpha:g}; an adapter keeps its shape when it is trained on"
            )


def lora_modules(module: nn.Module) -> list[Lora]:
    """The modules that `add_lora` has added to a model of ours; empty for a model without an adapter."""
    return [one for one in module.modules() if isinstance(one, Lora)]


def adapter_modules(module: nn.Module) -> list[nn.Module]:
    """All that `add_lora` has added, to a model of transformers, too."""
    theirs = [one for name, one in module.named_modules() if name.endswith((".lora_A", ".lora_B"))]
    return [*lora_modules(module), *theirs]


def save_adapter(
    weights: Mapping[str, Tensor],
    folder: Path,
    config: DecoderConfig,
    shape: LoraShape,
    base: str,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the PEFT folder, with the schedules of `config` beside.

    `weights`: the state of a model with an adapter, of which A and B are read; `base`: the name of the model.
    """
    tensors = {name: value.to(dtype=dtype, device="cpu").contiguous() for name, value in _named(weights, config, shape)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": shape.rank,
        "lora_alpha": int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(shape.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    _write(folder / CONFIG_FILE, keys)
    if config.skip_decode is not None:
        _write(folder / SCHEDULE_FILE, config.skip_decode)
    if config.trained_schedules is not None:
        _write(folder / TRAINED_FILE, config.trained_schedules)
    shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)  # safetensors makes it readable by its owner only


def _named(weights: Mapping[str, Tensor], config: DecoderConfig, shape: LoraShape) -> Iterator[tuple[str, Tensor]]:
    """A and B by their names in the file."""
    if isinstance(config, WrappedConfig):  # PEFT's names, and those of the adapter behind them
        for name, value in weights.items():
            if (found := PEFT_NAME.fullmatch(name)) is not None:
                yield tensor_name(found[1], found[2]), value
        return
    for number in range(config.num_hidden_layers):
        for part in LINEARS:
            for last, module, _ in _parts(config, number, part):
                for which in "AB" if last in shape.targets else "":
                    value = weights[f"blocks.{number}.{part}.lora.{which.lower()}.{last}"]
                    yield tensor_name(module, which), value


def _parts(config: DecoderConfig, number: int, part: str) -> Iterable[tuple[str, str, int]]:
    """The modules of Hugging Face's model that make up one of our linear layers: (last name, whole name, rows). Zero
    rows stand for all of them."""
    for theirs, rows in hf_parts(f"blocks.{number}.{part}.weight", config):
        module = theirs.removesuffix(".weight")
        yield module.rpartition(".")[2], module, rows


def _write(path: Path, content: Mapping[str, object] | Sequence[object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
