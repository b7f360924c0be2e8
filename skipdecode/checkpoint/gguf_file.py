"""Reads a model from a GGUF file: its configuration as a config.json, and its tensors by Hugging Face names.

Supported are Llama, Mistral (`llama` in GGUF), Qwen2, Qwen3 and Gemma 3. Anything else (experts, yarn, types without a
plain dequantisation) is refused by name. Unlike transformers 5 we read `rope_freqs.weight`, by which a file says that
positions are scaled as in Llama 3. The tokenizer is read by `skipdecode.checkpoint.gguf_tokenizer`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gguf.quants import dequantize

from skipdecode.checkpoint.gguf_header import Header, TensorInfo, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from skipdecode.backends.block_quantization import StoredBlocks

Made = TypeVar("Made")

__all__ = ["blocks", "chat_template", "checked", "read_config", "tensors", "weights"]

GEMMA3 = "gemma3"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    GEMMA3: "Gemma3ForCausalLM",
}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
)  # fmt: skip
ROPE_FREQS = "rope_freqs.weight"
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of every released Llama 3; a file has only the factors that follow from them."""


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration as the contents of a Hugging Face config.json; ValueError names the file and the key."""
    return checked(path, lambda raw: raw)


def checked(path: str | Path, use: Callable[[dict[str, Any]], Made]) -> Made:
    """Calls `use` with the configuration; a ValueError that it raises will name the file, too."""
    header = read_header(path)
    try:
        return use(_config(path, header))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, ArithmeticError) as error:  # a text where a number belongs, and the like
        raise ValueError(f"{path}: its metadata cannot be read: {error}") from error


def weights(path: str | Path) -> Iterator[tuple[str, TensorInfo]]:
    """Hugging Face names of all weights, and what the header says of them. ValueError for an unsupported type."""
    yield from _weights(path, read_header(path))


def tensors(path: str | Path, without: Collection[str] = ()) -> Iterator[tuple[str, "Tensor"]]:
    """Hugging Face names and weights, but for those `without` which it goes, dequantised to float32 one at a time.
    ValueError for an unsupported type."""
    import torch  # only here, since reading a configuration does not need it

    header = read_header(path)
    config = read_config(path)
    heads = _permuted_heads(config)
    found = list(_weights(path, header))
    data = np.memmap(path, mode="r", dtype=np.uint8)
    for name, info in found:
        if name in without:
            continue
        raw = data[info.start : info.start + info.num_bytes].reshape(math.prod(info.shape[:-1]), -1)
        # errstate: a damaged file may hold infinities
        with np.errstate(all="ignore"):
            values = dequantize(raw, info.kind).reshape(info.shape)
        if (count := heads.get(info.name.split(".")[-2])) is not None:
            values = _unpermuted(path, info, values, count)
        if config["model_type"] == "gemma3_text" and "norm" in info.name:
            values = values - 1  # llama.cpp stores what the norm multiplies by, Hugging Face what it adds to 1
        yield name, torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: torch wants memory of its own


def blocks(path: str | Path) -> Iterator[tuple[str, "StoredBlocks"]]:
    """Hugging Face names and weights of the matrices whose blocks can be kept as they are, mapped and not yet read."""
    import torch

    from skipdecode.backends.block_quantization import BLOCK, NUM_BYTES, BlockRows, StoredBlocks

    header, data = read_header(path), torch.from_numpy(np.memmap(path, mode="c", dtype=np.uint8))
    heads = _permuted_heads(read_config(path))
    for name, info in list(_weights(path, header)):
        if info.kind.name not in NUM_BYTES or len(info.shape) != 2 or not name.endswith(".weight"):
            continue
        rows, inputs = info.shape
        raw = data[info.start : info.start + info.num_bytes].view(rows, inputs // BLOCK, -1)
        order = None
        if (count := heads.get(info.name.split(".")[-2])) is not None:
            order = torch.from_numpy(_unpermuted(path, info, np.arange(rows), count))
        yield name, StoredBlocks(info.kind.name, [BlockRows(raw, order, f"{path}: tensor {info.name!r}")])


def chat_template(path: str | Path) -> str | None:
    """The Jinja template for conversations, where the file has one."""
    found = read_header(path).metadata.get("tokenizer.chat_template")
    return found if isinstance(found, str) else None


def _weights(path: str | Path, header: Header) -> Iterator[tuple[str, TensorInfo]]:
    """The weights of the model, by Hugging Face name."""
    names = GEMMA3_NAMES if header.metadata.get("general.architecture") == GEMMA3 else LAYER_NAMES
    for info in header.tensors.values():
        if info.name == ROPE_FREQS:
            continue
        if info.kind.name not in TYPES:
            raise ValueError(f"{path}: tensor {info.name!r} is {info.kind.name}; supported are {', '.join(TYPES)}")
        module, _, kind = info.name.rpartition(".")
        name = MODEL_NAMES.get(module)
        if module.startswith("blk."):
            _, number, part = (*module.split(".", 2), "")[:3]
            name = f"model.layers.{number}.{names[part]}" if part in names and number.isdecimal() else None
        if name is None or kind not in ("weight", "bias"):
            raise ValueError(f"{path}: unexpected tensor {info.name!r}; it is not supported")
        yield f"{name}.{kind}", info


def _permuted_heads(config: Mapping[str, Any]) -> Mapping[str, int]:
    """The heads of the tensors whose rows are permuted, which only those of Llama are."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return heads if config["model_type"] == "llama" else {}


def _unpermuted(path: str | Path, info: TensorInfo, values: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head in the order of Hugging Face, where rotated pairs are half a head apart.

    llama.cpp stores the two rows of a pair next to each other. ValueError where there are no pairs.
    """
    if len(values) % (2 * num_heads):
        raise ValueError(f"{path}: tensor {info.name!r} is {list(info.shape)}, no pairs of rows in {num_heads} heads")
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


class _Fields:
    """The metadata of the architecture; ValueError names keys that are missing or no numbers."""

    def __init__(self, header: Header) -> None:
        self.arch = header.metadata.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"general.architecture is {self.arch!r}; supported are {', '.join(ARCHITECTURES)}")
        self._metadata = header.metadata

    def get(self, key: str, fallback: Any = None) -> Any:
        return self._metadata.get(f"{self.arch}.{key}", fallback)

    def number(self, key: str, fallback: float | None = None) -> float:
        value = self.get(key, fallback)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"{self.arch}.{key} is {str(value)[:80]!r}, expected one positive number")
        return value

    def count(self, key: str, fallback: int | None = None) -> int:
        value = self.number(key, fallback)
        if not isinstance(value, int):
            raise ValueError(f"{self.arch}.{key} is {value!r}, expected an integer")
        return value


def _config(path: str | Path, header: Header) -> dict[str, Any]:
    fields, metadata, names = _Fields(header), header.metadata, header.tensors
    arch = str(fields.arch)
    if fields.get("expert_count", 0):
        raise ValueError(f"{arch}.expert_count is {fields.get('expert_count')}, and experts are not supported")
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[arch]], "model_type": arch}
    config |= {ours: fields.count(theirs) for theirs, ours in SIZES.items()}
    config["num_key_value_heads"] = fields.count("attention.head_count_kv", config["num_attention_heads"])
    config["head_dim"] = _head_dim(fields, config, names)
    config["rms_norm_eps"] = _shortest(fields.number("attention.layer_norm_rms_epsilon"))
    config["rope_theta"] = _shortest(fields.number("rope.freq_base", 10_000.0))
    config["rope_scaling"] = _rope_scaling(path, header, fields, config)
    window = fields.get("attention.sliding_window", 0)
    if arch == GEMMA3:
        config |= _gemma3(fields, config)
    elif window and window < config["max_position_embeddings"]:
        raise ValueError(f"{arch}.attention.sliding_window is {window}, shorter than the context")
    if "token_embd.weight" not in names:
        raise ValueError("there is no tensor 'token_embd.weight'")
    config["vocab_size"] = names["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in names
    if arch != "qwen2":  # Qwen2 always has these biases, and has no key for them
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    return config | _token_ids(metadata)


def _gemma3(fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is not as in Llama. A file does not say by what scores are divided: llama.cpp knows the models (27B has 62
    layers). Every sixth layer has no window."""
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.count("attention.sliding_window"),
    }


def _head_dim(fields: _Fields, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """The head dimension that the file names, or else the one that its first layer has."""
    turning = fields.get("rope.dimension_count")
    first = tensors.get("blk.0.attn_q.weight")
    fallback = (config["hidden_size"] if first is None else first.shape[0]) // config["num_attention_heads"]
    dim = fields.count("attention.key_length", fallback)
    if fields.get("attention.value_length", dim) != dim:
        raise ValueError(f"{fields.arch}.attention.value_length is not {fields.arch}.attention.key_length ({dim})")
    if turning is not None and turning != dim:
        raise ValueError(
            f"{fields.arch}.rope.dimension_count is {turning}; only rotating all {dim} dimensions is supported"
        )
    return dim


def _rope_scaling(
    path: str | Path, header: Header, fields: _Fields, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    key = "rope.scale_linear" if fields.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = fields.number(key) if fields.get(key) else 1.0
    kind = fields.get("rope.scaling.type", "linear")  # the default of llama.cpp
    if kind not in ("none", "linear") or fields.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError(f"{fields.arch}.rope.scaling.type is {kind!r}; supported are 'none' and 'linear'")
    linear = {"rope_type": "linear", "factor": _shortest(factor)} if kind == "linear" and factor != 1.0 else None
    info = header.tensors.get(ROPE_FREQS)
    if info is None:
        return linear
    if linear is not None or info.kind.name != "F32" or info.shape != (config["head_dim"] // 2,):
        raise ValueError(f"tensor {ROPE_FREQS!r} is no scaling as in Llama 3")
    found = np.fromfile(path, np.float32, info.shape[0], offset=info.start)
    return _llama3(found, fields, config)


def _llama3(found: np.ndarray, fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scaling that yields the file's factors, one per rotated pair; None if all are 1."""
    if (found == 1).all():
        return None
    given = fields.get("rope.scaling.original_context_length", LLAMA3["original_max_position_embeddings"])
    scaling = {"rope_type": "llama3", "factor": round(float(found.max()), 4)} | LLAMA3
    scaling["original_max_position_embeddings"] = given
    if not np.allclose(found, _llama3_factors(config["rope_theta"], config["head_dim"], scaling), rtol=1e-4):
        raise ValueError(
            f"tensor {ROPE_FREQS!r} is no scaling as in Llama 3 with "
            + ", ".join(f"{key} {scaling[key]}" for key in LLAMA3)
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> list[float]:
    """The factors by which the wavelengths of pairs grow (convert_hf_to_gguf.py, generate_extra_tensors)."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    factors = []
    for pair in range(0, head_dim, 2):
        turns = scaling["original_max_position_embeddings"] * theta ** (-pair / head_dim) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """BOS, padding, and the tokens that end a text: EOS, and the end of a turn or message if the file names them.

    llama.cpp also finds such tokens by their text; transformers takes only EOS.
    """
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    if not ends:
        raise ValueError("tokenizer.ggml.eos_token_id is missing: nothing would end a text")
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["padding"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True))
