"""Prices against figures counted by hand, and against what the decoder really allocates."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import (
    ATTN_CALLS,
    FFN_CALLS,
    STEP_CALLS,
    BatchShape,
    Ceilings,
    Cost,
    attention_cost,
    cache_bytes_per_row,
    ffn_cost,
    head_cost,
    plan_parts,
    predict_s,
)
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.families.opt import OPTConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import EarlyExit, FullDepth, Schedule, SkipDecode, steps_per_layer
from tests.support.examples import examples

TINY = OPTConfig(vocab_size=10, hidden_size=4, num_hidden_layers=2, ffn_dim=8, num_attention_heads=2)


def test_attention_by_hand() -> None:
    """3 rows, 1 new column, 5 visible columns, D = 4, two bytes each."""
    cost = attention_cost(TINY, rows=3, new_columns=1, context=5, itemsize=2)
    projections = 3 * 4 * (2 * 4 * 4)  # 3 tokens, four 4 x 4 products, a multiplication and an addition each
    scores_and_sums = 3 * 5 * (2 * 4 + 2 * 4)  # q.k and p.v over 5 columns
    assert cost.flops == projections + scores_and_sums
    weights, kv, activations = 4 * 16, 2 * 3 * 5 * 4, 6 * 3 * 4
    assert cost.bytes == 2 * (weights + kv + activations)
    assert (cost.cache_flops, cost.cache_bytes) == (scores_and_sums, 2 * kv)
    assert cost.calls == ATTN_CALLS


def test_prompt_attention_by_hand() -> None:
    """3 rows of 5 columns: 15 tokens, each against 5 columns (the masked half is computed too)."""
    cost = attention_cost(TINY, rows=3, new_columns=5, context=5, itemsize=4)
    assert cost.flops == 15 * 4 * 32 + 15 * 5 * 16
    assert cost.bytes == 4 * (64 + 2 * 3 * 5 * 4 + 6 * 15 * 4)


def test_ffn_by_hand() -> None:
    cost = ffn_cost(TINY, tokens=3, itemsize=2)
    assert cost.flops == 3 * 2 * (4 * 8 + 8 * 4)
    assert cost.bytes == 2 * (4 * 8 + 8 * 4 + 3 * (4 * 4 + 2 * 8))
    assert cost.calls == FFN_CALLS


def test_weights_of_another_size_by_hand() -> None:
    """int8: a byte per weight, two per activation, for every part of a plan."""
    sizes = {"itemsize": 2, "weight_itemsize": 1}
    assert ffn_cost(TINY, tokens=3, **sizes).bytes == 64 + 2 * 3 * (4 * 4 + 2 * 8)
    assert head_cost(TINY, rows=3, **sizes).bytes == 40 + 3 * 10 * 8
    plan = LayerPlan(attn=(True, True), ffn=(True, True))
    keys = {"rows": 3, "new_columns": 1, "context": 5, "itemsize": 2}
    plain, small = (plan_parts(TINY, plan, **keys, weight_itemsize=size) for size in (None, 1))
    assert [a.bytes - b.bytes for a, b in zip(plain, small, strict=True)] == [64, 64, 64, 64, 40]
    assert [a.flops for a in plain] == [a.flops for a in small]


def test_keys_and_values_of_another_size_by_hand() -> None:
    """FP8: a byte for each that is read from the cache, and nothing else changes; half of the cache of a row."""
    keys = {"rows": 3, "new_columns": 1, "context": 5, "itemsize": 2}
    plain, small = (attention_cost(TINY, **keys, kv_itemsize=size) for size in (None, 1))
    assert plain.cache_bytes == 2 * small.cache_bytes == 2 * 2 * 3 * 5 * TINY.kv_dim
    assert plain.bytes - small.bytes == small.cache_bytes
    assert plain.flops == small.flops
    plan = LayerPlan(attn=(True, True), ffn=(True, True))
    parts = [plan_parts(TINY, plan, **keys, kv_itemsize=size) for size in (None, 1)]
    gained = [a.bytes - b.bytes for a, b in zip(*parts, strict=True)]
    assert gained == [small.cache_bytes, 0, small.cache_bytes, 0, 0]


def test_head_by_hand() -> None:
    cost = head_cost(TINY, rows=3, itemsize=2)
    assert cost.flops == 3 * 2 * 4 * 10
    assert cost.bytes == 2 * 4 * 10 + 3 * 10 * 8  # float32 logits written and read
    narrow = OPTConfig(vocab_size=10, hidden_size=4, num_attention_heads=2, word_embed_proj_dim=2)
    assert head_cost(narrow, rows=1, itemsize=2).flops == 2 * 2 * 10


def test_parts_are_those_of_the_plan() -> None:
    plan = LayerPlan(attn=(True, False), ffn=(True, True))
    keys = {"rows": 3, "new_columns": 1, "context": 5, "itemsize": 2}
    parts = plan_parts(TINY, plan, **keys)
    attn = attention_cost(TINY, rows=3, new_columns=1, context=5, itemsize=2)
    ffn, head = ffn_cost(TINY, tokens=3, itemsize=2), head_cost(TINY, rows=3, itemsize=2)
    assert parts == [attn, ffn, ffn, head]
    total = sum(parts, Cost())
    assert total.flops == attn.flops + 2 * ffn.flops + head.flops
    assert total.calls == ATTN_CALLS + 2 * FFN_CALLS + STEP_CALLS


def test_ceilings_take_the_slower_of_two_and_every_call() -> None:
    ceilings = Ceilings(flops_per_s=100.0, bytes_per_s=10.0, call_s=0.5)
    assert ceilings.seconds(Cost(200.0, 5.0, 0)) == 2.0
    assert ceilings.seconds(Cost(200.0, 50.0, 4)) == 5.0 + 2.0
    assert ceilings.seconds(Cost(200.0, 50.0, 0, cache_flops=20.0, cache_bytes=40.0)) == 1.8 + 4.0


def flops_only(schedule: Schedule, batch_rows: Sequence[int], rows: int | None = None) -> tuple[float, float]:
    ceilings = Ceilings(flops_per_s=1.0, bytes_per_s=1e30, call_s=0.0)
    return predict_s(TINY, schedule, ceilings, BatchShape(5, batch_rows, rows), itemsize=2)


def test_prediction_by_hand() -> None:
    """FLOPs as seconds: 3 prompts, then steps of 3 and 1 rows; the second step runs layer 1 no more."""
    prefill, decode = flops_only(EarlyExit(2, 2, 1, 1, 2), [3, 1])
    layer_0 = 15 * 4 * 32 + 15 * 5 * 16 + 15 * 128
    layer_1 = 15 * 2 * 32 + 3 * 2 * 32 + 3 * 5 * 16 + 3 * 128  # keys and values of all, the rest of the last column
    assert prefill == layer_0 + layer_1 + 3 * 80
    step_0 = 2 * (3 * 4 * 32 + 3 * 6 * 16) + 2 * 3 * 128 + 3 * 80
    step_1 = 1 * (1 * 4 * 32 + 1 * 7 * 16) + 1 * 1 * 128 + 1 * 80
    assert decode == step_0 + step_1


def test_prompts_that_end_with_their_first_token_are_paid_for() -> None:
    """One new token per row has no decode step, and rows that end at y_0 are gone from step 0."""
    three, _ = flops_only(FullDepth(2), [3, 3])
    assert flops_only(FullDepth(2), [], rows=3) == (three, 0)
    assert flops_only(FullDepth(2), [1], rows=3)[0] == three


@pytest.mark.parametrize(("big_m", "num_layers"), [(6, 24), (12, 24), (4, 32)])
def test_speedup_tends_to_the_layer_ratio_when_layers_dominate(big_m: int, num_layers: int) -> None:
    """A constant budget, hardly any vocabulary, no overhead: time is layers."""
    wide = OPTConfig(vocab_size=8, hidden_size=2048, num_hidden_layers=num_layers, ffn_dim=8192, num_attention_heads=32)
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e10, call_s=0.0)

    def decode_s(config: OPTConfig, schedule: Schedule, ceilings: Ceilings) -> float:
        return predict_s(config, schedule, ceilings, BatchShape(64, [8] * 20), itemsize=2)[1]

    skip, full = SkipDecode(num_layers, big_m, big_m, 1, 19), FullDepth(num_layers)
    assert decode_s(wide, full, ceilings) / decode_s(wide, skip, ceilings) == pytest.approx(
        num_layers / big_m, rel=1e-3
    )
    real = OPTConfig(hidden_size=768, num_hidden_layers=num_layers, ffn_dim=3072)  # 50,272 tokens: the head weighs
    ratio = decode_s(real, full, ceilings) / decode_s(real, skip, ceilings)
    assert 1 < ratio < 0.95 * num_layers / big_m


@settings(max_examples=examples(40))
@given(
    columns=st.integers(1, 40),
    num_new=st.integers(1, 30),
    rows=st.integers(1, 5),
    bounds=st.tuples(*[st.integers(1, 6)] * 3),
    horizon=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_cache_bytes_are_what_is_allocated(
    columns: int, num_new: int, rows: int, bounds: tuple[int, int, int], horizon: int, dtype: torch.dtype
) -> None:
    w, m, big_m = sorted(bounds)
    config = OPTConfig(hidden_size=12, num_attention_heads=3, num_hidden_layers=6)
    for schedule in (SkipDecode(6, big_m, m, w, horizon), EarlyExit(6, big_m, m, w, horizon), FullDepth(6)):
        capacities = [columns + steps for steps in steps_per_layer(schedule, num_new - 1)]
        cache = KVCache.allocate(config, num_pad=torch.zeros(rows), capacities=capacities, dtype=dtype)
        per_row = cache_bytes_per_row(
            config, schedule, prompt_columns=columns, num_new=num_new, itemsize=dtype.itemsize
        )
        assert rows * per_row == cache.nbytes


def test_cache_bytes_are_what_a_batch_holds(loaded: Decoder) -> None:
    for schedule in (SkipDecode(6, 5, 2, 1, 11), FullDepth(6)):
        requests = [Request(str(i), [2] * n, Sampling(max_new_tokens=12)) for i, n in enumerate((3, 9, 5))]
        per_row = cache_bytes_per_row(loaded.config, schedule, prompt_columns=9, num_new=12, itemsize=4)
        assert generate(loaded, requests, schedule).stats.cache_bytes == 3 * per_row


def test_a_budget_of_bytes_holds_a_third_more_rows_at_2x() -> None:
    """Prompts as long as their continuation: half of the cache is there at every depth."""
    config = OPTConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=24)
    budget, rows = 40 << 20, {}
    for speedup in (1, 2):
        schedule = make_schedule({"method": "skipdecode", "speedup": speedup}, num_layers=24, max_new_tokens=64)
        capacities = [64 + steps for steps in steps_per_layer(schedule, 63)]

        def held(count: int, capacities: list[int] = capacities) -> int:
            pads = torch.zeros(count, dtype=torch.int64)
            return KVCache.allocate(config, num_pad=pads, capacities=capacities, dtype=torch.bfloat16).nbytes

        per_row = cache_bytes_per_row(config, schedule, prompt_columns=64, num_new=64, itemsize=2)
        rows[speedup] = budget // per_row
        assert held(rows[speedup]) <= budget < held(rows[speedup] + 1)
    assert rows[2] >= 1.3 * rows[1]
