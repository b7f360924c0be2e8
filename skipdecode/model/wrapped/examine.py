"""Whether a model of transformers can run, and its shape: found by a look at the model without its weights.

The model is made on the meta device, and each of its layers is run up to its attention. So what is in the way is named
within seconds, before anything starts.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from skipdecode.config.json_files import read_eos
from skipdecode.config.model import SwiftKVConfig, TokenizerRules
from skipdecode.config.wrapped import Sublayers, WrappedConfig
from skipdecode.kv.view import VariantView
from skipdecode.model.wrapped.adapter import merge_adapter
from skipdecode.model.wrapped.attention import ATTENTION, Mask, Stored, attending
from skipdecode.model.wrapped.hollow_model import Arguments, HollowModel
from skipdecode.model.wrapped.sublayers import find_sublayers
from skipdecode.model.wrapped.swiftkv import check_shapes, find_attention

MAX_LAYERS = 1024
ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""A variable of transformers."""
MOVING_ROPES = ("dynamic", "longrope")
"""Frequencies that follow the length of the sequence: keys in the cache would have turned by others."""
SINCE = {"codegen": "5.24", "gptj": "5.24"}
"""By model type, the first transformers whose layers can run here, where pyproject.toml allows older ones."""


def read_wrapped(folder: Path, raw: dict[str, Any], rules: TokenizerRules) -> WrappedConfig:
    """The configuration of the model in `folder`, whose config.json holds `raw`. ValueError names the part in the way.

    `rules`: those of its tokenizer.
    """
    config = _read(folder, raw)
    text = config.get_text_config(decoder=True)
    sizes = {key: _size(text, key, raw["model_type"]) for key in WrappedConfig.sizes}
    ends = raw.get("eos_token_id", getattr(text, "eos_token_id", None))
    known = WrappedConfig.read_fields({key: value for key, value in raw.items() if key not in sizes})
    known |= sizes | {"eos_token_id": read_eos("eos_token_id", ends)}
    known |= {key: getattr(text, key, None) for key in ("bos_token_id", "pad_token_id")}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    own = _look_at_layers(config, sizes["num_hidden_layers"])
    own |= {"type_name": str(raw["model_type"]), "rules": rules, "tie_word_embeddings": tied}
    own["has_router_loss"] = bool(getattr(text, "output_router_logits", False))
    return WrappedConfig(**known | own)


def check_files(
    folder: Path, stored: Mapping[str, Sequence[int]], adapter: Path | None, swiftkv: SwiftKVConfig | None
) -> None:
    """ValueError if tensors of these names and shapes are not those of the model in `folder`, or if the LoRA adapter
    in `adapter`, or SwiftKV's weights, do not fit it. No weights are read.

    transformers loads tensors without values in their place, so that it renames and joins them as it does when it
    loads the weights.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with FakeTensorMode(), _loading_in_one_thread():
            tensors = {name: torch.empty(tuple(shape)) for name, shape in stored.items()}
            _, found = model_class.from_pretrained(
                None, config=config, state_dict=tensors, ignore_mismatched_sizes=True, output_loading_info=True
            )
    except Exception:  # some conversion wants values: loading the weights will say what does not fit
        found = None
    if found is not None:
        refuse_misfits(folder, found)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if swiftkv is not None:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        check_shapes(folder, HollowModel(model, layers).layers, swiftkv)
    if adapter is not None:
        merge_adapter(model, adapter)


@contextmanager
def _loading_in_one_thread() -> Iterator[None]:
    """Meanwhile transformers loads without threads, which cannot share a `FakeTensorMode`, and logs errors alone."""
    before, verbosity = os.environ.get(ONE_THREAD), logging.get_verbosity()
    os.environ[ONE_THREAD] = "1"
    logging.set_verbosity_error()
    try:
        with no_progress_bar():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if before is None:
            del os.environ[ONE_THREAD]
        else:
            os.environ[ONE_THREAD] = before


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Meanwhile transformers shows none."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def refuse_misfits(folder: Path, found: Mapping[str, Collection[Any]]) -> None:
    """ValueError that names the first tensor of which transformers says, with `output_loading_info`, that it does not
    fit."""
    for name, stored, asked in sorted(found["mismatched_keys"]):
        raise ValueError(f"{folder}: tensor {name!r} is {list(stored)}, config.json asks for {list(asked)}")
    for what in ("missing", "unexpected"):
        if names := sorted(found[f"{what}_keys"]):
            raise ValueError(
                f"{folder}: {len(names)} tensors are {what}, the first is {names[0]!r}: config.json and weights are of "
                "different models"
            )


def _read(folder: Path, raw: dict[str, Any]) -> Any:
    """transformers' configuration; ValueError for what can be told without making the model."""
    kind, version = raw.get("model_type"), transformers.__version__
    if kind not in CONFIG_MAPPING:
        code = " (its own code, which auto_map names, is never run)" if raw.get("auto_map") else ""
        raise ValueError(f"model_type is {kind!r}, which transformers {version} does not have{code}")
    if (quantised := raw.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"quantization_config is set ({method}), and quantised weights are not supported")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and its libraries raise many kinds
        raise ValueError(f"transformers cannot read it: {error}") from error
    if config.is_encoder_decoder:
        raise ValueError(f"model_type {kind!r} has an encoder, and only decoders are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model_type {kind!r} has no AutoModelForCausalLM in transformers {version}")
    _refuse_keys(config.get_text_config(decoder=True))
    return config


def _refuse_keys(text: Any) -> None:
    """ValueError for keys with which a model cannot run under schedules that skip layers."""
    if getattr(text, "num_kv_shared_layers", None):
        raise ValueError(
            f"num_kv_shared_layers is {text.num_kv_shared_layers}: layers read keys of others, which may be skipped"
        )
    for key in ("layer_types", "layers_block_type"):
        kinds = dict.fromkeys(getattr(text, key, None) or ())
        if others := [kind for kind in kinds if "attention" not in kind or kind.startswith("linear")]:
            raise ValueError(f"{key}: its layers of type {others[0]} keep a state in place of keys and values")
    rope = getattr(text, "rope_parameters", None) or {}
    for ropes in (rope, *rope.values()):  # of all layers, or by their type
        kind = ropes.get("rope_type") if isinstance(ropes, dict) else None
        if kind in MOVING_ROPES:
            raise ValueError(f"rope_parameters.rope_type is {kind!r}, whose frequencies follow the length of the text")


def _size(text: Any, key: str, kind: str) -> int:
    value = getattr(text, key, None)
    if not isinstance(value, int):
        raise ValueError(f"model_type {kind!r} has no {key} ({value!r})")
    if key == "num_hidden_layers" and value > MAX_LAYERS:  # a typing error would take all memory
        raise ValueError(f"{key} is {value}, expected at most {MAX_LAYERS}")
    return value


class _KVShapes:
    """A `VariantView` that notes the shapes of keys and values."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.of_layer: dict[int, tuple[int, int, int]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.of_layer[layer] = (k.shape[1], k.shape[3], v.shape[3])


def _look_at_layers(config: Any, num_layers: int) -> dict[str, Any]:
    """The fields of `WrappedConfig` that are found by running the layers of the model that `config` describes."""
    where = f"model_type {config.model_type!r}"
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, trust_remote_code=False)
            hollow = HollowModel(model.eval(), num_layers)  # in training some leave out layers at random
            tokens, positions = (torch.zeros(1, 2, dtype=torch.int64) for _ in range(2))
            h = hollow.embed(tokens, positions)
            view, attentions = _KVShapes(positions), []
            for number, layer in enumerate(hollow.layers):
                parts = ", ".join(name for name, _ in layer.named_children())
                where = f"layer {number} of model_type {config.model_type!r} ({type(layer).__name__}: {parts})"
                attentions.append(_run_to_attention(layer, h, hollow.arguments(positions)[number], view, number))
    except Exception as error:  # of transformers, of torch, or of a missing library that some part wants
        raise ValueError(f"{where} cannot run: {_reason(error, config)}") from error
    weights = sum(p.numel() for layer in hollow.layers for p in layer.parameters())
    found = {
        "kv_shapes": tuple(view.of_layer[number] for number in range(num_layers)),
        "layer_weights": weights // num_layers,
        "num_values": sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())),
        "linears": tuple(dict.fromkeys(pair for layer in hollow.layers for pair in _linears(layer))),
    }
    if (lacking := _lacks_for_swiftkv(hollow.layers)) is not None:
        found["lacks_for_swiftkv"] = f"{lacking} (model_type {config.model_type!r})"
    return found | _parts_of_layers(hollow, attentions, h.shape[-1], config.model_type)


def _linears(layer: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield name.rpartition(".")[2], module.in_features if isinstance(module, nn.Linear) else module.nx


def _lacks_for_swiftkv(layers: Sequence[nn.Module]) -> str | None:
    for number, layer in enumerate(layers):
        try:
            find_attention(layer)
        except ValueError as error:
            return f"projections of queries, keys and values that are modules, and layer {number} {error}"
    return None


def _parts_of_layers(hollow: HollowModel, attentions: Sequence[nn.Module], width: int, kind: str) -> dict[str, Any]:
    """`sublayers`, or why there are none. Nothing of the model is left to be used."""
    found: list[Sublayers] = []
    for number, (layer, attention) in enumerate(zip(hollow.layers, attentions, strict=True)):
        given = hollow.newest_arguments(number)
        try:
            with torch.no_grad():
                found.append(find_sublayers(layer, attention, given, width))
        except Exception as error:  # of transformers' layers, around what is not theirs
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            where = f"layer {number} of model_type {kind!r} ({type(layer).__name__})"
            return {"whole_layers_because": f"{where} runs whole or not at all: {why.splitlines()[0][:200]}"}
    return {"sublayers": tuple(found)}


def _run_to_attention(layer: nn.Module, h: Tensor, arguments: Arguments, view: _KVShapes, number: int) -> nn.Module:
    """The module that has the layer's attention."""
    with attending(cast(VariantView, view), number, only_stores=True) as call:
        with suppress(Stored):
            layer(h, *arguments.positional, **arguments.named)
        if call.module is None or number not in view.of_layer:
            raise ValueError("it keeps no keys and values")
        return call.module


def _reason(error: Exception, config: Any) -> str:
    needed, version = SINCE.get(config.model_type), transformers.__version__
    if needed is not None and Version(version) < Version(needed):
        return f"it needs transformers >= {needed}, and {version} is installed"
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    if f"'{Mask.__name__}' object" in str(error):
        return "it works on the attention mask itself"
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]
