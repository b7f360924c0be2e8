"""SwiftKV's least squares against numpy's, over what hooks on Hugging Face's modules see, row by row, not padded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import OPTForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from skipdecode.checkpoint.weights import load_model
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.training.swiftkv_init import RIDGE, SwiftKVLeastSquares
from tests.support.naive import random_prompts

Array = NDArray[np.float64]
Pair = tuple[list[int], list[int]]
FIRST, L = 3, 6


def make_pairs(num_pairs: int = 12) -> list[Pair]:
    """Of unequal lengths: a prompt of one token, a response of one token."""
    prompts = random_prompts([1 + (5 * i) % 23 for i in range(num_pairs)], seed=1)
    responses = random_prompts([1 + (3 * i) % 11 for i in range(num_pairs)], seed=2)
    return list(zip(prompts, responses, strict=True))


def fitted(folder: Path, pairs: list[Pair], group_size: int = 1, rows: int = 5) -> Decoder:
    model = load_model(folder).with_swiftkv(FIRST, group_size)
    fit = SwiftKVLeastSquares(model)
    for at in range(0, len(pairs), rows):
        fit.add(teacher_batch(pairs[at : at + rows], 1))
    fit.solve()
    return model


def seen(reference: PreTrainedModel, norm: str, layers: str, pairs: list[Pair]) -> tuple[Array, list[Array]]:
    """The normed states that enter layer FIRST [N, D], and by layer from there the keys and values made [N, 2 G K]."""
    found: dict[str, list[torch.Tensor]] = {}
    names = [f"{layers}.{i}.self_attn.{x}_proj" for i in range(FIRST, L) for x in "kv"]
    hooks = [
        reference.get_submodule(name).register_forward_hook(
            lambda _, given, made, name=name: found.setdefault(name, []).append(made.detach()[0])
        )
        for name in [f"{layers}.{FIRST}.{norm}", *names]
    ]
    with torch.no_grad():
        for prompt, response in pairs:
            reference(input_ids=torch.tensor([prompt + response[:-1]]))
    for hook in hooks:
        hook.remove()
    x, *kv = (torch.cat(parts).double().numpy() for parts in found.values())
    return x, [np.concatenate(kv[at : at + 2], axis=1) for at in range(0, len(kv), 2)]


def least_squares(x: Array, y: Array) -> Array:
    """[D, C], with the ridge as rows of its own."""
    ridge = RIDGE * np.mean(np.square(x).sum(0))
    rows = np.concatenate([x, np.sqrt(ridge) * np.eye(x.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_it_is_numpys_solution(
    tiny_checkpoint: Path, hf: Callable[[Path], OPTForCausalLM], group_size: int, rows: int
) -> None:
    pairs = make_pairs()
    x, kv = seen(hf(tiny_checkpoint), "self_attn_layer_norm", "model.decoder.layers", pairs)
    y = np.concatenate([np.mean(kv[at : at + group_size], axis=0) for at in range(0, len(kv), group_size)], axis=1)
    swiftkv = fitted(tiny_checkpoint, pairs, group_size, rows).swiftkv
    assert swiftkv is not None
    weight = least_squares(x - x.mean(0), y - y.mean(0))  # with a bias: the means are its own
    assert swiftkv.kv.weight.T.numpy() == pytest.approx(weight, abs=2e-4)
    assert swiftkv.kv.bias.numpy() == pytest.approx(y.mean(0) - x.mean(0) @ weight, abs=2e-4)
    copied = load_model(tiny_checkpoint).with_swiftkv(FIRST, group_size).swiftkv
    assert copied is not None

    def error(weight: torch.Tensor, bias: torch.Tensor) -> float:
        return float(np.square(x @ weight.T.double().numpy() + bias.double().numpy() - y).sum())

    assert error(swiftkv.kv.weight, swiftkv.kv.bias) < 0.9 * error(copied.kv.weight, copied.kv.bias)


def test_keys_with_norms_and_no_bias(tmp_path: Path) -> None:
    """Qwen3: what is fitted is what a layer projects, before its norm and its turn."""
    torch.manual_seed(0)
    shape: dict[str, int] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
    shape |= {"num_key_value_heads": 2, "num_hidden_layers": L, "vocab_size": 320, "max_position_embeddings": 128}
    reference = Qwen3ForCausalLM(Qwen3Config(**shape, initializer_range=0.2, eos_token_id=2)).eval()
    reference.save_pretrained(tmp_path)
    pairs = make_pairs()
    x, kv = seen(reference, "input_layernorm", "model.layers", pairs)
    swiftkv = fitted(tmp_path, pairs, group_size=3).swiftkv
    assert swiftkv is not None
    assert swiftkv.kv.bias is None
    assert swiftkv.kv.weight.T.numpy() == pytest.approx(least_squares(x, np.mean(kv, axis=0)), abs=2e-4)
