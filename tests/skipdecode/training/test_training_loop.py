"""A training as a whole: it teaches, batches and parts hold every row once, and what ends it with a reason."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.training.recipe import schedule_names
from actors.training.state import load_state, model_of, save_state
from actors.training.trainer import Hooks, init_weights, length_sorted_batches, mean_loss, train
from actors.training.workers import Pair, parts_of
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.families.opt import OPTConfig
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth, SkipDecode
from tests.support.examples import examples
from tests.support.train_configs import make_config


@settings(max_examples=examples(30))
@given(count=st.integers(1, 300), size=st.integers(1, 40), seed=st.integers(0, 5))
def test_batches_hold_every_pair_once(count: int, size: int, seed: int) -> None:
    pairs: list[Pair] = [([2] * (1 + i % 7), [i]) for i in range(count)]
    batches = length_sorted_batches(pairs, size, str(seed))
    assert sorted(response[0] for batch in batches for _, response in batch) == list(range(count))
    assert max(len(batch) for batch in batches) <= size
    assert len(batches) == -(-count // size), "more than one that is not full"


def test_training_teaches_the_schedule(tmp_path: Path) -> None:
    """A copy task: the loss falls under both schedules, the best state is kept, decoding obeys."""
    torch.manual_seed(0)
    model = Decoder(
        OPTConfig(vocab_size=24, hidden_size=32, num_hidden_layers=4, ffn_dim=64, num_attention_heads=2, init_std=0.08)
    )
    init_weights(model, 0)
    rng = random.Random(1)
    pairs: list[Pair] = []
    for _ in range(256):
        token = rng.randrange(4, 24)
        pairs.append(([2] + [token] * rng.randint(1, 3) + [3], [token, token, 2]))  # 3 ends the prompt
    records: list[dict[str, object]] = []
    config = make_config()
    kept: list[Decoder] = []
    hooks = Hooks(records.append, lambda w, _: kept.append(model_of(w, model.config)), lambda *_: None)
    best = train(model, pairs, pairs[:32], config, hooks)
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert all(set(loss) == {"full", "skipdecode 2"} for loss in losses)  # type: ignore[call-overload]
    assert max(losses[-1].values()) < 0.3  # type: ignore[attr-defined]
    assert max(losses[-1].values()) < 0.5 * max(losses[0].values())  # type: ignore[attr-defined]
    assert best["mean"] == min(sum(loss.values()) / 2 for loss in losses)  # type: ignore[attr-defined]
    assert not model.training
    saved = kept[-1].eval()
    schedule = SkipDecode(4, 3, 1, 1, 8)
    requests = [Request(str(i), [2, t, t, 3], Sampling(max_new_tokens=5)) for i, t in enumerate(range(4, 24))]
    made = generate(saved, requests, schedule).completions
    assert sum(c.tokens == [t, t, 2] for c, t in zip(made, range(4, 24), strict=True)) >= 18
    again = mean_loss(saved, random.Random(0).sample(pairs[:32], 16), FullDepth(4), 16)
    assert again == pytest.approx(best["validation_loss"]["full"], abs=1e-6)


@settings(max_examples=examples(50))
@given(rows=st.integers(1, 40), count=st.integers(1, 12))
def test_parts_hold_every_row_once_and_none_is_empty(rows: int, count: int) -> None:
    """Every worker makes the same number of calls, however few rows there are."""
    batch: list[Pair] = [([2], [i]) for i in range(rows)]
    parts = parts_of(batch, count)
    assert len(parts) == count
    assert all(part for part, _ in parts)
    weighed = [response[0] for part, weight in parts if weight for _, response in part]
    assert sorted(weighed) == list(range(rows))
    assert {weight for _, weight in parts} <= {0.0, 1.0}


def test_a_broken_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_state({"step": 3, "weights": torch.ones(1000)}, path)
    assert load_state(path)["step"] == 3
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"state\.pt: not a whole checkpoint"):
        load_state(path)


def test_a_validation_that_is_no_number_ends_the_training_with_the_reason() -> None:
    config = OPTConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, ffn_dim=32, num_attention_heads=2)
    model = Decoder(config)
    init_weights(model, 0)
    hooks = Hooks(lambda _: None, lambda *_: pytest.fail("nothing to keep"), lambda *_: pytest.fail("no checkpoint"))
    pairs: list[Pair] = [([2, 5], [6, 2])] * 4
    wild = make_config(schedules=({"method": "full"},), epochs=1.0, learning_rate=1e30, warmup_steps=1)
    with pytest.raises(FloatingPointError, match=r"lower train\.learning_rate"):
        train(model, pairs, pairs, wild, hooks)


def test_schedules_that_read_alike_are_told_apart() -> None:
    two = {"method": "skipdecode", "max_layers": 5, "min_layers": 3}
    three = {"method": "skipdecode", "speedup": 5, "warmup_layers": 3}
    assert schedule_names([{"method": "full"}, two]) == ["full", "skipdecode 5 3"]
    assert schedule_names([two, three]) == [
        "method skipdecode max_layers 5 min_layers 3", "method skipdecode speedup 5 warmup_layers 3"
    ]  # fmt: skip
