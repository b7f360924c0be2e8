"""A naive decoder of the Llama families over the plain tensors of a folder: the named reference of every decode path.

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
        self.tensors = load_file(folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        self.num_layers, self.is_layer_norm = raw["num_hidden_layers"], "model.norm.bias" in self.tensors
        self.epsilon = raw["layer_norm_eps" if self.is_layer_norm else "rms_norm_eps"]
        self.heads, self.groups = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.dim = raw.get("head_dim") or raw["hidden_size"] // self.heads
        self.turning = int(self.dim * turning_share(raw))
        self.frequencies = frequencies(raw, self.turning)
        swiftkv = raw["swiftkv"] if has_swiftkv else {"kv_layers": self.num_layers, "group_size": 1}
        self.first, self.size = swiftkv["kv_layers"], swiftkv["group_size"]
        self.keys: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.position = self.ffns_run = 0
        self.cosines: list[float] = []

    def product(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return self.tensors[f"{name}.weight"] @ x + (0 if bias is None else bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.is_layer_norm else x
        x = x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.tensors[f"{name}.weight"]
        return x + self.tensors[f"{name}.bias"] if self.is_layer_norm else x

    def heads_of(self, layer: int, kind: str, flat: Tensor) -> Tensor:
        """[heads, K], normed where the model does, the first numbers of each turned to this position."""
        x, name = flat.view(-1, self.dim), f"model.layers.{layer}.self_attn.{kind}_norm"
        x = self.norm(name, x) if f"{name}.weight" in self.tensors else x
        half, rest = self.turning // 2, x[:, self.turning :]
        apply_rotary = torch.complex(x[:, :half], x[:, half : self.turning]) * torch.polar(
            torch.ones(half), self.position * self.frequencies
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
        upper = [i for i in layers if i >= self.first]
        for i in layers:
            name = f"model.layers.{i}"
            if i == min(upper, default=-1):
                self.share(upper, h)
            if i in upper and stops:
                break
            h = h + self.attend(i, self.norm(f"{name}.input_layernorm", h))
            is_middle = skip is not None and skip.cold_start <= i < self.num_layers - skip.cold_end
            if (is_middle and is_flipped) or i in skipped:
                continue
            self.ffns_run += 1
            x = self.norm(f"{name}.post_attention_layernorm", h)
            gate, up = self.product(f"{name}.mlp.gate_proj", x), self.product(f"{name}.mlp.up_proj", x)
            after = h + self.product(f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)
            if is_middle:
                assert skip is not None
                self.cosines.append(float((h @ after) / (h.norm() * after.norm())))
                is_flipped = self.cosines[-1] >= skip.threshold
            h = after
        self.position += 1
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return head @ self.norm("model.norm", h)

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
            self.keys[i].append(self.heads_of(i, "k", self.product(f"{name}.k_proj", x)))
            self.values[i].append(self.product(f"{name}.v_proj", x).view(self.groups, self.dim))
        q = self.heads_of(i, "q", self.product(f"{name}.q_proj" + ("" if i < self.first else "_swiftkv"), x))
        made = []
        for head in range(self.heads):
            group = head * self.groups // self.heads
            k = torch.stack([one[group] for one in self.keys[i]])  # [S, K]
            v = torch.stack([one[group] for one in self.values[i]])
            made.append((k @ q[head] / math.sqrt(self.dim)).softmax(0) @ v)
        return self.product(f"{name}.o_proj", torch.cat(made))


def turning_share(raw: dict) -> float:
    """Of the numbers of a head."""
    places = [raw.get("rope_parameters") or {}, raw]
    return next((found["partial_rotary_factor"] for found in places if "partial_rotary_factor" in found), 1.0)


def frequencies(raw: dict, dim: int) -> Tensor:
    """[K / 2] radians per position, number by number."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta") or rope["rope_theta"]
    made = []
    for i in range(0, dim, 2):
        frequency = theta ** (-i / dim)
        if rope.get("rope_type") == "linear":
            frequency /= rope["factor"]
        if rope.get("rope_type") == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the original context
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)  # how much of it stays as it is
            frequency = (1 - share) * frequency / rope["factor"] + share * frequency
        made.append(frequency)
    return torch.tensor(made)


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
