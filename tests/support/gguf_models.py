"""Small GGUF files made with the `gguf` package: random narrow models, and tokenizers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import Tokenizer
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Writer = gguf.GGUFWriter
ARCHITECTURES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip

GEMMA3_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def random_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """256 wide, 4 heads over 2, 2 layers; all weights and biases random."""
    shape = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    shape |= {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    shape |= {"head_dim": 128} if arch == "qwen3" else {}
    if arch == "gemma3":
        shape |= {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 6, "num_hidden_layers": 7}
    config_class, model_class = ARCHITECTURES[arch]
    torch.manual_seed(seed)
    model = model_class(config_class(**shape | {"tie_word_embeddings": False} | overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def write_model(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    extra: Callable[[Writer], None] = lambda writer: None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """As llama.cpp's converter writes it, matrices as `kind`. `extra` writes more; `metadata` without the
    architecture's prefix, integers and floats, None leaves a key out."""
    config, arch = model.config, model.config.model_type.removesuffix("_text")
    writer = Writer(path, arch)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "llama":
        values["rope.dimension_count"] = dim
    if arch in ("qwen3", "gemma3"):
        values |= {"attention.key_length": dim, "attention.value_length": dim}
    if arch == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
    for key, value in (values | dict(metadata or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    extra(writer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            values_of = permuted(name, tensor.numpy(), config)
            is_offset = arch == "gemma3" and "norm" in name
            add_tensor(writer, theirs(name, arch), values_of + 1 if is_offset else values_of, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(name: str, arch: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    names = GEMMA3_NAMES if arch == "gemma3" else NAMES
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{names[part]}.{kind}"


def permuted(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Llama's rows of queries and keys as llama.cpp wants them (convert_hf_to_gguf.py, LlamaModel.permute)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def add_tensor(writer: Writer, name: str, values: np.ndarray, kind: str) -> None:
    """Vectors stay float32. For kinds that the package cannot make: random blocks with finite scales."""
    wanted = GGMLQuantizationType[kind]
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values.astype(np.float32))
    elif kind.endswith(("_K", "_S", "_NL", "XXS")):
        per_block, width = GGML_QUANT_SIZES[wanted]
        draw = np.random.default_rng(values.shape[0])
        blocks = draw.integers(0, 0x3B, (values.shape[0], values.shape[1] // per_block * width), dtype=np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=wanted)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), wanted), raw_dtype=wanted)


def add_byte_level(
    writer: Writer, tokenizer: Tokenizer, pre: str | None, special: Sequence[str], **flags: bool
) -> None:
    """The metadata of a byte-level `tokenizer`; what is added and not `special` is user-defined."""
    raw = json.loads(tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    _add_tokens(writer, tokenizer, special)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]])
    _add_flags(writer, **flags)


def add_sentencepiece(writer: Writer, tokenizer: Tokenizer, special: Sequence[str], **flags: bool) -> None:
    """The metadata of a SentencePiece type `tokenizer`: the earlier a token, the better its score."""
    writer.add_tokenizer_model("llama")
    tokens = _add_tokens(writer, tokenizer, special)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    _add_flags(writer, **flags)


def _add_tokens(writer: Writer, tokenizer: Tokenizer, special: Sequence[str]) -> list[str]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    plain = [gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL for token in tokens]
    types = [kinds[t in special] if t in added or t in special else p for t, p in zip(tokens, plain, strict=True)]
    writer.add_token_types(types)
    return tokens


def _add_flags(writer: Writer, **flags: bool) -> None:
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
