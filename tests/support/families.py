"""The one list of model families in the tests: narrow models by what their `config.json` has."""

from typing import Any

L = 6  # layers
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": L,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, as many heads of keys, biases, tied head": {
        "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "llama, one head of keys for 8, llama3 scaling": {
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "rope_parameters": LLAMA3,
    },
    "llama, linear scaling, several ends": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        "eos_token_id": [2, 7, 9, 31],
    },
    "llama, yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "llama, dynamic scaling": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    "mistral": {"sliding_window": None},
    "mistral, a window": {"sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, windows in upper layers": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "qwen3": {"head_dim": 32},
    "stablelm": {"use_qkv_bias": True},
    "stablelm, whole heads turn": {"partial_rotary_factor": 1.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24},
    "gemma3_text, other layers have windows, linear scaling": {
        "head_dim": 64, "num_key_value_heads": 1, "sliding_window": 4, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"sliding_window": 9},
    "phi3, longrope, three quarters turn": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "smollm3": {"tie_word_embeddings": True},
    "smollm3, windows where nothing turns": {
        "use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 0, 1, 0, 1],
    },
    "granite": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 8.0,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
}  # fmt: skip
"""Keys beside BASE. A name begins with the `model_type`. OPT has tests of its own."""


def family_config(name: str) -> dict[str, Any]:
    """The contents of the `config.json` of one of FAMILY_MODELS."""
    return BASE | {"model_type": name.partition(",")[0]} | FAMILY_MODELS[name]
