"""`DecoderConfig`: the shape of a model as the decoder sees it, whatever its family.

A family (`skipdecode.families`) is a subclass: its fields are those of its Hugging Face `config.json`, its properties
describe the layers. A key that asks for something unsupported is refused by name, never ignored. No torch, so that a
head node can price a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from skipdecode.config.json_files import check_flag, check_mapping, check_mappings, check_number, check_size, read_eos
from skipdecode.config.rope import Rope

MAX_LOGPROBS = 20  # most likely tokens reported for each position
KVCacheDtype = Literal["auto", "fp8"]
"""The type of keys and values: that of hidden states, or 8 bits."""
Quantization = Literal["int8", "fp8", "int4"]
WEIGHT_BYTES: dict[Quantization, float] = {"int8": 1, "fp8": 1, "int4": 18 / 32}
"""Bytes per weight while decoding. Those of 8 bits have one scale per output channel, those of 4 bits one per block of
32 inputs, beside a head of HEAD_BYTES; the embedding is not quantised."""
HEAD_BYTES = 34 / 32
"""Bytes per weight of the LM head beside weights of 4 bits."""
ON_CPUS: tuple[Quantization, ...] = ("int8", "int4")

OWN_KEYS = ("skip_decode", "trained_schedules", "ffn_skip", "drafts", "swiftkv")
"""Keys of config.json that transformers does not know: what training and calibration have found."""

KV_ALIGNMENT = 16
"""Elements that every address and stride of a KV cache is a multiple of, so that kernels load 16 bytes at a time."""

FeedForwardKind = Literal["relu", "swiglu", "geglu"]
"""fc2(relu(fc1(x))), or fc2(act(gate(x)) * up(x)) with SiLU, or with GELU's approximation by tanh."""

Implementation = Literal["own", "transformers"]
"""Whose code runs a model's layers: a family of ours, or transformers (`skipdecode.model.wrapped`)."""
WantedImplementation = Literal["auto", "own", "transformers"]
"""`auto`: a family of ours where one takes the model, else transformers."""

Trainable = Literal["all", "swiftkv"]
"""What training changes: all weights, or only those that were added to the model for SwiftKV."""

Parts = Mapping[str, tuple[str, ...]]
"""Our module -> its Hugging Face names, in the order of its rows; several where ours is a fused weight."""


@dataclass(frozen=True)
class SwiftKVConfig:
    """`swiftkv` in config.json: keys and values of layers >= `kv_layers` come from the input of layer `kv_layers`."""

    kv_layers: int
    group_size: int = 1
    """Neighbouring layers that share one K/V (AcrossKV)."""

    @classmethod
    def from_dict(cls, raw: Any) -> "SwiftKVConfig":
        if not isinstance(raw, dict) or not raw.keys() <= {"kv_layers", "group_size"} or "kv_layers" not in raw:
            raise ValueError(f"swiftkv is {raw!r}, expected kv_layers and group_size")
        return cls(**{key: check_size(f"swiftkv.{key}", value) for key, value in raw.items()})

    def check(self, config: "DecoderConfig") -> None:
        """Raises ValueError if a model of that shape cannot have it."""
        if self.kv_layers > config.num_hidden_layers:
            raise ValueError(
                f"swiftkv.kv_layers is {self.kv_layers}, and the model has {config.num_hidden_layers} layers"
            )
        if self.num_shared(config) % self.group_size:
            raise ValueError(
                f"swiftkv.group_size is {self.group_size}, which does not divide the {self.num_shared(config)} layers "
                f"from kv_layers={self.kv_layers} on"
            )
        if (why := config.why_no_swiftkv) is not None:
            raise ValueError(f"swiftkv needs {why}")

    def num_shared(self, config: "DecoderConfig") -> int:
        """Layers whose keys and values come from a lower layer."""
        return config.num_hidden_layers - self.kv_layers

    def num_groups(self, config: "DecoderConfig") -> int:
        return self.num_shared(config) // self.group_size


@dataclass(frozen=True)
class TokenizerRules:
    """What is true of a family's tokenizers beyond what their files say."""

    class_name: str = ""
    """The class in transformers, if the files do not name one."""
    is_class_fixed: bool = False
    """Use that class even if the files name another."""
    is_file_alone: bool = False
    """Use tokenizer.json as it is, whatever class the files name."""
    is_opt: bool = False
    """Every text begins with the BOS of config.json, the first four tokens of the vocabulary are special, and instead
    of a tokenizer.json there may be vocab.json and merges.txt."""


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a model. Widths are numbers, not bytes."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The class in `transformers` that opens what we save."""
    sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    )  # fmt: skip
    """Fields that must be positive integers."""
    nullable_sizes: ClassVar[tuple[str, ...]] = ()
    """Those of them that may be null in config.json."""
    prefix: ClassVar[str]
    """Prefix of the Hugging Face names below."""
    layer_parts: ClassVar[Parts]
    """Names inside `layers.I.`."""
    model_parts: ClassVar[Parts]
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Keys of config.json by the name of a released model; benchmarks give such shapes random weights."""
    ignored_tensors: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensor names that are ignored."""
    position_offset: ClassVar[int] = 0
    """Rows in the table of learned positions before the one of position 0."""
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules()

    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] = 2
    """(): no token ends a text."""
    pad_token_id: int | None = None
    init_std: float = 0.02
    torch_dtype: str = "float32"
    """The type of the stored weights."""
    skip_decode: dict[str, Any] | None = field(default=None, hash=False)
    """The schedule that the checkpoint was tuned for (keys of `decode:` in a job's configuration)."""
    trained_schedules: list[dict[str, Any]] | None = field(default=None, hash=False)
    """All schedules of its last training, if known (entries of `train.schedules`)."""
    ffn_skip: dict[str, Any] | None = field(default=None, hash=False)
    """The feed-forward blocks that matter least, found by calibration: `layers`, `warmup_tokens`, `num_layers`."""
    drafts: dict[str, Any] | None = field(default=None, hash=False)
    """The drafts for lossless decoding that calibration found (`skipdecode.schedules.lossless.StoredDrafts`)."""
    swiftkv: SwiftKVConfig | None = None
    """The extra projections of the checkpoint, which run if the prefill asks for them."""

    def __post_init__(self) -> None:
        for name in self.sizes:
            check_size(name, getattr(self, name))
        if self.swiftkv is not None:
            self.swiftkv.check(self)
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    # --- the layers

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values; several query heads may share one (GQA)."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        """Heads of keys and values of a layer, and the widths of a head's keys and of its values."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def ffn_dim(self) -> int:
        """Inner width of a feed-forward block."""
        raise NotImplementedError

    @property
    def mlp(self) -> FeedForwardKind:
        raise NotImplementedError

    @property
    def is_gated(self) -> bool:
        """The feed-forward block has a gate projection."""
        return self.mlp != "relu"

    @property
    def norm(self) -> Literal["layer", "rms"]:
        raise NotImplementedError

    @property
    def norm_epsilon(self) -> float:
        return 1e-5

    @property
    def norm_affine(self) -> bool:
        """Norms have weights."""
        return True

    @property
    def is_pre_norm(self) -> bool:
        """Norms come before the blocks; otherwise after the residuals (OPT-350m)."""
        return True

    @property
    def has_final_norm(self) -> bool:
        return True

    @property
    def qkv_bias(self) -> bool:
        return False

    @property
    def out_bias(self) -> bool:
        return False

    @property
    def mlp_bias(self) -> bool:
        return False

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys of each head are normed before the rotary embedding (Qwen3)."""
        return False

    @property
    def has_sublayer_norms(self) -> bool:
        """What attention and feed-forward give is normed before it is added to the residual (Gemma)."""
        return False

    @property
    def rope(self) -> Rope | None:
        """Rotary positions; None: learned ones, which are added to the embedding."""
        return None

    def layer_rope(self, layer: int) -> Rope | None:
        """Those of one layer."""
        return self.rope

    def layer_window(self, layer: int) -> int | None:
        """How many of the newest tokens, its own included, a token attends to in a layer; None: all of them."""
        return None

    @property
    def has_learned_positions(self) -> bool:
        """Positions have embeddings, whose weights count."""
        return self.rope is None

    # --- embedding and head

    @property
    def embed_dim(self) -> int:
        """Width of the embedding."""
        return self.hidden_size

    @property
    def embed_scale(self) -> float:
        """The factor of embeddings, which a tied head does not have."""
        return 1.0

    @property
    def has_tied_head(self) -> bool:
        """The head is the embedding."""
        return True

    # --- weights

    def folded(self, part: str) -> tuple[float, float]:
        """(scale, offset) with which weights of `part`, the end of a Hugging Face name, are stored here: a multiplier
        that the model applies to its outputs, or the 1 that it adds to the weights of a norm."""
        return 1.0, 0.0

    # --- what stands around the layers

    @property
    def implementation(self) -> Implementation:
        """Whose layers run it."""
        return "own"

    @property
    def why_no_swiftkv(self) -> str | None:
        """What SwiftKV would need and the model does not have; None if it can have SwiftKV."""
        if self.is_pre_norm:
            return None
        return (
            "norms before the blocks, and this model (as OPT-350m) has them after: no norm of a layer can stand for "
            "norm_swiftkv"
        )

    @property
    def why_whole_layers(self) -> str | None:
        """Why layers run whole or not at all, so that none is without its feed-forward block; None if they need not."""
        return None

    @property
    def tokenizer_rules(self) -> TokenizerRules:
        return self.tokenizer

    # --- derived

    @property
    def q_dim(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    @property
    def filler_token_id(self) -> int:
        """A valid token id for padding, which is never attended to."""
        wanted = (self.pad_token_id, *self.eos_token_ids)  # some checkpoints have -1, or an id beyond the vocabulary
        return next((token for token in wanted if token is not None and 0 <= token < self.vocab_size), 0)

    @property
    def default_prefill(self) -> Literal["full", "swiftkv"]:
        """The `prefill.method` that the checkpoint was released to run with."""
        return "full"

    def swiftkv_layer(self, prefill: str) -> int | None:
        """The layer before which prompt tokens stop under `prefill.method`; None: they run all layers."""
        return self.swiftkv.kv_layers if prefill == "swiftkv" and self.swiftkv is not None else None

    @property
    def kv_group_size(self) -> int:
        """Neighbouring upper layers that share keys and values under SwiftKV."""
        return 1 if self.swiftkv is None else self.swiftkv.group_size

    # --- config.json

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Reads the contents of a Hugging Face `config.json` of this family; ValueError names the key at fault."""
        return cls(**cls.read_fields(raw))

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields of this class that `raw` has, with the checks that all families share."""
        if quantized := raw.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ValueError(
                f"quantization_config is set ({method}), and quantised weights are not supported; take the checkpoint "
                "that it was made from, or a GGUF file"
            )
        for name in cls.sizes:
            if name in raw and raw[name] is None and name not in cls.nullable_sizes:
                raise ValueError(f"{name} is null, expected a positive integer")
        known = {name: raw[name] for name in (one.name for one in fields(cls)) if raw.get(name) is not None}
        for one in fields(cls):
            if one.type is bool and one.name in known:
                check_flag(one.name, known[one.name])
            if one.type is float and one.name in known:
                check_number(one.name, known[one.name])
        if (dtype := raw.get("dtype") or raw.get("torch_dtype")) is not None:
            known["torch_dtype"] = dtype
        for name in ("skip_decode", "drafts"):
            check_mapping(name, known.get(name))
        check_mappings("trained_schedules", known.get("trained_schedules"))
        if "swiftkv" in known:
            known["swiftkv"] = SwiftKVConfig.from_dict(known["swiftkv"])
        if "eos_token_id" in raw:
            known["eos_token_id"] = read_eos("eos_token_id", raw["eos_token_id"])
        return known

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that `transformers` opens."""
        raw: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        raw |= {name: getattr(self, name) for name in (one.name for one in fields(self))}
        ends = self.eos_token_id
        raw["eos_token_id"] = ends if isinstance(ends, int) else list(ends) or None
        raw["swiftkv"] = None if self.swiftkv is None else vars(self.swiftkv)
        for key in OWN_KEYS:
            if raw[key] is None:
                del raw[key]
        return raw
