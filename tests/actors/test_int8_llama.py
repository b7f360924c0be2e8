"""int8 weights of a Llama that has learned something: nearly always the tokens that it makes in bfloat16."""

import copy

import pytest
import torch

from actors.train_workers import Pair
from actors.trainer import Hooks, TrainConfig, init_weights, train
from pipeline.demo_corpus import make_prompts
from skipdecode.backends import choice
from skipdecode.decoder import Decoder
from skipdecode.families.llama import LlamaConfig
from skipdecode.generate import Request, generate
from skipdecode.plan import FullDepth, Schedule, SkipDecode
from skipdecode.sampling import Sampling

SHAPE = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, intermediate_size=160, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, init_std=0.08)  # fmt: skip
RECIPE = TrainConfig(
    schedules=({"method": "full"}, {"method": "skipdecode", "max_layers": 3, "min_layers": 2}), horizon=39, epochs=12.0,
    batch_size=32, accumulate=1, learning_rate=6e-3, final_learning_rate=1e-4, warmup_steps=5, betas=(0.9, 0.95),
    weight_decay=0.01, max_grad_norm=1.0, distill=0.0, temperature=1.0, hidden=0.0, trainable="all",
    precision="float32", recompute=False, parallel="ddp", log_every=1000, validate_every=1000, checkpoint_every=1000,
    validation_rows=32, seed=0,
)  # fmt: skip


def text_pairs(count: int) -> list[Pair]:
    """Bytes of the demo's prompts: the first eight, and forty behind them."""
    texts = [row["prompt"].encode("ascii", "replace").ljust(48) for row in make_prompts(count)]
    return [([1, *text[:8]], list(text[8:48])) for text in texts]


def tokens_of(model: Decoder, pairs: list[Pair], schedule: Schedule) -> list[list[int]]:
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    requests = [Request(str(row), prompt, sampling) for row, (prompt, _) in enumerate(pairs)]
    return [completion.tokens for completion in generate(model, requests, schedule).completions]


@pytest.mark.skipif(choice.choose().no_int8 is not None, reason="needs a back end with int8 weights")
def test_int8_weights_keep_most_tokens_of_a_llama_that_has_learned() -> None:
    """The bound of the demo model (`test_generator`): 70 of 96 texts of forty tokens the same, at most all but one."""
    model = Decoder(SHAPE)
    init_weights(model, 0)
    pairs = text_pairs(384)
    best = train(model, pairs[96:], pairs[:32], RECIPE, Hooks(lambda _: None, lambda *_: None, lambda *_: None))
    assert best["mean"] < 2.0, "it has learned nothing; log 256 is 5.5"
    model = model.to(torch.bfloat16)
    whole = copy.deepcopy(model).pack("int8")
    assert whole.is_fused
    assert whole.weight_itemsize == 1
    half = model.pack()
    for schedule in (FullDepth(4), SkipDecode(4, 3, 2, 1, 39)):
        made = [tokens_of(one, pairs[:96], schedule) for one in (half, whole)]
        assert len({tuple(tokens) for tokens in made[0]}) > 20, "texts that are all alike prove little"
        same = sum(a == b for a, b in zip(*made, strict=True))
        assert 70 <= same < 96, same
