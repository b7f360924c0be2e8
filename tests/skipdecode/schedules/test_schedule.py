"""Schedules against the definition in design.md 3.1, computed with exact fractions, and the tables of the paper."""

import subprocess
import sys
from fractions import Fraction
from math import floor
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skipdecode.schedules.from_config import METHODS, make_schedule, preset
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.layer_ranges import ALL, LayerRanges
from skipdecode.schedules.schedule import (
    ChosenLayers,
    EarlyExit,
    FullDepth,
    SkipDecode,
    SwiftKVPrefill,
    Unified,
    has_no_kv_holes,
    steps_per_layer,
)
from tests.support.schedules import EXAMPLES, schedules

HALF = Fraction(1, 2)


@st.composite
def budgets(draw: st.DrawFn) -> dict[str, int]:
    """(L, w, m, M, S) with 1 <= w <= m <= M <= L."""
    num_layers = draw(st.integers(1, 64))
    w, m, big_m = sorted(draw(st.tuples(*[st.integers(1, num_layers)] * 3)))
    return {
        "num_layers": num_layers,
        "warmup_layers": w,
        "min_layers": m,
        "max_layers": big_m,
        "horizon": draw(st.one_of(st.integers(1, 8), st.integers(1, 2048))),
    }


def defined_budget(b: dict[str, int], k: int) -> int:
    t = min(Fraction(k, max(b["horizon"] - 1, 1)), Fraction(1))
    return floor(b["max_layers"] - (b["max_layers"] - b["min_layers"]) * t + HALF)


@given(budgets(), st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_budget_is_the_definition_in_exact_arithmetic(b: dict[str, int], steps: list[int]) -> None:
    schedule = SkipDecode(**b)
    for k in [*steps, 0, b["horizon"] - 1, b["horizon"], b["horizon"] // 2]:
        assert schedule.budget(k) == defined_budget(b, k)


@given(budgets(), st.integers(0, 3000))
def test_layers_are_the_definition(b: dict[str, int], k: int) -> None:
    num_layers, w, budget = b["num_layers"], b["warmup_layers"], defined_budget(b, k)
    skip, early = SkipDecode(**b).step(k), EarlyExit(**b).step(k)
    assert set(skip.layers) == set(range(w)) | set(range(num_layers - (budget - w), num_layers))
    assert set(early.layers) == set(range(budget))
    for plan in (skip, early):
        assert plan.num_layers_run == budget  # the union above counts no layer twice
        assert plan.attn == plan.ffn
        assert len(plan.attn) == num_layers


@given(budgets(), st.integers(2, 80))
def test_plans_are_nested_and_budgets_fall(b: dict[str, int], num_steps: int) -> None:
    for cls in (SkipDecode, EarlyExit):
        schedule = cls(**b)
        plans = [schedule.prefill(), *(schedule.step(k) for k in range(num_steps))]
        assert has_no_kv_holes(plans)
        depths = [plan.num_layers_run for plan in plans]
        assert depths == sorted(depths, reverse=True)
        assert depths[0] == b["num_layers"]
        assert set(depths[1:]) <= set(range(b["min_layers"], b["max_layers"] + 1))
        assert depths[1] == b["max_layers"]
        counts = steps_per_layer(schedule, num_steps)
        for layer in range(b["num_layers"]):  # nested: the steps of a layer are a prefix
            runs = [schedule.step(k).attn[layer] for k in range(num_steps)]
            assert runs == [True] * counts[layer] + [False] * (num_steps - counts[layer])


def test_no_kv_holes_sees_a_hole() -> None:
    """The check itself must be able to say no, also when the hole is between the first and the last plan only."""
    deep, shallow = LayerPlan.of_layers((0, 1, 2), 3), LayerPlan.of_layers((0, 2), 3)
    assert has_no_kv_holes([deep, shallow, shallow])
    assert not has_no_kv_holes([deep, shallow, deep])
    assert not has_no_kv_holes([LayerPlan.of_layers((0,), 3), LayerPlan.of_layers((1,), 3)])
    ffn_only = LayerPlan(attn=(True, False), ffn=(True, True))
    assert has_no_kv_holes([ffn_only, ffn_only])
    assert not has_no_kv_holes([ffn_only, LayerPlan.of_layers((0, 1), 2)])
    assert has_no_kv_holes([])


def test_horizon_one_and_two_are_the_same_two_steps() -> None:
    """S = 1 gives t = min(k / 1, 1): M at step 0, m from step 1."""
    for horizon in (1, 2):
        schedule = SkipDecode(12, 9, 3, 1, horizon)
        assert [schedule.budget(k) for k in range(4)] == [9, 3, 3, 3]


def test_beyond_the_horizon_the_budget_stays_minimal() -> None:
    schedule = SkipDecode(24, 16, 8, 1, 10)
    assert schedule.budget(8) > 8
    assert {schedule.budget(k) for k in (9, 10, 100, 10**9)} == {8}


def test_ties_round_up() -> None:
    """4 -> 3 over horizon 3: the middle step is 3.5."""
    assert [SkipDecode(4, 4, 3, 1, 3).budget(k) for k in range(3)] == [4, 4, 3]


@given(st.integers(2, 80), st.integers(2, 80))
def test_unified_is_the_formula(num_layers: int, count: int) -> None:
    assume(count <= num_layers)
    wanted = [floor(Fraction(i * (num_layers - 1), count - 1) + HALF) for i in range(count)]
    schedule = Unified(num_layers, count)
    for k in (0, 1, 1000):
        assert list(schedule.step(k).layers) == wanted
    assert wanted[0] == 0
    assert wanted[-1] == num_layers - 1
    assert schedule.prefill() == FullDepth(num_layers).prefill()
    assert has_no_kv_holes([schedule.prefill(), schedule.step(0), schedule.step(1)])


@given(st.integers(1, 40), st.lists(st.integers(0, 39), min_size=1))
def test_chosen_layers_are_those_whatever_their_order(num_layers: int, layers: list[int]) -> None:
    layers = [layer % num_layers for layer in layers]
    schedule = make_schedule({"method": "layers", "layers": layers}, num_layers=num_layers, max_new_tokens=9)
    assert schedule == ChosenLayers(num_layers, tuple(sorted(set(layers))))
    assert {schedule.step(k).layers for k in (0, 1, 1000)} == {tuple(sorted(set(layers)))}
    assert schedule.prefill() == FullDepth(num_layers).prefill()


# arXiv 2307.02628, Table 2, as in design.md 3.1
PAPER = {24: {2: (16, 8), 3: (10, 6), 4: (7, 5), 5: (6, 4)}, 32: {2: (22, 11), 3: (14, 8), 4: (10, 6), 5: (8, 5)}}


@pytest.mark.parametrize("speedup", [2, 3, 4, 5])
@pytest.mark.parametrize("num_layers", [24, 32])
def test_presets_of_the_paper(num_layers: int, speedup: int) -> None:
    for method, cls in (("skipdecode", SkipDecode), ("early_exit", EarlyExit)):
        for value in (speedup, float(speedup)):
            decode = {"method": method, "speedup": value}
            made = make_schedule(decode, num_layers=num_layers, max_new_tokens=64)
            assert made == cls(num_layers, *PAPER[num_layers][speedup], warmup_layers=1, horizon=63)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6, 12, 40, 48, 64])
@pytest.mark.parametrize("speedup", [2, 3, 4, 5])
def test_other_depths_scale_the_24_layer_preset(num_layers: int, speedup: int) -> None:
    big_m, m = (floor(Fraction(x * num_layers, 24) + HALF) for x in PAPER[24][speedup])
    wanted = max(big_m, m, 1), max(m, 1)
    assert preset(num_layers, speedup) == wanted


def test_scaled_presets_by_hand() -> None:
    assert [preset(12, s) for s in (2, 3, 4, 5)] == [(8, 4), (5, 3), (4, 3), (3, 2)]
    assert [preset(48, s) for s in (2, 3, 4, 5)] == [(32, 16), (20, 12), (14, 10), (12, 8)]
    assert [preset(40, s) for s in (2, 3, 4, 5)] == [(27, 13), (17, 10), (12, 8), (10, 7)]
    assert [preset(64, s) for s in (2, 3, 4, 5)] == [(43, 21), (27, 16), (19, 13), (16, 11)]


def test_scaled_presets_make_room_for_the_warmup_layers() -> None:
    """design.md 3.1: other depths scale the preset, keeping w <= m <= M."""
    made = make_schedule({"speedup": 5, "warmup_layers": 4}, num_layers=12, max_new_tokens=9)
    assert made == SkipDecode(12, 4, 4, 4, 8)


def test_horizon_defaults_to_the_number_of_steps() -> None:
    for max_new_tokens, horizon in ((64, 63), (2, 1), (1, 1)):
        made = make_schedule({"speedup": 2}, num_layers=24, max_new_tokens=max_new_tokens)
        assert isinstance(made, SkipDecode)
        assert made.horizon == horizon
        assert made.budget(horizon - 1 if horizon > 1 else 1) == 8
    made = make_schedule({"speedup": 2, "horizon": 7}, num_layers=24, max_new_tokens=64)
    assert isinstance(made, SkipDecode)
    assert made.horizon == 7


def test_full_depth_and_speedup_one() -> None:
    full = FullDepth(6)
    assert full.step(0).layers == full.step(999).layers == full.prefill().layers == tuple(range(6))
    for decode in (
        {"method": "full"},
        {"method": "full", "speedup": 1},
        {"method": "skipdecode", "speedup": 1.0},
        {"method": "early_exit", "speedup": 1},
        {"method": "full", "speedup": None, "layers": None, "horizon": None},  # None counts as absent
    ):
        assert make_schedule(decode, num_layers=6, max_new_tokens=8) == full


def test_defaults_are_skipdecode_at_two() -> None:
    assert make_schedule({}, num_layers=24, max_new_tokens=5) == SkipDecode(24, 16, 8, 1, 4)


def test_every_method_is_a_schedule_of_its_own() -> None:
    """The tests have an example of every method, each has its own class, and layer sets are nested over positions."""
    assert EXAMPLES.keys() == METHODS.keys()
    made = schedules(24).values()
    assert len({type(schedule) for schedule in made}) == len(METHODS)
    for schedule in made:
        assert has_no_kv_holes([schedule.prefill(), *map(schedule.step, range(20))])


@pytest.mark.parametrize(
    ("decode", "remedy"),
    [
        ({"method": "full", "speedup": 2}, "give decode.method=skipdecode for it, or leave it out"),
        ({"method": "skipdecode", "layers": 3}, "give decode.method=unified for it, or leave it out"),
        ({"method": "unified", "spedup": 3}, "it takes: layers"),
        ({"method": "full", "spedup": 3}, "it takes: nothing"),
    ],
)
def test_a_key_of_another_method_is_refused_with_the_remedy(decode: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=f"has no meaning with method '{decode['method']}'; {remedy}$"):
        make_schedule(decode, num_layers=6, max_new_tokens=8)


def test_schedules_are_values() -> None:
    """Rows share a batch when their schedules are equal: equal fields, same method, and nothing else."""
    a = {"num_layers": 6, "max_layers": 4, "min_layers": 2, "warmup_layers": 1, "horizon": 5}
    assert SkipDecode(**a) == SkipDecode(**a)
    assert hash(SkipDecode(**a)) == hash(SkipDecode(**a))
    assert SkipDecode(**a) != EarlyExit(**a)
    assert SkipDecode(**a) != SkipDecode(**(a | {"horizon": 6}))
    assert (
        len({SkipDecode(**a), EarlyExit(**a), FullDepth(6), FullDepth(6), Unified(6, 3), ChosenLayers(6, (0, 5))}) == 5
    )


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"method": "fast"}, ["decode.method", "'fast'"]),
    ({"method": "full", "max_layers": 4}, ["decode.max_layers"]),
    ({"method": "full", "speedup": 2}, ["decode.speedup"]),
    ({"method": "unified", "speedup": 2}, ["decode.speedup"]),
    ({"method": "unified"}, ["decode.layers"]),
    ({"method": "unified", "layers": 1}, ["decode.layers", "1"]),
    ({"method": "unified", "layers": 25}, ["decode.layers", "25"]),
    ({"method": "skipdecode", "layers": 3}, ["decode.layers"]),
    ({"speedup": 2.5}, ["decode.speedup", "2.5", "max_layers", "min_layers"]),
    ({"speedup": 6}, ["decode.speedup", "max_layers", "min_layers"]),
    ({"speedup": "fast"}, ["decode.speedup", "fast"]),
    ({"speedup": 2, "max_layers": 8}, ["decode.speedup", "max_layers"]),
    ({"max_layers": 8}, ["decode.min_layers"]),
    ({"min_layers": 8}, ["decode.max_layers"]),
    ({"max_layers": 8, "min_layers": 9}, ["min_layers=9", "max_layers=8"]),
    ({"max_layers": 25, "min_layers": 9}, ["max_layers=25", "24"]),
    ({"max_layers": 8, "min_layers": 0}, ["min_layers=0"]),
    ({"max_layers": 8, "min_layers": 4, "warmup_layers": 5}, ["warmup_layers=5"]),
    ({"max_layers": 8, "min_layers": 4, "warmup_layers": 0}, ["warmup_layers=0"]),
    (
        {"method": "early_exit", "max_layers": 8, "min_layers": 4, "warmup_layers": 2},
        ["decode.warmup_layers", "early_exit", "decode.method=skipdecode"],
    ),
    ({"speedup": 2, "horizon": 0}, ["decode.horizon", "0"]),
    ({"speedup": 2, "colour": 1}, ["decode.colour"]),
    ({"max_layers": 8.5, "min_layers": 4}, ["max_layers", "8.5"]),
    ({"speedup": 2, "horizon": "ten"}, ["horizon", "ten"]),
    ({"method": "unified", "layers": 4.5}, ["layers", "4.5"]),
    ({"method": "unified", "layers": [0, 4]}, ["decode.layers", "[0, 4]", "decode.method=layers"]),
    ({"method": "layers"}, ["decode.layers"]),
    ({"method": "layers", "layers": []}, ["decode.layers", "none"]),
    ({"method": "layers", "layers": [0, 24]}, ["decode.layers", "24", "0 to 23"]),
    ({"method": "layers", "layers": [0, -1]}, ["decode.layers", "-1"]),
    ({"method": "layers", "layers": 4}, ["decode.layers", "list", "4"]),
    ({"method": "layers", "layers": [0, 1.5]}, ["decode.layers", "1.5"]),
    ({"method": "layers", "layers": [0, 1], "speedup": 2}, ["decode.speedup"]),
]


@pytest.mark.parametrize(("decode", "named"), BAD, ids=lambda value: str(value)[:60])
def test_errors_name_the_key(decode: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make_schedule(decode, num_layers=24, max_new_tokens=16)
    for word in ["decode", *named]:
        assert word in str(caught.value)


def test_plan_of_sublayers() -> None:
    plan = LayerPlan(attn=(True, False, False), ffn=(False, False, True))
    assert plan.layers == (0, 2)
    assert plan.num_layers_run == 2
    assert LayerPlan.of_layers((2, 0), 3) == LayerPlan((True, False, True), (True, False, True))


def test_steps_per_layer_by_hand() -> None:
    # budgets 4, 3, 3, 2 (4, 3.33, 2.67, 2) with one warm-up layer of four
    assert steps_per_layer(SkipDecode(4, 4, 2, 1, 4), 4) == [4, 1, 3, 4]
    assert steps_per_layer(EarlyExit(4, 4, 2, 1, 4), 4) == [4, 4, 3, 1]
    assert steps_per_layer(FullDepth(2), 0) == [0, 0]


def test_layers_with_nothing_between_them_are_a_group() -> None:
    plan = SkipDecode(6, 4, 2, 1, 9).step(1)
    assert LayerRanges.of_plan(plan).groups == (plan.layers,)
    assert LayerRanges.of_plan(FullDepth(4).step(1), is_prompt=True).groups == ((0, 1, 2), (3,))  # then the last column
    swiftkv = SwiftKVPrefill(FullDepth(6), 3)
    assert LayerRanges.of_plan(swiftkv.step(1)).groups == (
        (0, 1, 2),
        (3, 4, 5),
    )  # K and V of the upper ones come between
    apart = (False, True, False, False)  # a block of its own
    assert LayerRanges.of_plan(FullDepth(4).step(1), apart).groups == ((0,), (1,), (2, 3))
    rows = LayerRanges((ALL, slice(2, None), slice(2, None), None), (ALL, slice(2, None), None, None))
    assert rows.groups == ((0,), (1,), (2,))


def test_plan_and_config_and_cost_import_no_torch() -> None:
    code = (
        "import sys, skipdecode.schedules.schedule, skipdecode.config.model, skipdecode.cost.roofline; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_speedup_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"decode\.speedup: expected a number, got \[2, 3\]"):
        make_schedule({"speedup": [2, 3]}, num_layers=24, max_new_tokens=8)
