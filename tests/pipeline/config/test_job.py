"""The configuration tree: defaults of the contract, overrides, and messages that name the key."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from pipeline.bench.decoder import load_bench_config
from pipeline.bench.service import load_serve_bench_config
from pipeline.config.job import ConfigError, DecodeConfig, JobConfig, build_config, load_config, read_tree
from pipeline.config.tree import schedule_keys, section_of
from pipeline.evaluation.calibrate import CalibrateConfig, calibrate
from pipeline.evaluation.sweep import SweepConfig, run_sweep
from pipeline.resolve_model import check_kv_cache_dtype, check_quantization
from pipeline.service.serve import load as load_serve_config
from pipeline.training.config import FinetuneConfig, load_finetune_config
from pipeline.training.distill import with_defaults
from skipdecode.families import released
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.schedules.from_config import METHODS
from skipdecode.schedules.lossless import KEYS as LOSSLESS_KEYS

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def load_sweep_config(path: str, overrides: list[str]) -> SweepConfig:
    return build_config(SweepConfig, read_tree(path, overrides))


def loader(path: Path) -> Callable[[str, list[str]], object]:
    """A configuration file's name begins with the job that takes it."""
    loaders: dict[str, Callable[[str, list[str]], object]] = {
        "bench": load_serve_bench_config if path.stem == "bench-serve" else load_bench_config,
        "calibrate": lambda path, overrides: build_config(CalibrateConfig, read_tree(path, overrides)),
        "distill": lambda path, overrides: build_config(FinetuneConfig, with_defaults(read_tree(path, overrides))),
        "finetune": load_finetune_config,
        "quality": load_sweep_config,
        "serve": lambda path, overrides: load_serve_config(path, overrides, None, None),
    }
    return loaders.get(path.stem.split("-")[0], load_config)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_loads_and_says_for_whom(path: Path) -> None:
    loader(path)(str(path), [])
    assert re.search(r"\b[Ff]or (an?|any|anyone|one|spot)\b", opening_comment(path))


def opening_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def test_every_config_file_has_a_comment_of_its_own_and_a_place_in_the_docs() -> None:
    assert len({opening_comment(path) for path in CONFIGS}) == len(CONFIGS)
    page = (CONFIGS[0].parent.parent / "docs" / "configs.md").read_text(encoding="utf-8")
    assert [path.name for path in CONFIGS if f"`configs/{path.name}`" not in page] == []


def tuned_files() -> list[Path]:
    """Those that generate with a model that another file trains."""
    return [path for path in CONFIGS if loader(path) is load_config and "-tuned" in load_config(path).model.source]


@pytest.mark.parametrize("path", tuned_files(), ids=lambda path: path.name)
def test_a_tuned_model_is_one_that_another_file_makes_for_answers_as_long(path: Path) -> None:
    config = load_config(path)
    trained = [load_finetune_config(other) for other in CONFIGS if other.stem.startswith("finetune")]
    (made,) = [each for each in trained if Path(each.output.path).name == Path(config.model.source).name]
    assert config.model.source.startswith("/shared/") or config.model.source == made.output.path
    assert config.sampling.max_new_tokens == made.train.horizon + 1


def test_the_file_for_gpus_takes_a_tuned_model() -> None:
    assert [path.stem for path in tuned_files()] == ["generate-cluster"]


def test_the_defaults_are_those_of_the_contract() -> None:
    config = load_config(None).model_dump(mode="json")
    assert config["model"] == {
        "source": "models/opt-e2e", "adapter": None, "tokenizer": None, "dtype": "auto", "implementation": "auto",
        "quantization": None,
        "kv_cache_dtype": "auto",
    }  # fmt: skip
    assert config["sampling"] == {
        "max_new_tokens": 64, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop": [],
        "ignore_eos": False, "deterministic": False, "logprobs": None, "prompt_logprobs": False, "n": 1,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
        "min_new_tokens": 0, "stop_token_ids": [], "repetition_detection": None, "structured_outputs": None,
    }  # fmt: skip
    assert config["input"] == {
        "path": ["prompts/"], "format": "auto", "prompt_column": "prompt", "id_column": "id", "limit": None,
        "sampling_column": None, "chat_template_kwargs": {},
        "too_long": "fail_row", "template": None, "templates": None, "messages_column": None, "chat": False,
        "continue_final_message": False, "system": None, "chat_template": "auto",
    }  # fmt: skip
    assert config["output"] == {
        "path": "outputs/run",
        "if_exists": "fail",
        "model_name": None,
        "reasoning_parser": None,
    }
    assert config["actors"]["length_buckets"] == [32, 64, 128, 256, 512, 1024, 2048]
    assert config["baseline"] == {"fraction": 0.02}
    assert config["limits"] == {
        "max_failed_rows": 0.01, "max_row_attempts": 3, "no_progress_timeout_s": 1800, "max_line_bytes": 1 << 26,
        "window_s": None,
    }  # fmt: skip


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"decode": {"method": "skipdecode", "speedup": 2}, "sampling": {"seed": 7}}))
    config = load_config(path, ["decode.speedup=4", "sampling.stop=['\\n', END]", "decode.speedup=5"])
    assert (config.decode.speedup, config.sampling.seed, config.sampling.stop) == (5, 7, ("\\n", "END"))


SCHEDULE = {
    "method": "skipdecode", "speedup": 2, "max_layers": 9, "min_layers": 3, "warmup_layers": 1, "horizon": 30,
    "layers": 4, "ffn_skip": {"mode": "row"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["decode.method=full"], {"method": "full"}),
        (["decode.method=unified", "decode.layers=6"], {"method": "unified", "layers": 6}),
        (["decode.layers=6", "decode.method=unified"], {"method": "unified", "layers": 6}),
        (["decode.speedup=3", "decode.method=early_exit"], {"method": "early_exit", "speedup": 3}),
        (["decode.speedup=3"], {key: value for key, value in SCHEDULE.items() if key != "ffn_skip"} | {"speedup": 3}),
    ],
)
def test_an_overridden_method_drops_what_the_file_said_of_its_own(
    tmp_path: Path, overrides: list[str], expected: dict[str, object]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"decode": SCHEDULE, "sampling": {"seed": 7}}))
    tree = read_tree(path, overrides)
    assert tree == {"decode": expected | {"ffn_skip": {"mode": "row"}}, "sampling": {"seed": 7}}


def test_no_other_override_drops_anything(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("decode: {method: skipdecode, speedup: 3}\nprefill: {method: full, speedup: 2}\n")
    tree = read_tree(path, ["prefill.method=swiftkv", "decode.ffn_skip.mode=row"])
    assert tree["decode"] == {"method": "skipdecode", "speedup": 3, "ffn_skip": {"mode": "row"}}
    assert tree["prefill"] == {"method": "swiftkv", "speedup": 2}
    assert read_tree(path, ["decode={method: full}"])["decode"] == {"method": "full"}


def test_an_overridden_method_drops_the_schedule_of_every_verb_that_has_one(tmp_path: Path) -> None:
    args = "{model: {source: models/opt-e2e}, decode: {method: skipdecode, speedup: 2, horizon: 63}}"
    serve, other = tmp_path / "serve.yaml", tmp_path / "other.yaml"
    serve.write_text(f"applications: [{{name: x, args: {args}}}]\n")
    other.write_text("decode: {method: skipdecode, max_layers: 5, min_layers: 3}\n")
    full = build_config(JobConfig, {"decode": {"method": "full"}}).decode
    assert load_serve_config(str(serve), ["decode.method=full"], None, None).args.decode == full
    assert build_config(CalibrateConfig, read_tree(other, ["decode.method=full"])).decode == full
    assert load_config(other, ["decode.method=full"]).decode == full


def test_a_learning_rate_that_would_rise_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"above train\.learning_rate=1e-05.*train\.final_learning_rate=1e-06"
    ) as refused:
        load_finetune_config(None, ["train.learning_rate=1e-5"])
    assert refused.value.key == "train.final_learning_rate"
    falling = load_finetune_config(None, ["train.learning_rate=1e-5", "train.final_learning_rate=1e-6"])
    assert falling.train.final_learning_rate == 1e-6
    assert load_finetune_config(None, ["train.learning_rate=2e-5"]).train.final_learning_rate == 2e-5, "as high is fine"


def test_a_run_can_be_told_every_method_and_every_key_of_it() -> None:
    names = get_args(get_args(DecodeConfig.model_fields["method"].annotation)[0])
    assert names == tuple(METHODS)
    assert schedule_keys() | {"method", "ffn_skip", "prefix", *LOSSLESS_KEYS} == DecodeConfig.model_fields.keys()


def test_the_tree_is_frozen() -> None:
    config = load_config(None)
    with pytest.raises(ValidationError, match="frozen"):
        config.decode.speedup = 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.spedup=3", "decode.spedup: unknown key; did you mean 'speedup'?"),
        ("decoder.speedup=3", "decoder: unknown key; did you mean 'decode'?"),
        ("temperature=0.8", "temperature: unknown key; did you mean 'sampling.temperature'?"),
        ("max_tokens=9", "max_tokens: unknown key; did you mean 'sampling.max_new_tokens'?"),
        ("decode.batch_size=9", "decode.batch_size: unknown key; did you mean 'actors.batch_size'?"),
        ("no.such=9", "no: unknown key; known keys: model, decode, prefill"),
        (".", "expected key=value, e.g. decode.speedup=3; a file is given by an option, e.g. -i FILE"),
        ("sampling.top_p=0", "sampling.top_p: "),
        ("sampling.min_new_tokens=65", "sampling.min_new_tokens: must be at most sampling.max_new_tokens (64)"),
        ("sampling.logit_bias={5: 101}", "sampling.logit_bias"),
        ("sampling.logit_bias={a: 1}", "sampling.logit_bias"),
        ("sampling.presence_penalty=2.5", "sampling.presence_penalty: "),
        ("sampling.structured_outputs={}", "sampling.structured_outputs: give one of json, json_object, regex, choice"),
        ("sampling.structured_outputs={schema: {}}", "sampling.structured_outputs: 'schema' is not known"),
        ("sampling.structured_outputs={json: no.json}", "sampling.structured_outputs: json: no file with a schema: "),
        ("sampling.structured_outputs={json: '{'}", "sampling.structured_outputs: json: not a JSON schema: "),
        ("sampling.structured_outputs={choice: yes}", "sampling.structured_outputs: choice: must be a list of texts"),
        ("sampling.repetition_detection={min_count: 2}", "sampling.repetition_detection.max_pattern_size: "),
        (
            "sampling.repetition_detection={max_pattern_size: 2, min_pattern_size: 3}",
            "sampling.repetition_detection.min_pattern_size: must be at most max_pattern_size",
        ),
        ("sampling.temperature=.inf", "sampling.temperature: "),
        ("sampling.max_new_tokens=0", "sampling.max_new_tokens: "),
        ("sampling.max_new_tokens=many", "sampling.max_new_tokens: "),
        ("sampling.stop=['']", "sampling.stop"),
        ("actors.num_actors=0", "actors.num_actors: "),
        ("actors.num_actors=[3,1]", "actors.num_actors: a pool is [min, max]"),
        ("actors.num_gpus=1.5", "actors.num_gpus: more than one GPU per actor come whole, got 1.5"),
        ("actors.length_buckets=[64,32]", "actors.length_buckets: must be strictly increasing"),
        ("limits.max_failed_rows=1.5", "limits.max_failed_rows: "),
        ("decode.speedup=true", "decode.speedup: expected a number, not true or false"),
        ("sampling.max_new_tokens=true", "sampling.max_new_tokens: expected a number"),
        ("actors.num_gpus=false", "actors.num_gpus: expected a number"),
        ("limits.max_failed_rows=-1", "limits.max_failed_rows: "),
        ("output.if_exists=append", "output.if_exists: "),
        ("input.path=[]", "input.path: "),
        ("input.limit=0", "input.limit: "),
        ("decode.method=fast", "decode.method: "),
        ("decode.ffn_skip={mode: layer}", "decode.ffn_skip.mode: "),
        ("decode.ffn_skip={treshold: 0.9}", "decode.ffn_skip.treshold: unknown key; did you mean 'threshold'?"),
        ("decode.ffn_skip=0.9", "decode.ffn_skip: "),
        ("decode.ffn_skip={layers: [1, x]}", "decode.ffn_skip.layers: "),
        ("prefill.method=swift", "prefill.method: "),
        ("model.source=[1]", "model.source: "),
        ("model=3", "model: "),
        ("decode", "expected key=value"),
        ("model.source.x=3", "model.source.x: source is a value, not a section"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_key(override: str, message: str) -> None:
    overrides = ["model.source=here", override] if override.startswith("model.source.x") else [override]
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def test_several_problems_keep_their_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["sampling.top_p=0", "decode.spedup=3"])
    error = caught.value
    assert [key for key, _ in error.problems] == ["decode.spedup", "sampling.top_p"]
    assert (error.key, error.message) == ("", "\n".join(f"{key}: {message}" for key, message in error.problems))
    renamed = error.renamed("sampling", "engine.sampling")
    assert [key for key, _ in renamed.problems] == ["decode.spedup", "engine.sampling.top_p"]
    assert "engine.sampling.top_p: Input should" in str(renamed)


def test_one_problem_is_its_key_and_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["limits.max_failed_rows=-1"])  # two branches of a union, two messages
    assert {key for key, _ in caught.value.problems} == {"limits.max_failed_rows"}
    error = ConfigError("decode.speedup", "7 has no preset")
    assert error.problems == (("decode.speedup", "7 has no preset"),)
    assert str(error.renamed("decode", "runs.0.decode")) == "runs.0.decode.speedup: 7 has no preset"
    assert str(error.renamed("dec", "x")) == str(error)


@pytest.mark.parametrize("several", [False, True])
def test_an_error_of_a_worker_arrives_whole(several: bool) -> None:
    problems = [("a.b", "wrong"), ("c", "too")][: 1 + several]
    error = ConfigError.of(problems)
    there = pickle.loads(pickle.dumps(error))
    assert (str(there), there.key, there.message) == (str(error), error.key, error.message)
    assert there.problems == tuple(problems)


def test_a_section_that_is_none_is_named() -> None:
    assert section_of({"input": None}, "input") == section_of({}, "input") == {}
    with pytest.raises(ConfigError, match=r"^http_options: expected a section, got 3$"):
        section_of({"http_options": 3}, "http_options")


@pytest.mark.parametrize("tree", [{"sampling": {"stop": 5}}, {"actors": {"length_buckets": 0}}, {"input": {"path": 7}}])
def test_a_list_is_called_a_list(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r": Input should be a list \(got [057]\)$"):
        build_config(JobConfig, tree)


def test_an_empty_section_is_all_defaults_and_one_stop_string_needs_no_list(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("decode:\nsampling: {stop: END}\n")
    assert load_config(path).decode == load_config(None).decode
    assert load_config(path).sampling.stop == ("END",)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes("# caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"job\.yaml: not valid YAML in UTF-8"):
        load_config(tmp_path / "job.yaml")


@pytest.mark.parametrize(("text", "message"), [("a: [", "not valid YAML"), ("- 1", "expected a mapping")])
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.yaml") as caught:
        load_config(path)
    assert message in str(caught.value)


def test_an_absent_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config /nowhere/job.yaml: No such file"):
        load_config("/nowhere/job.yaml")


def test_share_and_count_of_failed_rows_are_told_apart() -> None:
    assert isinstance(load_config(None, ["limits.max_failed_rows=1"]).limits.max_failed_rows, int)
    assert isinstance(load_config(None, ["limits.max_failed_rows=1.0"]).limits.max_failed_rows, float)


def test_all_sections_forbid_unknown_keys() -> None:
    for name, field in JobConfig.model_fields.items():
        with pytest.raises(ConfigError, match=f"{name}.no_such_key: unknown key"):
            load_config(None, [f"{name}.no_such_key=1"])
        assert field.annotation is not None


def test_quantization_that_no_worker_could_load_is_refused() -> None:
    opt = released("opt-125m")
    check_quantization(None, opt, "float32", "cuda", None)
    check_quantization(None, opt, "float32", "cpu", "no kernels")
    check_quantization("int8", opt, "bfloat16", "cpu", None)
    for dtype, device in (("float32", "cpu"), ("bfloat16", "cuda")):
        with pytest.raises(ConfigError, match=rf"model\.quantization: int8 .* {dtype} on {device}; null"):
            check_quantization("int8", opt, dtype, device, None)
    with pytest.raises(ConfigError, match=r"model\.quantization: int8 weights need .*the back end is avx2.*; null"):
        check_quantization("int8", opt, "bfloat16", "cpu", "the back end is avx2 (on a)")
    for dtype in ("bfloat16", "float32"):
        check_quantization("int4", opt, dtype, "cpu", None)
    for dtype, device in (("float16", "cpu"), ("bfloat16", "cuda")):
        with pytest.raises(ConfigError, match=rf"model\.quantization: int4 .* {dtype} on {device}; null"):
            check_quantization("int4", opt, dtype, device, None)
    with pytest.raises(ConfigError, match=r"model\.quantization: hidden_size 48 .* no multiple of 32; null"):
        check_quantization("int4", OPTConfig(hidden_size=48, num_attention_heads=4), "float32", "cpu", None)
    with pytest.raises(ConfigError, match=r"model\.quantization: hidden_size 48 "):
        check_quantization("int8", OPTConfig(hidden_size=48, num_attention_heads=4), "bfloat16", "cpu", None)
    llama = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=3, head_dim=24)
    with pytest.raises(ConfigError, match=r"model\.quantization: num_attention_heads \* head_dim 72 "):
        check_quantization("int8", llama, "bfloat16", "cpu", None)
    with pytest.raises(ConfigError, match=r"model\.quantization: intermediate_size 40 "):
        check_quantization("int8", replace(llama, intermediate_size=40), "bfloat16", "cpu", None)
    check_quantization("int8", replace(llama, head_dim=32), "bfloat16", "cpu", None)
    with pytest.raises(ConfigError, match=r"model\.quantization"):
        build_config(JobConfig, {"model": {"quantization": "int2"}})


def test_fp8_that_no_worker_could_load_is_refused() -> None:
    llama = released("llama-3.1-8b")
    check_quantization("fp8", llama, "bfloat16", "cuda", None)
    check_kv_cache_dtype("fp8", llama, "bfloat16", "cuda")
    check_kv_cache_dtype("auto", llama, "float32", "cpu")
    for dtype, device in (("bfloat16", "cpu"), ("float32", "cuda"), ("float16", "cuda")):
        with pytest.raises(ConfigError, match=rf"model\.quantization: fp8 .* {dtype} on {device}; null"):
            check_quantization("fp8", llama, dtype, device, None)
        with pytest.raises(ConfigError, match=rf"model\.kv_cache_dtype: fp8 .* {dtype} on {device}; auto"):
            check_kv_cache_dtype("fp8", llama, dtype, device)
    with pytest.raises(ConfigError, match=r"model\.quantization: intermediate_size 40 .* multiple of 16"):
        check_quantization("fp8", replace(llama, intermediate_size=40), "bfloat16", "cuda", None)
    with pytest.raises(ConfigError, match=r"model\.kv_cache_dtype: .*do_layer_norm_before.*; auto"):
        check_kv_cache_dtype("fp8", released("opt-350m"), "bfloat16", "cuda")
    with pytest.raises(ConfigError, match=r"model\.kv_cache_dtype"):
        build_config(JobConfig, {"model": {"kv_cache_dtype": "int8"}})


def test_quantization_is_refused_before_any_work(tmp_path: Path) -> None:
    run = {"label": "a", "model": "models/opt-e2e", "quantization": "int8", "decode": [{"method": "full"}]}
    sweep = build_config(SweepConfig, {"runs": [run], "output": str(tmp_path), "data": {"path": None}})
    with pytest.raises(ConfigError, match=r"runs\.0\.model \(a\): model\.quantization: .* float32 on cpu"):
        run_sweep(sweep, print, "")
    config = build_config(CalibrateConfig, {"model": {"quantization": "int8"}, "output": str(tmp_path / "out")})
    with pytest.raises(ConfigError, match=r"model\.quantization: .* leave it null"):
        calibrate(config, print)
    assert list(tmp_path.iterdir()) == []
