"""What `make gpu` makes of a profiler's trace: kernels of a layer, gaps and shares, on traces that are made up."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import replays
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from benchmarks.gpu.decoding_checks import SMALL, check_captures
from benchmarks.gpu.replays import (
    PROMISED,
    REPLAYS,
    Event,
    Kernel,
    check_replays,
    described,
    kernels_in,
    per_layer,
    shares,
    too_many,
)
from skipdecode.families import config_of
from tests.support.graphs import cpu_as_cuda

LAYER = ["add_norm_kernel", "nvjet_a", "attend_kernel", "nvjet_b", "add_norm_kernel", "sm90_xmma_gemm", "gemv2T"]


def trace(names: list[str], steps: int = REPLAYS, *, gap: float = 1.0, rest: float = 5.0) -> list[Event]:
    """Kernels of 2 us, one after the other, `gap` apart, and the steps `rest` apart."""
    at, events = 100.0, []
    for _ in range(steps):
        for name in names:
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": 2.0})
            at += 2.0 + gap
        at += rest - gap
    return events


def step(layers: int, more: tuple[str, ...] = ()) -> list[str]:
    return ["embed", *[*LAYER, *more] * layers, "argmax_kernel"]


def test_kernels_of_a_trace_in_their_order() -> None:
    events: list[Event] = [
        {"ph": "X", "cat": "gpu_memset", "name": "fill", "ts": 9, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "first", "ts": 5.5, "dur": 2},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 2},
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_in(events) == [Kernel("first", 5.5, 7.5), Kernel("fill", 9.0, 10.0)]


def test_what_lies_around_the_layers_falls_out() -> None:
    deep, shallow = (kernels_in(trace(step(layers))) for layers in (6, 2))
    each = per_layer(deep, shallow, 4)
    assert each == {
        "add_norm_kernel": 2,
        "nvjet_a": 1,
        "attend_kernel": 1,
        "nvjet_b": 1,
        "sm90_xmma_gemm": 1,
        "gemv2T": 1,
    }


def test_a_kernel_more_than_promised_is_named() -> None:
    each = {"attend_kernel": 1.0, "nvjet": 6.0}
    assert too_many(each, 7) is None
    assert too_many(each | {"void cublasLt::splitKreduce_kernel<32>": 2.0}, 7) is None
    assert too_many(each | {"elementwise": 1.0}, 7) == (
        "a layer is 8 kernels, and 7 are promised: 1 attend_kernel, 6 nvjet, 1 elementwise"
    )
    assert PROMISED == {"relu": 7, "swiglu": 8, "geglu": 10}


def test_gaps_within_steps_and_between_them() -> None:
    found = described(kernels_in(trace(["embed", "attend_kernel", "argmax_kernel"], gap=1.0, rest=7.0)))
    assert found["kernels_of_a_step"] == 3
    assert (found["gap_us"], found["gap_between_steps_us"]) == (1.0, 7.0)
    whole = REPLAYS * 15.0 - 7.0
    assert found["us_of_a_step"] == pytest.approx(whole / REPLAYS)
    assert found["idle_share"] == pytest.approx((whole - REPLAYS * 6.0) / whole)


def test_kernels_side_by_side_leave_no_gap() -> None:
    found = described([Kernel("a", 0, 10), Kernel("b", 2, 4), Kernel("c", 11, 12)], replays=1)
    assert found["idle_share"] == pytest.approx(1 / 12)
    assert found["gap_between_steps_us"] is None
    torn = described([Kernel("a", 0, 1), Kernel("b", 3, 4), Kernel("c", 6, 7)], replays=2)  # a kernel is lost
    assert (torn["gap_us"], torn["gap_between_steps_us"]) == (2.0, None)


def test_shares_by_kind() -> None:
    found = shares([Kernel("attend_kernel", 0, 6), Kernel("cutlass_80", 6, 9), Kernel("what", 9, 10)])
    assert found == {"attention": 0.6, "products": 0.3, "others": 0.1}


def checked(traced: Callable[[Callable[[], None]], list[Event]], monkeypatch: pytest.MonkeyPatch) -> Found:
    config = config_of(SMALL | {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 3})
    sizes = {"rows": (2,), "prompt_tokens": 8, "new_tokens": 6, "cache_bytes": 1 << 20}
    monkeypatch.setattr(replays, "_traced", traced)
    with cpu_as_cuda():
        context = CheckContext(torch.device("cpu"), config, **sizes)  # type: ignore[arg-type]
        check_captures(context)
        return check_replays(context)


def made_up(more: tuple[str, ...] = ()) -> Callable[[Callable[[], None]], list[Event]]:
    """A trace for the deepest plan, and then one for the shallowest, of 3 and 1 layers; the steps run as well."""
    layers = iter((3, 1))

    def traced(work: Callable[[], None]) -> list[Event]:
        work()
        return trace(step(next(layers), more))

    return traced


def test_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = checked(made_up(), monkeypatch)["replays"]  # type: ignore[misc]
    assert sum(row["a_layer"].values()) == 7
    assert (row["rows"], row["layers"], row["kernels_of_a_step"]) == (2, 3, 3 * 7 + 2)
    with pytest.raises(CheckFailed, match="at 2 rows a layer is 8 kernels, and 7 are promised"):
        checked(made_up(("copy",)), monkeypatch)


def test_a_profiler_that_sees_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the profiler itself, which finds no device here."""
    found = checked(replays._traced, monkeypatch)
    assert "saw no kernel" in str(found["not_run"])
