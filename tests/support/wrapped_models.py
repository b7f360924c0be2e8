"""Tiny random checkpoints of many model types, made with transformers, and the naive reference of skipping layers.

The reference is the definition, for any model: the positions that run a layer are a prefix of the sequence, so each
decoder layer of transformers runs on `h[:, :m]` and leaves `h[:, m:]`, with transformers' own attention and masks and
no cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skipdecode.model.wrapped.examine import SINCE
from skipdecode.schedules.schedule import Schedule

L = 6
VOCAB = 199

MODEL_TYPES = (
    "afmoe apertus arcee biogpt bitnet codegen cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 "
    "ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss "
    "gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe llama llama4_text "
    "mimo_v2_flash minimax_m2 ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon "
    "phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma "
    "youtu "
).split()
"""Those that run by way of transformers, as docs/models.md lists them."""

INSTALLED_TYPES = [kind for kind in MODEL_TYPES if Version(transformers.__version__) >= Version(SINCE.get(kind, "5"))]
"""Those of them that run with the installed transformers."""

FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "fc2")
"""The names that types have for a layer's feed-forward block."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": L, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    # mixtures of experts
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
    "shared_intermediate_size": 32, "num_shared_experts": 1, "decoder_sparse_step": 1, "moe_layer_start_index": 1,
    "intermediate_size_mlp": 96, "num_dense_layers": 1,
    # multi-head latent attention, chunks, names of one family
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "query_pre_attn_scalar": 16, "attention_chunk_size": 4, "no_rope_layer_interval": 2, "ffn_dim": 96,
    "word_embed_proj_dim": 64, "n_embd": 64, "n_head": 4, "n_layer": L, "n_positions": 128, "rotary_dim": 16,
    "n_inner": 96,
}  # fmt: skip
"""Small values by the names that configurations have for them."""


def small_config(kind: str, **others: Any) -> PreTrainedConfig:
    """The configuration of a small model with every kind of layer that the type has."""
    default = CONFIG_MAPPING[kind]()
    keys = {key: value for key, value in (SIZES | others).items() if hasattr(default, key)}
    if hasattr(default, "kv_lora_rank"):  # whose heads have widths of their own, and keys each
        keys.pop("head_dim", None)
        keys["num_key_value_heads"] = 4
    if kinds := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        keys["layer_types"] = [kinds[number % len(kinds)] for number in range(L)]
    if hasattr(default, "no_rope_layers"):
        keys["no_rope_layers"] = [1, 1, 1, 0, 1, 1]
    if hasattr(default, "mlp_layer_types"):
        keys["mlp_layer_types"] = ["dense"] + ["sparse"] * (L - 1)
    return type(default)(**keys)


@torch.no_grad()
def small_model(kind: str, **others: Any) -> PreTrainedModel:
    """A random model, scaled so that greedy text does not settle on one token."""
    model = AutoModelForCausalLM.from_config(small_config(kind, **others), attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def save(kind: str, folder: Path, **others: Any) -> PreTrainedModel:
    """The model that was saved, made with `others` beside or in place of SIZES."""
    model = small_model(kind, **others)
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:  # transformers makes this row zero where it loads some types (Youtu)
        with torch.no_grad():
            embedding.weight[embedding.padding_idx] = 0.0
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def naive_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], schedule: Schedule) -> Tensor:
    """[tokens of the answer, V]: from what each token of `answer` is chosen behind `prompt` under `schedule`."""
    return logits_with_gradients(model, prompt, answer, schedule)


def logits_with_gradients(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], schedule: Schedule
) -> Tensor:
    """`naive_logits` for a backward pass."""
    plans = [schedule.step(k) for k in range(len(answer) - 1)]
    ends = [len(prompt) + sum(plan.attn[layer] for plan in plans) for layer in range(L)]
    feeds = [len(prompt) + sum(plan.ffn[layer] for plan in plans) for layer in range(L)]
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with _each_layer_up_to(model, ends, ids.shape[1]), _feeding_up_to(model, feeds):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits


@contextmanager
def _each_layer_up_to(model: PreTrainedModel, ends: Sequence[int], length: int) -> Iterator[None]:
    layers = _layers_of(model)
    real = [layer.forward for layer in layers]
    for layer, forward, end in zip(layers, real, ends, strict=True):

        def prefix(h: Tensor, *args: Any, _forward: Any = forward, _end: int = end, **named: Any) -> Any:
            cut = {name: _cut(value, _end, length) for name, value in named.items()}
            made = _forward(h[:, :_end], *(_cut(value, _end, length) for value in args), **cut)
            states = torch.cat([made[0] if isinstance(made, tuple) else made, h[:, _end:]], dim=1)
            return (states, *made[1:]) if isinstance(made, tuple) else states

        layer.forward = prefix
    try:
        yield
    finally:
        for layer, forward in zip(layers, real, strict=True):
            layer.forward = forward


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    (layers,) = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == L]
    return layers


@contextmanager
def _feeding_up_to(model: PreTrainedModel, ends: Sequence[int]) -> Iterator[None]:
    """What feed-forward blocks make of later positions is zero."""
    with ExitStack() as stack:
        for layer, end in zip(_layers_of(model), ends, strict=True):

            def blank(_module: nn.Module, _given: Any, made: Any, end: int = end) -> Any:
                states = (made[0] if isinstance(made, tuple) else made).clone()
                states.view(-1, states.shape[-1])[end:] = 0
                return (states, *made[1:]) if isinstance(made, tuple) else states

            for name, block in layer.named_children():
                if name in FEED_FORWARD:
                    stack.enter_context(block.register_forward_hook(blank))
        yield


def _cut(value: Any, end: int, length: int) -> Any:
    """Masks [1, 1, n, n], rotations and positions [1, n, ...] of the first `end` of `length` columns."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(one, end, length) for one in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4 and value.shape[-2:] == (length, length):
        return value[:, :, :end, :end]
    return value[:, :end] if value.dim() >= 2 and value.shape[1] == length else value
