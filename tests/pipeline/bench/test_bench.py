"""`jobs.bench` for decoding and for training, on a tiny checkpoint; the bound of the training speedup by hand."""

import json
from pathlib import Path

import pytest

import skipdecode.kv.static_cache
from jobs.bench import main
from skipdecode.backends import cpu_kernels
from skipdecode.cost.roofline import training_flops
from skipdecode.families.opt import OPTConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.sampler import Sampler
from skipdecode.schedules.schedule import FullDepth, SkipDecode

SMALL = ["batch_sizes=[2]", "prompt_tokens=[6]", "new_tokens=5", "repeats=2", "dtype=float32", "threads=1"]
SKIP = "schedules=[{method: skipdecode, max_layers: 3, min_layers: 2}]"


@pytest.mark.parametrize("work", ["decode", "train"])
def test_the_document_holds_every_schedule(
    work: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    assert main([f"work={work}", f"source={tiny_checkpoint}", *SMALL, SKIP, "--output-json", str(target)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads(target.read_text())
    full, skip = document["rows"]
    assert (full["schedule"], skip["schedule"]) == ("full", "skipdecode 3 2")
    key = "speedup_measured" if work == "train" else "speedup_decode_measured"
    assert full[key] == 1.0
    assert skip[key] > 0
    bound = "speedup_bound" if work == "train" else "speedup_decode_predicted"
    assert skip[bound] > full[bound] == 1.0
    assert {"schedule", key, bound} <= set(err.split())


@pytest.mark.slow
def test_schedules_of_any_kind_have_names_of_their_own(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skips = ["{mode: fixed, layers: []}", "{cold_start: 2, cold_end: 1}", "{cold_end: 2, cold_start: 1}", "null"]
    given = "schedules=[" + ", ".join(f"{{method: full, ffn_skip: {skip}}}" for skip in skips) + "]"
    assert main([f"source={tiny_checkpoint}", *SMALL, given]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    names = [row["schedule"] for row in rows]
    assert names[0] == "full"
    assert names[1:] == ["full ffn_skip mode=fixed layers=[]", "full ffn_skip cold_start=2 cold_end=1",
                         "full ffn_skip cold_end=2 cold_start=1"]  # fmt: skip
    assert [row["ffns_per_token"] for row in rows] == [6, 6, 6, 6], "25 warm-up tokens are the default"
    assert main(["work=train", f"source={tiny_checkpoint}", *SMALL, given]) == 2
    assert "schedules: ffn_skip is not timed with work=train" in capsys.readouterr().err


def test_a_profile_adds_up_and_leaves_the_decoder_alone(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (cpu_kernels.attend, KVCache.append, Sampler.__call__, skipdecode.kv.static_cache.attention)
    assert main([f"source={tiny_checkpoint}", *SMALL, SKIP, "--profile"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    for schedule in ("full", "skipdecode 3 2"):
        shares = {row["stage"]: row["share"] for row in rows if row["schedule"] == schedule}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) > 0
        assert {"feed-forward", "attention", "head", "norms", "embedding", "query, key, value"} < set(shares)
    assert (cpu_kernels.attend, KVCache.append, Sampler.__call__, skipdecode.kv.static_cache.attention) == before
    assert main(["work=train", f"source={tiny_checkpoint}", *SMALL, "--profile"]) == 2
    assert "--profile is for work=decode" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--serve", "--profile"])
    assert ended.value.code == 2
    assert "give either --serve or --profile" in capsys.readouterr().err


def test_training_flops_by_hand() -> None:
    config = OPTConfig(vocab_size=50, hidden_size=8, num_hidden_layers=4, ffn_dim=16, num_attention_heads=2)
    shape = {"rows": 3, "num_prompt_tokens": 5, "new_tokens": 4}

    def layer(columns: int) -> int:  # qkv and output 4 d^2, feed-forward 2 d f, scores and values 2 x columns x d
        return 2 * 3 * columns * (4 * 64 + 2 * 8 * 16) + 4 * 3 * columns * columns * 8

    head = 2 * 3 * 4 * 8 * 50
    assert training_flops(config, FullDepth(4), **shape) == 3 * (head + 4 * layer(8))
    # three steps with budgets 3, 3, 2 of {0} + top layers: layer 0 and 3 run all, layer 2 two steps, layer 1 none
    schedule = SkipDecode(4, 3, 2, 1, 3)
    assert [sum(schedule.step(k).attn) for k in range(3)] == [3, 3, 2]
    assert training_flops(config, schedule, **shape) == 3 * (head + 2 * layer(8) + layer(7) + layer(5))


@pytest.mark.parametrize("target", ["no/bench.json", "."])
def test_a_bad_target_is_known_at_once(tmp_path: Path, target: str) -> None:
    assert main(["--output-json", str(tmp_path / target)]) == 2


@pytest.mark.slow
def test_full_depth_may_be_named_and_float16_is_not_trained_in(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = "schedules=[{method: full}, {method: skipdecode, max_layers: 3, min_layers: 2}]"
    assert main([f"source={tiny_checkpoint}", *SMALL, twice]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 2
    assert main(["work=train", f"source={tiny_checkpoint}", *SMALL, "dtype=float16"]) == 2
    assert "dtype: float16" in capsys.readouterr().err
