"""A naive decoder of Llama and its relatives over the plain tensors of a folder: the reference of every decode path.

One row without padding, one token at a time, keys and values in lists, softmax written out, positions turned as complex
numbers. Slow and plain on purpose; it shares no code with `skipdecode`, and none with Hugging Face.
"""

import json
import math
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from skipdecode.schedules.schedule import Schedule
from tests.support.naive import FFNRule


class NaiveLlama:
    def __init__(self, folder: Path, *, has_swiftkv: bool = False) -> None:
        files = [load_file(path) for path in folder.glob("*.safetensors")]
        self.tensors = {name: tensor.float() for file in files for name, tensor in file.items()}
        raw = json.loads((folder / "config.json").read_text())
        self.num_layers, self.is_layer_norm = raw["num_hidden_layers"], "model.norm.bias" in self.tensors
        self.epsilon = raw["layer_norm_eps" if self.is_layer_norm else "rms_norm_eps"]
        self.heads, self.groups = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.dim = raw.get("head_dim") or raw["hidden_size"] // self.heads
        self.is_gemma, self.raw = raw["model_type"] == "gemma3_text", raw
        self.turning = int(self.dim * turning_share(raw))
        self.frequencies = [frequencies(raw, self.turning, self.kind_of(i)) for i in range(self.num_layers)]
        for i, has_rope in enumerate(raw.get("no_rope_layers", [])[: self.num_layers]):
            if not has_rope:
                self.frequencies[i] = (torch.zeros(self.turning // 2), 1.0)
        self.residual, self.scale = raw.get("residual_multiplier", 1.0), raw.get("attention_multiplier", self.dim**-0.5)
        if self.is_gemma:
            self.scale = raw["query_pre_attn_scalar"] ** -0.5
        swiftkv = raw.get("swiftkv") if has_swiftkv else {"kv_layers": self.num_layers, "group_size": 1}
        if swiftkv is True:  # Snowflake's keys
            swiftkv = {"kv_layers": raw["num_key_value_layers"], "group_size": raw["key_value_group_size"]}
        self.first, self.size = swiftkv["kv_layers"], swiftkv["group_size"]
        self.keys: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.position = self.ffns_run = 0
        self.cosines: list[float] = []

    def kind_of(self, layer: int) -> str:
        """Of `layer_types`; a model without it has a window in all layers or in none."""
        kinds = self.raw.get("layer_types")
        return "sliding_attention" if kinds is None else kinds[layer]

    def window_of(self, layer: int) -> int:
        window = self.raw.get("sliding_window") if self.raw.get("use_sliding_window", True) else None
        return window if window is not None and self.kind_of(layer) == "sliding_attention" else 10**9

    def product(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return self.tensors[f"{name}.weight"] @ x + (0 if bias is None else bias)

    def projected(self, layer: int, kind: str, x: Tensor) -> Tensor:
        """Queries, keys or values, whose weights may be the rows of one."""
        name = f"model.layers.{layer}.self_attn"
        if f"{name}.qkv_proj.weight" not in self.tensors:
            return self.product(f"{name}.{kind}_proj", x)
        ends = [self.heads * self.dim, (self.heads + self.groups) * self.dim]
        return self.product(f"{name}.qkv_proj", x).tensor_split(ends)["qkv".index(kind)]

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.is_layer_norm else x
        weight = self.tensors[f"{name}.weight"] + (1 if self.is_gemma else 0)
        x = x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * weight
        return x + self.tensors[f"{name}.bias"] if self.is_layer_norm else x

    def heads_of(self, layer: int, kind: str, flat: Tensor) -> Tensor:
        """[heads, K], normed where the model does, the first numbers of each turned to this position."""
        x, name = flat.view(-1, self.dim), f"model.layers.{layer}.self_attn.{kind}_norm"
        x = self.norm(name, x) if f"{name}.weight" in self.tensors else x
        half, rest = self.turning // 2, x[:, self.turning :]
        turns, factor = self.frequencies[layer]
        apply_rotary = torch.complex(x[:, :half], x[:, half : self.turning]) * torch.polar(
            torch.full((half,), factor), self.position * turns
        )
        return torch.cat([apply_rotary.real, apply_rotary.imag, rest], dim=1)

    def feed(
        self,
        token: int,
        layers: Sequence[int],
        skip: FFNRule | None = None,
        skipped: Set[int] = frozenset(),
        stops: bool = False,
    ) -> Tensor:
        """Logits [V] behind `token`; arguments as in `tests.support.naive.NaiveRow.feed`."""
        h, is_flipped = self.tensors["model.embed_tokens.weight"][token], False
        h = h * (h.shape[0] ** 0.5 if self.is_gemma else self.raw.get("embedding_multiplier", 1.0))
        upper = [i for i in layers if i >= self.first]
        for i in layers:
            name = f"model.layers.{i}"
            if i == min(upper, default=-1):
                self.share(upper, h)
            if i in upper and stops:
                break
            h = h + self.added(i, "post_attention", self.attend(i, self.norm(f"{name}.input_layernorm", h)))
            is_middle = skip is not None and skip.cold_start <= i < self.num_layers - skip.cold_end
            if (is_middle and is_flipped) or i in skipped:
                continue
            self.ffns_run += 1
            x = self.norm(f"{name}.{'pre_feedforward' if self.is_gemma else 'post_attention'}_layernorm", h)
            if f"{name}.mlp.gate_up_proj.weight" in self.tensors:
                gate, up = self.product(f"{name}.mlp.gate_up_proj", x).chunk(2)
            else:
                gate, up = self.product(f"{name}.mlp.gate_proj", x), self.product(f"{name}.mlp.up_proj", x)
            made = self.product(f"{name}.mlp.down_proj", self.activated(gate) * up)
            after = h + self.added(i, "post_feedforward", made)
            if is_middle:
                assert skip is not None
                self.cosines.append(float((h @ after) / (h.norm() * after.norm())))
                is_flipped = self.cosines[-1] >= skip.threshold
            h = after
        self.position += 1
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return head @ self.norm("model.norm", h) / self.raw.get("logits_scaling", 1.0)

    def activated(self, gate: Tensor) -> Tensor:
        if not self.is_gemma:
            return gate * gate.sigmoid()
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2

    def added(self, layer: int, which: str, made: Tensor) -> Tensor:
        """What a sublayer adds to the residual."""
        return self.norm(f"model.layers.{layer}.{which}_layernorm", made) if self.is_gemma else made * self.residual

    def share(self, upper: Sequence[int], h: Tensor) -> None:
        """K and V of the layers `upper` from the state that enters the first of them."""
        x = self.norm("model.norm_swiftkv", h)
        for i in upper:
            leader = self.first + (i - self.first) // self.size * self.size
            name = f"model.layers.{leader}.self_attn"
            self.keys[i].append(self.heads_of(leader, "k", self.product(f"{name}.k_proj_swiftkv", x)))
            self.values[i].append(self.product(f"{name}.v_proj_swiftkv", x).view(self.groups, self.dim))

    def attend(self, i: int, x: Tensor) -> Tensor:
        name = f"model.layers.{i}.self_attn"
        if i < self.first:
            self.keys[i].append(self.heads_of(i, "k", self.projected(i, "k", x)))
            self.values[i].append(self.projected(i, "v", x).view(self.groups, self.dim))
        own = self.projected(i, "q", x) if i < self.first else self.product(f"{name}.q_proj_swiftkv", x)
        q, made, seen = self.heads_of(i, "q", own), [], -self.window_of(i)
        for head in range(self.heads):
            group = head * self.groups // self.heads
            k = torch.stack([one[group] for one in self.keys[i][seen:]])  # [S, K]
            v = torch.stack([one[group] for one in self.values[i][seen:]])
            made.append((k @ q[head] * self.scale).softmax(0) @ v)
        return self.product(f"{name}.o_proj", torch.cat(made))


def turning_share(raw: dict) -> float:
    """Of the numbers of a head."""
    places = [raw.get("rope_parameters") or {}, raw]
    return next((found["partial_rotary_factor"] for found in places if "partial_rotary_factor" in found), 1.0)


def frequencies(raw: dict, dim: int, kind: str) -> tuple[Tensor, float]:
    """[K / 2] radians per position, number by number, and the factor of the length; of a layer of that kind."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta")
    if "full_attention" in rope:  # by the kinds of layers
        rope, theta = rope[kind], None
    elif kind == "sliding_attention" and "rope_local_base_freq" in raw:
        rope, theta = {}, raw["rope_local_base_freq"]
    theta = theta or rope["rope_theta"]
    made, scaling, factor = [], rope.get("rope_type"), 1.0
    if scaling == "yarn":
        factor = 1 + 0.1 * math.log(rope["factor"])
    if scaling == "longrope":
        original = raw["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(128 / original) / math.log(original))  # 128 positions in all
    for i in range(0, dim, 2):
        frequency = theta ** (-i / dim)
        if scaling == "linear":
            frequency /= rope["factor"]
        if scaling == "longrope":
            frequency /= rope["short_factor"][i // 2]
        if scaling == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the original context
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)  # how much of it stays as it is
            frequency = (1 - share) * frequency / rope["factor"] + share * frequency
        if scaling == "yarn":
            first, last = (
                dim * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (32, 1)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
            share = 1 - min(max((i // 2 - first) / (last - first), 0.0), 1.0)
            frequency = (1 - share) * frequency / rope["factor"] + share * frequency
        made.append(frequency)
    return torch.tensor(made), factor


def naive_llama(
    folder: Path,
    prompt: list[int],
    schedule: Schedule,
    num_new: int,
    eos: Set[int] = frozenset(),
    skip: FFNRule | None = None,
    skipped: Callable[[int], Set[int]] = lambda k: frozenset(),
    has_swiftkv: bool = False,
) -> tuple[list[int], int, list[float]]:
    """As `tests.support.naive.naive_row`: tokens, feed-forward blocks that decode steps ran, cosines looked at."""
    row = NaiveLlama(folder, has_swiftkv=has_swiftkv)
    with torch.inference_mode():
        for at, token in enumerate(prompt):
            logits = row.feed(token, range(row.num_layers), stops=at < len(prompt) - 1)
        tokens, row.ffns_run = [int(logits.argmax())], 0
        for k in range(num_new - 1):
            if tokens[-1] in eos:
                break
            rule = skip if skip is not None and k >= skip.warmup_tokens else None
            tokens.append(int(row.feed(tokens[-1], schedule.step(k).layers, rule, skipped(k)).argmax()))
    return tokens, row.ffns_run, row.cosines
