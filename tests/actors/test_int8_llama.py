"""int8 weights of a Llama that has learned something: its loss, and nearly always its choice of the next token."""

import copy

import pytest
import torch

from actors.training.recipe import TrainConfig
from actors.training.trainer import Hooks, init_weights, mean_loss, train
from actors.training.workers import Pair
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends import choice
from skipdecode.families.llama import LlamaConfig
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode

SHAPE = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, intermediate_size=160, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, init_std=0.08)  # fmt: skip
RECIPE = TrainConfig(
    schedules=({"method": "full"}, {"method": "skipdecode", "max_layers": 3, "min_layers": 2}), horizon=39, epochs=12.0,
    batch_size=32, accumulate=1, learning_rate=6e-3, final_learning_rate=1e-4, warmup_steps=5, betas=(0.9, 0.95),
    weight_decay=0.01, max_grad_norm=1.0, distill=0.0, temperature=1.0, hidden=0.0, trainable="all", draw="one",
    precision="float32", recompute=False, parallel="ddp", log_every=1000, validate_every=1000, checkpoint_every=1000,
    validation_rows=32, seed=0, fit_pairs=0,
)  # fmt: skip


def text_pairs(count: int) -> list[Pair]:
    """Bytes of the demo's prompts: the first eight, and forty behind them."""
    texts = [row["prompt"].encode("ascii", "replace").ljust(48) for row in make_prompts(count)]
    return [([1, *text[:8]], list(text[8:48])) for text in texts]


@torch.inference_mode()
def choices_of(model: Decoder, pairs: list[Pair], schedule: Schedule) -> torch.Tensor:
    """The likeliest token behind each of the true ones: [rows, 40]."""
    return teacher_forced_logits(model, teacher_batch(pairs, 0), schedule).argmax(dim=-1)


@pytest.mark.slow
@pytest.mark.skipif(choice.choose().no_int8 is not None, reason="needs a back end with int8 weights")
def test_int8_weights_keep_the_loss_and_most_tokens_of_a_llama_that_has_learned() -> None:
    model = Decoder(SHAPE)
    init_weights(model, 0)
    pairs = text_pairs(384)
    best = train(model, pairs[96:], pairs[:32], RECIPE, Hooks(lambda _: None, lambda *_: None, lambda *_: None))
    assert best["mean"] < 2.0, "it has learned nothing; log 256 is 5.5"
    model = model.to(torch.bfloat16)
    whole = copy.deepcopy(model).pack("int8")
    assert whole.supports_shared_prefix, "layers by parts"
    assert whole.weight_itemsize == 1
    half, held_out = model.pack(), pairs[:96]
    for schedule in (FullDepth(4), SkipDecode(4, 3, 2, 1, 39), SkipDecode(4, 2, 1, 1, 39)):
        losses = [mean_loss(one, held_out, schedule, 32) for one in (half, whole)]
        assert losses[0] != losses[1], "the same weights"
        assert abs(losses[0] - losses[1]) < 0.01, losses
        same = float((choices_of(half, held_out, schedule) == choices_of(whole, held_out, schedule)).float().mean())
        assert same > 0.98
