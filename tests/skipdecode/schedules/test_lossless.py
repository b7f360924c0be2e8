"""What a `decode:` mapping says of lossless decoding."""

from typing import Any

import pytest

from skipdecode.families import config_of
from skipdecode.schedules.from_config import listed_schedule, make_schedule
from skipdecode.schedules.lossless import MOST_DRAFTS, Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode

L = 24
OPT = config_of({"model_type": "opt", "num_hidden_layers": L, "hidden_size": 2048, "ffn_dim": 8192,
                 "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048})  # fmt: skip
SKIP = SkipDecode(L, 5, 4, 1, 63)


def made(**decode: Any) -> Schedule:
    return make_schedule(decode, num_layers=L, max_new_tokens=64)


def test_the_mapping_says_what_drafts() -> None:
    skip = {"method": "skipdecode", "max_layers": 5, "min_layers": 4}
    assert made(**skip, lossless=True) == Lossless(L, SKIP, None, False)
    assert made(**skip, lossless="auto", draft_tokens=3) == Lossless(L, SKIP, 3, True)
    assert made(**skip, lossless=False, draft_tokens="auto") == SKIP
    assert made(method="full", lossless=True) == Lossless(L, FullDepth(L))
    assert not Lossless(L, FullDepth(L)).drafts_by_skipping
    assert Lossless(L, SKIP).drafts_by_skipping


def test_it_is_full_depth_to_all_others() -> None:
    schedule = Lossless(L, SKIP)
    assert {schedule.step(k) for k in range(99)} == {FullDepth(L).prefill()} == {schedule.prefill()}
    assert schedule != FullDepth(L)


@pytest.mark.parametrize(
    ("decode", "key"),
    [
        ({"lossless": "yes"}, "decode.lossless"),
        ({"lossless": True, "draft_tokens": 0}, "decode.draft_tokens"),
        ({"lossless": True, "draft_tokens": MOST_DRAFTS + 1}, "decode.draft_tokens"),
        ({"lossless": True, "draft_tokens": "many"}, "decode.draft_tokens"),
        ({"lossless": 1}, "decode.lossless"),
        ({"lossless": False, "draft_tokens": 4}, "decode.draft_tokens"),
        ({"lossless": True, "ffn_skip": {"mode": "row"}}, "decode.ffn_skip.mode"),
    ],
)
def test_what_cannot_be_is_named(decode: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        made(**decode)


def test_swiftkv_and_lists_of_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^decode\.lossless: .*SwiftKV"):
        make_schedule({"lossless": True}, num_layers=L, max_new_tokens=9, swiftkv_from=12)
    with pytest.raises(ValueError, match=r"^decode\.lossless: .*SwiftKV"):  # the blocks left out do not hide it
        make_schedule(
            {"lossless": True, "ffn_skip": {"mode": "fixed", "layers": [3]}},
            num_layers=L,
            max_new_tokens=9,
            swiftkv_from=12,
        )
    with pytest.raises(ValueError, match=r"^decode\.lossless: "):
        listed_schedule(OPT, {"method": "full", "lossless": True}, 9)
