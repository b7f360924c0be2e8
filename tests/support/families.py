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
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "stablelm": {"use_qkv_bias": True},
    "stablelm, whole heads turn": {"partial_rotary_factor": 1.0},
}  # fmt: skip
"""Keys beside BASE. A name begins with the `model_type`. OPT has tests of its own."""


def family_config(name: str) -> dict[str, Any]:
    """The contents of the `config.json` of one of FAMILY_MODELS."""
    return BASE | {"model_type": name.partition(",")[0]} | FAMILY_MODELS[name]
