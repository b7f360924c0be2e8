"""`decode.lossless` in a run: the rows of full depth, figures of its drafts, what is refused, and how a run goes on."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import generate as verb
from pipeline.config.job import ConfigError, JobConfig, build_config, set_key
from pipeline.generate.fingerprint import compare_fingerprints, fingerprint, list_files
from pipeline.resolve_model import check_exact_drafts, check_model, resolve_decode
from skipdecode.checkpoint.model_config import read_config
from skipdecode.families import released
from skipdecode.families.opt import OPTConfig
from tests.support.input_helpers import make_plan, write_jsonl
from tests.support.verbs import Call

SKIP = {"method": "skipdecode", "max_layers": 5, "min_layers": 2}


def config_of(model: Path, **overrides: Any) -> JobConfig:
    tree: dict[str, Any] = {"model": {"source": str(model)}}
    for key, value in overrides.items():
        set_key(tree, key.replace("__", "."), copy.deepcopy(value))
    return build_config(JobConfig, tree)


def test_it_stands_beside_whatever_schedule_holds(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Of the job, of the checkpoint, or the default; without it a mapping is as it was."""
    opt, notes = read_config(tiny_checkpoint), list[str]()
    given = resolve_decode(config_of(tiny_checkpoint, decode=SKIP | {"lossless": True}), opt, notes.append)
    assert given == SKIP | {"lossless": True, "draft_tokens": "auto"}
    assert resolve_decode(config_of(tiny_checkpoint, decode=SKIP), opt, notes.append) == SKIP
    tuned_config = json.loads((tiny_checkpoint / "config.json").read_text()) | {"skip_decode": SKIP | {"horizon": 9}}
    (tmp_path / "config.json").write_text(json.dumps(tuned_config))
    tuned = read_config(tmp_path)
    own = resolve_decode(config_of(tiny_checkpoint, decode__lossless="auto"), tuned, notes.append)
    assert own == SKIP | {"horizon": 9, "lossless": "auto", "draft_tokens": "auto"}
    assert not notes
    (tmp_path / "config.json").write_text(
        json.dumps(tuned_config | {"skip_decode": SKIP | {"lossless": True, "draft_tokens": 3}})
    )
    assert resolve_decode(config_of(tiny_checkpoint), read_config(tmp_path), notes.append) == SKIP, "the job's own"
    default = resolve_decode(config_of(tiny_checkpoint, decode__lossless=True), opt, notes.append)
    assert (default["method"], default["speedup"], default["lossless"]) == ("skipdecode", 2, True)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"decode__lossless": True, "decode__ffn_skip": {"cold_start": 1, "cold_end": 1}}, "decode.ffn_skip.mode"),
        ({"decode__lossless": True, "prefill__method": "swiftkv"}, "decode.lossless"),
        ({"decode__draft_tokens": 4}, "decode.draft_tokens"),
        ({"decode__lossless": True, "decode__draft_tokens": 0}, "decode.draft_tokens"),
        ({"decode__lossless": True, "decode__draft_tokens": 10**9}, "decode.draft_tokens"),
        ({"decode__lossless": 1}, "decode.lossless"),
        ({"decode__lossless": "maybe"}, "decode.lossless"),
    ],
)
def test_what_it_cannot_be_combined_with_is_named(tiny_checkpoint: Path, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(tiny_checkpoint, **overrides), lambda _: None)
    assert {name for name, _ in caught.value.problems} == {key}
    assert caught.value.exit_code == 2


def test_it_is_deterministic_where_workers_have_kernels() -> None:
    opt, auto = released("opt-125m"), {"lossless": "auto"}
    for decode, deterministic in ((auto, False), ({"lossless": False}, True), ({}, True)):
        check_exact_drafts(decode, deterministic, released("opt-350m"), "cuda", "no kernels")
    check_exact_drafts(auto, True, opt, "cpu", None)
    for model, device, lacking, why in (
        (opt, "cuda", None, "decode on cuda"),
        (opt, "cpu", "the back end is old", "the back end is old"),
        (released("opt-350m"), "cpu", None, "torch multiplies before"),
        (OPTConfig(hidden_size=48, num_attention_heads=4), "cpu", None, "hidden_size 48 is no multiple of 32"),
    ):
        with pytest.raises(ConfigError, match=rf"decode\.lossless: .*{why}.*; use sampling\.") as caught:
            check_exact_drafts(auto, True, model, device, lacking)
        assert caught.value.exit_code == 2


def test_a_run_goes_on_with_more_drafts_but_not_without(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """How many tokens are drafted changes none. A fingerprint that lacks the key means no drafts."""
    write_jsonl(tmp_path / "in/a.jsonl", [{"id": "a", "prompt": "x"}])

    def take(**overrides: Any) -> tuple[dict[str, Any], Any]:
        config = config_of(tiny_checkpoint, input__path=[str(tmp_path / "in")], decode=SKIP, **overrides)
        decode, plan = resolve_decode(config, read_config(tiny_checkpoint), print), make_plan(config.input)
        return fingerprint(config, decode, tiny_checkpoint, "float32", plan, implementation="own", prefill="full"), plan

    def state_of(prints: dict[str, Any], plan: Any) -> Any:
        return json.loads(json.dumps({"fingerprint": prints, "input": {"files": list_files(plan)}}))

    state = state_of(*take(decode__lossless=True))
    compare_fingerprints(state, *take(decode__lossless=True, decode__draft_tokens=3))
    compare_fingerprints(state, *take(decode__lossless="auto"))
    with pytest.raises(ConfigError, match=r"decode\.lossless: the run was started with True, now it is False"):
        compare_fingerprints(state, *take())
    before, plan = take()
    del before["decode.lossless"]
    compare_fingerprints(state_of(before, plan), *take())
    with pytest.raises(ConfigError, match=r"decode\.lossless: the run was started with False, now it is True"):
        compare_fingerprints(state_of(before, plan), *take(decode__lossless=True))


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_has_the_rows_of_full_depth(call: Call, tmp_path: Path, tiny_checkpoint: Path) -> None:
    rng = random.Random(3)
    rows = [{"id": str(i), "prompt": "otter pub river " * rng.randrange(1, 4)} for i in range(60)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)

    def run(name: str, *arguments: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        fixed = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=14"]
        fixed += ["-i", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / name), "actors.batch_size=8"]
        code, document, text = call(verb, *fixed, *arguments)
        assert code == 0, text
        files = sorted((tmp_path / name / "data/status=ok").glob("*.parquet"))
        made = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
        return {row["id"]: row for row in made}, document

    full, plain = run("full", "decode.method=full")
    assert (plain["draft_acceptance"], plain["tokens_per_pass"], plain["drafts"]) == (None, None, None)
    skip = [f"decode.{key}={value}" for key, value in SKIP.items()]
    ours, figures = run("ours", *skip, "decode.lossless=true", "decode.draft_tokens=3", "baseline.fraction=1.0")
    tokens = {name: row["generated_tokens"] for name, row in ours.items()}
    assert tokens == {name: row["generated_tokens"] for name, row in full.items()}
    assert figures["agreement"]["exact_rows"] == 1.0
    assert 0 <= figures["draft_acceptance"] <= 1
    assert 1 <= figures["tokens_per_pass"] <= 4
    drafts = figures["drafts"]
    assert drafts["accepted"] / drafts["drafted"] == pytest.approx(figures["draft_acceptance"])
    assert len(drafts["acceptance_by_position"]) == 3
    assert drafts["rounds"]["drafted"] == sum(drafts["rounds"].values()) > 0
    assert drafts["draft_s"] + drafts["verify_s"] <= figures["decode_s"]
    assert all(row["layers_run"] >= 6 * (row["num_generated_tokens"] - 1) for row in ours.values())
    assert figures["layers_per_token"] > 6
    assert "decode.lossless" in figures["layers_by_step"]["reason"]
    again, _ = run("ours", *skip, "decode.lossless=auto", "--resume")
    assert again == ours
    page = (tmp_path / "ours/report.html").read_text(encoding="utf-8")
    assert "drafted tokens that full depth accepted" in page
