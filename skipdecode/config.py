"""The shape of an OPT model, read from a Hugging Face `config.json`. No torch here: a head node can price a job.

Field names are those of `transformers.OPTConfig`. What OPT has and we do not run (other activations, untied heads) is
refused by name instead of being ignored.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Quantization = Literal["int8"]
"""Of a model that decodes: weights as whole numbers of 8 bits times a scale per output; the embedding stays."""

POSITION_OFFSET = 2  # Hugging Face OPTLearnedPositionalEmbedding: the table has two rows more than positions

# Released shapes (metaseq opt_job_constants.py): layers, hidden, heads; ffn = 4 x hidden.
RELEASED = {
    "opt-125m": (12, 768, 12),
    "opt-350m": (24, 1024, 16),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
}

# The fields of which every one is a size: config.json may come from anywhere.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "ffn_dim",
    "num_attention_heads",
    "max_position_embeddings",
    "word_embed_proj_dim",
)


@dataclass(frozen=True)
class SwiftKVConfig:
    """`swiftkv` in config.json: K/V of layers >= `kv_layers` come from the state that enters that layer."""

    kv_layers: int
    group_size: int = 1
    """Neighbouring layers that share one K/V (AcrossKV)."""

    @classmethod
    def from_dict(cls, raw: Any) -> "SwiftKVConfig":
        if not isinstance(raw, dict) or not raw.keys() <= {"kv_layers", "group_size"} or "kv_layers" not in raw:
            raise ValueError(f"swiftkv is {raw!r}, expected kv_layers and group_size")
        for key, value in raw.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"swiftkv.{key} is {value!r}, expected a positive integer")
        return cls(**raw)

    def check(self, config: "OPTConfig") -> None:
        """ValueError when a model of that shape cannot have it."""
        if self.kv_layers > config.num_hidden_layers:
            raise ValueError(
                f"swiftkv.kv_layers is {self.kv_layers}, and the model has {config.num_hidden_layers} layers"
            )
        if self.num_shared(config) % self.group_size:
            raise ValueError(
                f"swiftkv.group_size is {self.group_size}, which does not divide the {self.num_shared(config)} layers "
                f"from kv_layers={self.kv_layers} on"
            )
        if not config.do_layer_norm_before:
            raise ValueError(
                "swiftkv needs norms before the blocks, and this model (as OPT-350m) has them behind: no norm of a "
                "layer can stand for norm_swiftkv"
            )

    def num_shared(self, config: "OPTConfig") -> int:
        """Layers whose K/V come from below."""
        return config.num_hidden_layers - self.kv_layers

    def num_groups(self, config: "OPTConfig") -> int:
        return self.num_shared(config) // self.group_size


@dataclass(frozen=True)
class OPTConfig:
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int | None = None
    """Width of the embeddings; differs from hidden_size in 350m only. None: hidden_size."""
    do_layer_norm_before: bool = True
    """False in 350m: norms come after each residual, and there is no last norm."""
    remove_final_layer_norm: bool = False
    """`_remove_final_layer_norm` in old checkpoints."""
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    bos_token_id: int = 2
    eos_token_id: int = 2
    pad_token_id: int = 1
    init_std: float = 0.02
    torch_dtype: str = "float32"
    """Type of the stored weights."""
    skip_decode: dict[str, Any] | None = field(default=None, hash=False)
    """The schedule that the checkpoint was tuned for (keys of `decode:` in a job's configuration)."""

    ffn_skip: dict[str, Any] | None = field(default=None, hash=False)
    """The feed-forward blocks that calibration found to matter least: `layers`, `warmup_tokens`, `num_layers`."""
    swiftkv: SwiftKVConfig | None = None
    """The extra projections that the checkpoint has; they run when the prefill asks for them."""

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1) and not (name == "word_embed_proj_dim" and value is None):
                raise ValueError(f"{name} is {value!r}, expected a positive integer")
        if self.swiftkv is not None:
            self.swiftkv.check(self)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def embed_dim(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    def kv_layers(self, prefill: str) -> int | None:
        """Where a prompt stops under `prefill.method`; None: it runs all layers."""
        return self.swiftkv.kv_layers if prefill == "swiftkv" and self.swiftkv is not None else None

    @property
    def kv_group_size(self) -> int:
        """Neighbouring upper layers that share K/V where SwiftKV runs."""
        return 1 if self.swiftkv is None else self.swiftkv.group_size

    @property
    def has_final_norm(self) -> bool:
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @classmethod
    def released(cls, name: str) -> "OPTConfig":
        """The shape of a released model, e.g. `opt-1.3b`."""
        if name not in RELEASED:
            raise ValueError(f"unknown shape {name!r}; known: {', '.join(RELEASED)}")
        layers, hidden, heads = RELEASED[name]
        is_350m = name == "opt-350m"
        return cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            ffn_dim=4 * hidden,
            word_embed_proj_dim=512 if is_350m else None,
            do_layer_norm_before=not is_350m,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "OPTConfig":
        """Reads `folder/config.json`; ValueError when it is absent or not an OPT we can run."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; expected a Hugging Face OPT folder") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "OPTConfig":
        """From the contents of a Hugging Face `config.json`."""
        if not isinstance(raw, dict):
            raise ValueError(f"expected a mapping, got {type(raw).__name__}")
        if raw.get("model_type") != "opt":
            raise ValueError(f"model_type is {raw.get('model_type')!r}, expected 'opt'")
        _refuse(raw, "activation_function", "relu")
        _refuse(raw, "tie_word_embeddings", True)
        if raw.get("quantization_config"):
            raise ValueError("quantization_config is set, and this version cannot run it")
        if raw.get("swiftkv") is not None:
            raw = raw | {"swiftkv": SwiftKVConfig.from_dict(raw["swiftkv"])}
        renamed = {"remove_final_layer_norm": "_remove_final_layer_norm", "torch_dtype": "dtype"}
        known = {
            name: raw[renamed.get(name, name)] for name in cls.__dataclass_fields__ if renamed.get(name, name) in raw
        }
        known.setdefault("torch_dtype", raw.get("torch_dtype", "float32"))
        eos = known.get("eos_token_id", 2)
        if not isinstance(eos, int):
            raise ValueError(f"eos_token_id is {eos!r}, expected one integer")
        return cls(**{name: value for name, value in known.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that `transformers.OPTForCausalLM` opens."""
        raw: dict[str, Any] = {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_function": "relu",
            "tie_word_embeddings": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
        }
        raw |= {name: getattr(self, name) for name in self.__dataclass_fields__}
        raw["word_embed_proj_dim"] = self.embed_dim
        raw["_remove_final_layer_norm"] = raw.pop("remove_final_layer_norm")
        raw["swiftkv"] = None if self.swiftkv is None else vars(self.swiftkv)
        for key in ("skip_decode", "ffn_skip", "swiftkv"):
            if raw[key] is None:
                del raw[key]
        return raw


def _refuse(raw: dict[str, Any], key: str, only: Any) -> None:
    if raw.get(key, only) != only:
        raise ValueError(f"{key} is {raw[key]!r}; only {only!r} is supported")
