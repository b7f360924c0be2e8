"""What `make gpu` says of the times of attention; the times themselves need a device."""

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import (
    CHOICE,
    OURS,
    Case,
    check_attention,
    judged,
    kept_scores,
    prompt,
    prompt_of_groups,
    query,
)
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from benchmarks.gpu.decoding_checks import SMALL
from skipdecode.cost.roofline import Ceilings
from skipdecode.families import config_of
from tests.support.graphs import cpu_as_cuda

CONTEXT = CheckContext(torch.device("cpu"), config_of(SMALL), rows=(2, 4), context_tokens=32)


def row(bytes_per_s: float, new_shape_s: float = 1e-4) -> Found:
    return {"ms": 1.0, "bytes_per_s": bytes_per_s, "new_shape_s": new_shape_s}


def times(**query_ways: Found) -> dict[str, dict[str, Found]]:
    ways = {CHOICE: row(2e12), "cudnn": row(1e12, 0.03), "flash": {"refused": "a mask"}, OURS: row(2.5e12)}
    return {"query behind a mask": ways | query_ways, "prompt behind a mask": {CHOICE: row(1e11)}}


def test_good_times() -> None:
    assert judged(times()) is None
    assert judged(times(**{OURS: row(1.9e12)})) is None  # about as fast


def test_a_kernel_that_is_no_gain() -> None:
    sentence = judged(times(**{OURS: row(1e12), "efficient": row(2.2e12)}))
    assert sentence == "our attention reads 1000 GB/s, and torch's (efficient) 2200 GB/s"
    sentence = judged(times(**{OURS: row(1.7e12)}))
    assert sentence == "our attention reads 1700 GB/s, and torch's (default) 2000 GB/s"


@pytest.mark.parametrize("way", [CHOICE, OURS])
def test_a_new_shape_that_waits(way: str) -> None:
    """cuDNN alone may, since it is off."""
    sentence = judged(times(**{way: row(2.5e12, 0.03)}))
    assert sentence == f"{way}, query behind a mask: a new shape takes 30 ms the first time, and batches bring many"


def test_a_shape_that_torch_refuses() -> None:
    assert judged(times(**{CHOICE: {"refused": "no memory"}})) == (
        "torch takes no attention, query behind a mask: no memory"
    )


def test_attention_that_keeps_all_scores() -> None:
    found = times() | {"prompt of groups behind a mask": {CHOICE: row(1e11), "efficient": {"refused": "groups"}}}
    assert judged(found) is None
    assert kept_scores(times()) is None
    assert kept_scores(found) == (
        "prompt of groups behind a mask: what takes little memory refuses it (groups), "
        "and what is left keeps all scores"
    )


def test_all_ways_compute_the_same() -> None:
    case = query(CONTEXT, 24)
    assert case.nbytes == 2 * (2 * 4 * 64 * 2) + 2 * (2 * 4 * 24 * 64 * 2) + 2 * 24
    with cpu_as_cuda(), torch.inference_mode():
        assert (case.by_us().float() - case.by_torch().float()).abs().max() < 0.02
    masked = prompt(CONTEXT, 24, is_masked=True)
    plain = Case(masked.q, masked.k, masked.v, None)
    assert (masked.by_torch().float() - plain.by_torch().float()).abs().max() < 0.02
    groups = prompt_of_groups(CONTEXT, 24)
    assert (groups.q.shape[1], groups.k.shape[1]) == (4, 1)
    assert groups.by_torch().shape == groups.q.shape


def test_the_check_on_a_device_that_lacks_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.check_context.measure_ceilings", lambda *_: Ceilings(1e12, 1e11, 1e-6))
    monkeypatch.setattr(attention, "MAX_NEW_SHAPE_S", 60.0)
    monkeypatch.setattr(attention, "MIN_OF_BEST", 0.0)
    is_on = torch.backends.cuda.cudnn_sdp_enabled()
    with cpu_as_cuda():
        found = check_attention(CONTEXT)
        cases: dict[str, dict[str, Found]] = found["cases"]  # type: ignore[assignment]
        assert "No viable backend" in str(cases["query behind a mask"]["cudnn"]["refused"])
        assert {OURS, CHOICE, "math"} <= {way for way, one in cases["query behind a mask"].items() if "ms" in one}
        assert OURS not in cases["prompt without a mask"]
        monkeypatch.setattr(attention, "MIN_OF_BEST", 1e9)
        with pytest.raises(CheckFailed, match="our attention reads"):
            check_attention(CONTEXT)
    assert torch.backends.cuda.cudnn_sdp_enabled() == is_on
