"""Predictions for GPUs: against figures by hand, and against what must hold for any of them."""

from dataclasses import replace

import pytest

from skipdecode.cost.batch_sizes import ladder, rung_within
from skipdecode.cost.gpu_specs import GPUS, gpu_named
from skipdecode.cost.predict import (
    BANDWIDTH_REACHED,
    MIN_ROWS,
    MODELS,
    Workload,
    ceilings_of,
    gpus_needed,
    num_weights,
    predict_all,
    rows_that_fit,
    step_s,
)
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.families import released
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth

WORK = Workload()
FAST = ("h100",)  # of those GPUs, what every run tries
ALL = [(name, released(name)) for name in MODELS]
PARAMETERS = {  # of the model cards, in billions
    "opt-1.3b": 1.32, "opt-2.7b": 2.65, "opt-6.7b": 6.66, "opt-13b": 12.85, "opt-30b": 29.97, "opt-66b": 65.7,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model_card(name: str) -> None:
    assert num_weights(released(name)) == pytest.approx(PARAMETERS[name] * 1e9, rel=0.005)


def test_a_step_by_hand() -> None:
    """OPT-1.3B on an H100, one row: weights of the layers and the head through memory, and next to nothing else."""
    weights = 24 * 12 * 2048**2 + 50272 * 2048
    seconds = 2 * weights / (BANDWIDTH_REACHED * 3.35e12)
    made = step_s(released("opt-1.3b"), FullDepth(24), GPUS["h100"], Workload(1, 32), rows=1)
    assert made == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    "gpu", [pytest.param(gpu, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, gpu in GPUS.items()]
)
def test_what_holds_for_every_gpu(gpu) -> None:  # type: ignore[no-untyped-def]
    rows = predict_all(gpu, ALL, WORK)
    assert [row.schedule for row in rows] == ["full", "skipdecode 2x"] * (len(rows) // 2)
    for full, ours in zip(rows[::2], rows[1::2], strict=True):
        config = released(full.model)
        assert full.model == ours.model
        assert full.num_gpus == ours.num_gpus == gpus_needed(config, gpu.memory_bytes, WORK)
        assert 1.5 < ours.speedup < 4.0  # most where rows that skip leave room for four times as many
        for row in (full, ours):
            assert row.rows // row.num_gpus in ladder(256)
            assert row.cost_per_million == pytest.approx(
                1e6 / row.tokens_per_s * gpu.price_per_hour * row.num_gpus / 3600
            )
        held = 2 * num_weights(config) + full.rows * (512 + 256) * 4 * config.num_hidden_layers * config.kv_dim
        assert held <= 0.86 * gpu.memory_bytes * full.num_gpus


def test_models_that_do_not_fit_take_more_gpus() -> None:
    """OPT-66B is 131 GB: two H200s, three or more H100s; and what leaves no room for a batch does not count."""
    big = released("opt-66b")
    assert gpus_needed(big, GPUS["h200"].memory_bytes, WORK) == 2
    assert gpus_needed(big, GPUS["h100"].memory_bytes, WORK) == 3
    assert gpus_needed(big, 10**9, WORK) is None
    assert gpus_needed(released("opt-1.3b"), GPUS["l4"].memory_bytes, WORK) == 1
    full = FullDepth(64)
    assert rows_that_fit(big, full, GPUS["h100"].memory_bytes, 2, WORK) < MIN_ROWS


def test_launches_cost_nothing_within_graphs() -> None:
    """OPT-1.3B at 2x: the eager calls of a step, 5 us each, are 0.6 ms to 1.2 ms, as much as the step itself takes."""
    config = released("opt-1.3b")
    schedule = make_schedule({"method": "skipdecode", "speedup": 2}, num_layers=24, max_new_tokens=128)
    eager = replace(ceilings_of(GPUS["h100"]), call_s=5e-6)
    batch = BatchShape(128, [64] * 127)
    prefill, by_calls = predict_s(config, schedule, eager, batch, itemsize=2)
    same, in_graphs = predict_s(config, schedule, eager, batch, itemsize=2, in_graphs=True)
    free = Ceilings(eager.flops_per_s, eager.bytes_per_s, 0.0)
    assert in_graphs == predict_s(config, schedule, free, batch, itemsize=2)[1]
    assert prefill == same
    assert 0.5e-3 < (by_calls - in_graphs) / 127 < 1.2e-3


def test_unknown_gpus_are_named() -> None:
    assert gpu_named("H100") is GPUS["h100"]
    with pytest.raises(ValueError, match=r"no GPU 'h900' .* l4, a100-40, a100, h100, h200"):
        gpu_named("h900")


def test_fp8_by_hand() -> None:
    """Keys, values and weights of a byte: twice the rows where these fill the memory, and of a step half the bytes."""
    config, gpu = released("opt-6.7b"), GPUS["h100"]
    full, small = FullDepth(config.num_hidden_layers), Workload(weight_itemsize=1, kv_itemsize=1)
    columns = 256 + 512 - 1
    per_row = 2 * 32 * (columns + 15) * 4096
    weights = num_weights(config) + 2 * config.vocab_size * config.embed_dim  # the embedding stays beside the head
    room = int(0.85 * gpu.memory_bytes) - weights
    assert rows_that_fit(config, full, gpu.memory_bytes, 1, small) == rung_within(min(256, room // per_row))
    plain_s, small_s = (step_s(config, full, gpu, work, rows=64) for work in (Workload(), small))
    assert 0.5 < small_s / plain_s < 0.56
    rows = predict_all(gpu, [("opt-6.7b", config)], small)
    assert [row.num_gpus for row in rows] == [1, 1]
