"""A naive decoder over Hugging Face's own modules: the named reference of every decode path, and small helpers.

One row without padding: plain K/V lists per layer, softmax written out, the prompt at full depth, step k with the
layers of the definition. Slow and plain on purpose; it shares no code with `skipdecode`.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from skipdecode.generate import BatchResult, Request
from skipdecode.plan import Schedule
from skipdecode.sampling import Sampling


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


class NaiveRow:
    """One row, HF's modules called by hand: no padding, no fused projections, no SDPA, keys and values in lists."""

    def __init__(self, reference: OPTForCausalLM) -> None:
        self.decoder, self.lm_head = reference.model.decoder, reference.lm_head
        self.keys: list[list[Tensor]] = [[] for _ in self.decoder.layers]
        self.values: list[list[Tensor]] = [[] for _ in self.decoder.layers]
        self.position = self.ffns_run = 0
        self.cosines: list[float] = []

    def feed(
        self, token: int, layers: Sequence[int], skip: FFNRule | None = None, skipped: Set[int] = frozenset()
    ) -> Tensor:
        """Logits [V] behind `token`, which runs `layers` only, without the feed-forward blocks of `skipped`.

        FFN-SkipLLM by its definition: a token starts unflipped, flips at the first block in the middle region that
        leaves its state as it was, and from there on the middle region is attention alone.
        """
        d, is_flipped = self.decoder, False
        h = d.embed_tokens(torch.tensor(token))
        if d.project_in is not None:
            h = d.project_in(h)
        h = h + d.embed_positions.weight[self.position + 2]
        for i in layers:
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

    def attend(self, i: int, x: Tensor) -> Tensor:
        attn = self.decoder.layers[i].self_attn
        heads, dim = attn.num_heads, attn.head_dim
        self.keys[i].append(attn.k_proj(x).view(heads, dim))
        self.values[i].append(attn.v_proj(x).view(heads, dim))
        k, v = torch.stack(self.keys[i], 1), torch.stack(self.values[i], 1)  # [H, S, K]
        q = attn.q_proj(x).view(heads, 1, dim) / math.sqrt(dim)
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
) -> tuple[list[int], int, list[float]]:
    """Tokens, feed-forward blocks that decode steps ran, cosines looked at. `skipped(k)`: blocks left out of step k."""
    row, num_layers = NaiveRow(reference), len(reference.model.decoder.layers)
    with torch.inference_mode():
        for token in prompt:
            logits = row.feed(token, range(num_layers))
        tokens, row.ffns_run = [int(logits.argmax())], 0
        for k in range(num_new - 1):
            if tokens[-1] == eos:
                break
            rule = skip if skip is not None and k >= skip.warmup_tokens else None
            tokens.append(int(row.feed(tokens[-1], schedule.step(k).layers, rule, skipped(k)).argmax()))
    return tokens, row.ffns_run, row.cosines


def tokens_of(result: BatchResult) -> list[list[int]]:
    return [c.tokens for c in result.completions]
