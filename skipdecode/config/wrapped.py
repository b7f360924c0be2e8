"""`WrappedConfig`: the shape of a model whose layers are transformers' own (`skipdecode.model.wrapped`).

Its fields are found by looking at the model, not by reading keys, and it travels to tasks that load neither torch nor
transformers.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from skipdecode.config.model import DecoderConfig, FeedForwardKind, Implementation, Parts, TokenizerRules

SWIFTKV_FILE = "swiftkv.safetensors"
"""The weights of SwiftKV, beside those of the model, which transformers opens without them."""


@dataclass(frozen=True)
class Sublayers:
    """The modules of a layer, by their names in it, that FFN-SkipLLM tells apart."""

    attention: str
    feed_forward: tuple[str, ...]
    """Several where experts and a shared one are side by side."""
    attention_outputs: int = 1
    """How many values `attention` gives, of which the first are the states."""
    feed_forward_outputs: int = 1


@dataclass(frozen=True)
class WrappedConfig(DecoderConfig):
    """Of a decoder-only model of any type that transformers knows."""

    model_type: ClassVar[str] = "transformers"
    architecture: ClassVar[str] = "transformers has it"
    prefix: ClassVar[str] = ""
    layer_parts: ClassVar[Parts] = {}
    model_parts: ClassVar[Parts] = {}

    type_name: str = ""
    """`model_type` of its config.json."""
    kv_shapes: tuple[tuple[int, int, int], ...] = ()
    """[L] `kv_shape` of each layer."""
    layer_weights: int = 0
    """Weights of a layer, all experts included; the mean over layers."""
    num_values: int = 0
    """Of all weights and buffers, which transformers takes memory for, whatever the files hold."""
    linears: tuple[tuple[str, int], ...] = ()
    """The linear layers of its layers: the last name and the input width, each pair once."""
    sublayers: tuple[Sublayers, ...] = ()
    """[L] the parts of each layer; empty if the layers run whole or not at all."""
    whole_layers_because: str = ""
    lacks_for_swiftkv: str = ""
    """`why_no_swiftkv`."""
    tie_word_embeddings: bool = False
    has_router_loss: bool = False
    """config.json asks for the loss that balances experts (`output_router_logits`), which no training here adds."""
    rules: TokenizerRules = field(default_factory=TokenizerRules)
    """`tokenizer_rules`: those of our family of that type, where there is one."""

    @property
    def implementation(self) -> Implementation:
        return "transformers"

    @property
    def tokenizer_rules(self) -> TokenizerRules:
        return self.rules

    @property
    def why_whole_layers(self) -> str | None:
        return self.whole_layers_because or None

    @property
    def why_no_swiftkv(self) -> str | None:
        return self.lacks_for_swiftkv or None

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        return self.kv_shapes[layer]

    # What follows is for prices (`skipdecode.cost`): layers are priced as if all were alike, and a mixture of experts
    # as if every token read all of them.

    @property
    def num_kv_heads(self) -> int:
        return 1  # heads may differ from layer to layer; `kv_dim` has what they are together

    @property
    def head_dim(self) -> int:
        return max(width for _, width, _ in self.kv_shapes)

    @property
    def kv_dim(self) -> int:
        """Half of the K and V of a token, the mean over layers."""
        return -(-sum(heads * (k + v) for heads, k, v in self.kv_shapes) // (2 * len(self.kv_shapes)))

    @property
    def ffn_dim(self) -> int:
        attention = 2 * self.hidden_size * (self.q_dim + self.kv_dim)
        return max(1, (self.layer_weights - attention) // (3 * self.hidden_size))

    @property
    def mlp(self) -> FeedForwardKind:
        return "swiglu"

    @property
    def norm(self) -> Literal["layer", "rms"]:
        return "rms"

    @property
    def has_tied_head(self) -> bool:
        return self.tie_word_embeddings

    @property
    def has_learned_positions(self) -> bool:
        return False

    def to_dict(self) -> dict[str, Any]:
        raise AssertionError("transformers writes the config.json of its models (skipdecode.model.wrapped.save)")
