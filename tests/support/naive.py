"""A naive decoder over Hugging Face's own modules: the named reference of every decode path, and small helpers.

One row without padding: plain K/V lists per layer, softmax written out, the prompt at full depth, step k with the
layers of the definition. Slow and plain on purpose; it shares no code with `skipdecode`.
"""

import json
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import OPTForCausalLM

from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.schedules.schedule import Schedule


@dataclass(frozen=True)
class FFNRule:
    """`decode.ffn_skip` with mode `row`."""

    threshold: float
    cold_start: int
    cold_end: int
    warmup_tokens: int


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[2, *torch.randint(4, vocab, (n - 1,), generator=generator).tolist()] for n in lengths]


def requests_for(prompts: Sequence[list[int]], sampling: Sampling) -> list[Request]:
    return [Request(f"row-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def greedy(num_new: int, **keys: object) -> Sampling:
    return Sampling(max_new_tokens=num_new, **keys)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SwiftKVWeights:
    """SwiftKV by its definition: K/V of layers >= `first` from the state that enters it, in groups of `size`."""

    tensors: dict[str, Tensor]
    first: int
    size: int

    @classmethod
    def load(cls, folder: Path) -> "SwiftKVWeights":
        shape = json.loads((folder / "config.json").read_text())["swiftkv"]
        return cls(load_file(folder / "model.safetensors"), shape["kv_layers"], shape["group_size"])

    def norm(self, h: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"model.decoder.norm_swiftkv.{kind}"] for kind in ("weight", "bias"))
        return torch.nn.functional.layer_norm(h, h.shape, weight, bias)

    def project(self, layer: int, x: str, h: Tensor) -> Tensor:
        name = f"model.decoder.layers.{layer}.self_attn.{x}_proj_swiftkv."
        return self.tensors[name + "weight"] @ h + self.tensors[name + "bias"]

    def leader(self, layer: int) -> int:
        return self.first + (layer - self.first) // self.size * self.size


class NaiveRow:
    """One row, HF's modules called by hand: no padding, no fused projections, no SDPA, keys and values in lists."""

    def __init__(self, reference: OPTForCausalLM, swiftkv: SwiftKVWeights | None = None) -> None:
        self.swiftkv = swiftkv
        self.decoder, self.lm_head = reference.model.decoder, reference.lm_head
        self.keys: list[list[Tensor]] = [[] for _ in self.decoder.layers]
        self.values: list[list[Tensor]] = [[] for _ in self.decoder.layers]
        self.position = self.ffns_run = 0
        self.cosines: list[float] = []

    def feed(
        self,
        token: int,
        layers: Sequence[int],
        skip: FFNRule | None = None,
        skipped: Set[int] = frozenset(),
        stops: bool = False,
    ) -> Tensor:
        """Logits [V] behind `token`, which runs `layers` only, without the feed-forward blocks of `skipped`.

        FFN-SkipLLM by its definition: a token starts unflipped, flips at the first block in the middle region that
        leaves its state as it was, and from there on the middle region is attention alone. SwiftKV: `stops` says that
        the token is one of a prompt and not its last.
        """
        d, is_flipped = self.decoder, False
        h = d.embed_tokens(torch.tensor(token))
        if d.project_in is not None:
            h = d.project_in(h)
        h = h + d.embed_positions.weight[self.position + 2]
        upper = [i for i in layers if self.swiftkv is not None and i >= self.swiftkv.first]
        for i in layers:
            if self.swiftkv is not None and i == min(upper, default=-1):
                self.share(upper, h)
            if i in upper and stops:
                break
            layer, is_pre = d.layers[i], d.layers[i].do_layer_norm_before
            x = self.attend(i, layer.self_attn_layer_norm(h) if is_pre else h)
            h = h + x if is_pre else layer.self_attn_layer_norm(h + x)
            is_middle = skip is not None and skip.cold_start <= i < len(d.layers) - skip.cold_end
            if (is_middle and is_flipped) or i in skipped:
                continue
            self.ffns_run += 1
            after = h + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(h) if is_pre else h)))
            if is_middle:
                cosine = float((h @ after) / (h.norm() * after.norm()))
                self.cosines.append(cosine)
                is_flipped = cosine >= skip.threshold
            h = after if is_pre else layer.final_layer_norm(after)
        self.position += 1
        if d.final_layer_norm is not None:
            h = d.final_layer_norm(h)
        if d.project_out is not None:
            h = d.project_out(h)
        return self.lm_head(h)

    def share(self, upper: Sequence[int], h: Tensor) -> None:
        """K and V of the layers `upper` from the state that enters the first of them."""
        assert self.swiftkv is not None
        x = self.swiftkv.norm(h)
        for i in upper:
            attn, leader = self.decoder.layers[i].self_attn, self.swiftkv.leader(i)
            for kept, name in ((self.keys, "k"), (self.values, "v")):
                kept[i].append(self.swiftkv.project(leader, name, x).view(attn.num_heads, attn.head_dim))

    def attend(self, i: int, x: Tensor) -> Tensor:
        attn = self.decoder.layers[i].self_attn
        heads, dim = attn.num_heads, attn.head_dim
        if self.swiftkv is None or i < self.swiftkv.first:
            self.keys[i].append(attn.k_proj(x).view(heads, dim))
            self.values[i].append(attn.v_proj(x).view(heads, dim))
            q = attn.q_proj(x)
        else:
            q = self.swiftkv.project(i, "q", x)
        k, v = torch.stack(self.keys[i], 1), torch.stack(self.values[i], 1)  # [H, S, K]
        q = q.view(heads, 1, dim) / math.sqrt(dim)
        return attn.out_proj(((q @ k.transpose(1, 2)).softmax(-1) @ v).reshape(-1))


def naive_decode(
    reference: OPTForCausalLM, prompt: list[int], schedule: Schedule, num_new: int, eos: int = 2
) -> list[int]:
    return naive_row(reference, prompt, schedule, num_new, eos)[0]


def naive_row(
    reference: OPTForCausalLM,
    prompt: list[int],
    schedule: Schedule,
    num_new: int,
    eos: int = 2,
    skip: FFNRule | None = None,
    skipped: Callable[[int], Set[int]] = lambda k: frozenset(),
    swiftkv: SwiftKVWeights | None = None,
) -> tuple[list[int], int, list[float]]:
    """Tokens, feed-forward blocks that decode steps ran, cosines looked at. `skipped(k)`: blocks left out of step k."""
    row, num_layers = NaiveRow(reference, swiftkv), len(reference.model.decoder.layers)
    with torch.inference_mode():
        for at, token in enumerate(prompt):
            logits = row.feed(token, range(num_layers), stops=at < len(prompt) - 1)
        tokens, row.ffns_run = [int(logits.argmax())], 0
        for k in range(num_new - 1):
            if tokens[-1] == eos:
                break
            rule = skip if skip is not None and k >= skip.warmup_tokens else None
            tokens.append(int(row.feed(tokens[-1], schedule.step(k).layers, rule, skipped(k)).argmax()))
    return tokens, row.ffns_run, row.cosines


def tokens_of(result: BatchResult) -> list[list[int]]:
    return [c.tokens for c in result.completions]
