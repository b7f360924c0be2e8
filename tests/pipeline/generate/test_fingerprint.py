"""What makes a resumed run another one: every group of the fingerprint, and how a difference is told."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import pipeline.generate.fingerprint
from pipeline.cluster.node_backends import look, resolve_dtype
from pipeline.config.job import ConfigError, JobConfig, build_config, set_key
from pipeline.generate.fingerprint import (
    compare_files,
    compare_fingerprints,
    fingerprint,
    list_files,
)
from pipeline.resolve_model import resolve_decode
from pipeline.store.digest import digest_files
from pipeline.store.run_state import RunState
from skipdecode.checkpoint.model_config import read_config
from tests.support.input_helpers import make_plan, write_jsonl
from tests.support.lora_adapters import write_adapter


@pytest.fixture
def place(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A folder with `model/` and `in/` of two files."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [{"id": f"{name}{i}", "prompt": "x"} for i in range(3)])
    return tmp_path


def take(place: Path, **overrides: Any) -> tuple[dict[str, Any], Any]:
    """Fingerprint and plan of a run, as `plan_run` takes them; overrides with `__` for the dot."""
    tree: dict[str, Any] = {"input": {"path": [str(place / "in")]}, "model": {"source": str(place / "model")}}
    tree["decode"] = {"speedup": 2}
    for key, value in overrides.items():
        set_key(tree, key.replace("__", "."), value)
    config = build_config(JobConfig, tree)
    decode = resolve_decode(config, read_config(place / "model"), print)
    plan = make_plan(config.input)
    dtype = resolve_dtype(config.model.dtype, "cpu", (look(),))
    prefill = config.prefill.method or "full"
    return fingerprint(config, decode, place / "model", dtype, plan, implementation="own", prefill=prefill), plan


def refused(place: Path, state: dict[str, Any], *keys: str, **overrides: Any) -> str:
    """Asserts that exactly these keys are named."""
    now, plan = take(place, **overrides)
    with pytest.raises(ConfigError) as caught:
        compare_fingerprints(state, now, plan)
    lines = str(caught.value).splitlines()
    assert {line.partition(":")[0] for line in lines[:-1]} == set(keys)
    assert "a resumed run must not differ" in lines[-1]
    return str(caught.value)


@pytest.fixture
def state(place: Path) -> dict[str, Any]:
    """As `run.json` holds it: through JSON."""
    prints, plan = take(place)
    made: dict[str, Any] = json.loads(json.dumps({"fingerprint": prints, "input": {"files": list_files(plan)}}))
    return made


def test_the_same_run_may_go_on_wherever_it_lies(place: Path, state: dict[str, Any], tmp_path: Path) -> None:
    compare_fingerprints(state, *take(place))
    shutil.copytree(place, tmp_path / "elsewhere")  # with the times
    compare_fingerprints(state, *take(tmp_path / "elsewhere"))
    free = {"limits__max_failed_rows": 7, "actors__num_actors": 2, "actors__batch_size": 3, "baseline__fraction": 0.5}
    compare_fingerprints(state, *take(place, **free))


CHANGES = [
    ({"sampling__seed": 4}, ["sampling.seed"]),
    ({"sampling__stop": ["x"]}, ["sampling.stop"]),
    ({"decode": {"method": "full"}}, ["decode.method", "decode.speedup"]),
    ({"decode__speedup": 3}, ["decode.speedup"]),
    ({"decode__prefix": "off"}, ["decode.prefix"]),
    ({"input__too_long": "truncate_left"}, ["input.too_long"]),
    ({"model__dtype": "float16"}, ["model.dtype"]),
    ({"model__quantization": "int8"}, ["model.quantization"]),
    ({"sampling__deterministic": True}, ["actors.batch_size", "actors.length_buckets", "sampling.deterministic"]),
    ({"input__limit": 5}, ["input.limit", "input.files"]),
    ({"limits__max_line_bytes": 1 << 20}, ["limits.max_line_bytes"]),
    ({"input__format": "jsonl"}, []),
    ({"sampling__n": 2, "sampling__temperature": 0.5}, ["sampling.n", "sampling.temperature"]),
    ({"input__chat": True, "input__system": "S"}, ["input.chat", "input.system"]),
    ({"input__chat": True, "input__chat_template_kwargs": {"a": 1}}, ["input.chat", "input.chat_template_kwargs"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "keys"), CHANGES, ids=[next(iter(change)) for change, _ in CHANGES])
def test_configuration(place: Path, state: dict[str, Any], overrides: dict[str, Any], keys: list[str]) -> None:
    if keys:
        refused(place, state, *keys, **overrides)
    else:
        compare_fingerprints(state, *take(place, **overrides))  # what auto came to is what counts


def test_a_key_that_an_older_fingerprint_lacks_means_its_default(place: Path, state: dict[str, Any]) -> None:
    for key in ("decode.prefix", "sampling.top_p", "prefill.method", "input.too_long", "model.quantization"):
        del state["fingerprint"][key]
    compare_fingerprints(cast(RunState, state), *take(place))
    message = refused(place, state, "sampling.top_p", sampling__top_p=0.5)
    assert "sampling.top_p: the run was started with 1.0, now it is 0.5" in message
    refused(place, state, "input.too_long", input__too_long="truncate_left")
    refused(place, state, "prefill.method", prefill__method="swiftkv")


def test_the_newline_that_ends_a_template_counts(place: Path) -> None:
    prints, plan = take(place, input__template="{{ prompt }}\n")
    state = {"fingerprint": prints, "input": {"files": list_files(plan)}}
    compare_fingerprints(cast(RunState, state), *take(place, input__template="{{ prompt }}\n"))
    refused(place, state, "input.template", input__template="{{ prompt }}")


def test_prefixes_are_no_part_of_a_schedule(place: Path) -> None:
    opt = read_config(place / "model")
    config = build_config(JobConfig, {"decode": {"prefix": "off"}})
    assert resolve_decode(config, opt, print) == resolve_decode(JobConfig(), opt, print)


def test_auto_dtype_is_settled(place: Path, state: dict[str, Any]) -> None:
    assert state["fingerprint"]["model.dtype"] in ("bfloat16", "float32")
    other = "float32" if state["fingerprint"]["model.dtype"] == "bfloat16" else "bfloat16"
    message = refused(place, state, "model.dtype", model__dtype=other)
    assert f"now it is {other!r}" in message


def test_weights_and_settings_of_the_model(place: Path, state: dict[str, Any], tiny_checkpoint: Path) -> None:
    model = place / "model"
    assert digest_files(model) == digest_files(tiny_checkpoint)
    tensors = load_file(model / "model.safetensors")
    tensors["model.decoder.layers.5.fc2.bias"][7] += 1e-3
    save_file(tensors, model / "model.safetensors")
    refused(place, state, "model.files")
    shutil.copy(tiny_checkpoint / "model.safetensors", model)
    compare_fingerprints(state, *take(place))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    refused(place, state, "model.files")


def test_weights_are_sampled_all_over_the_file(tmp_path: Path) -> None:
    """64 parts of 64 KiB of a file above 4 MiB."""
    path = tmp_path / "model.safetensors"
    content = bytearray(16 << 20)
    path.write_bytes(content)
    before = digest_files(tmp_path)
    for at in (0, 1 << 20, 8 << 20, 63 * (16 << 20) // 64):
        path.write_bytes(content[:at] + b"x" + content[at + 1 :])
        assert digest_files(tmp_path) != before, at


def test_tokenizer(place: Path, state: dict[str, Any]) -> None:
    (place / "tokenizer").mkdir()
    shutil.copy(place / "model/tokenizer.json", place / "tokenizer")
    refused(place, state, "model.tokenizer", model__tokenizer=str(place / "tokenizer"))
    own, _ = take(place, model__tokenizer=str(place / "tokenizer"))
    text = (place / "tokenizer/tokenizer.json").read_text()
    (place / "tokenizer/tokenizer.json").write_text(text.replace('"version"', ' "version"', 1))
    changed, _ = take(place, model__tokenizer=str(place / "tokenizer"))
    assert own["model.tokenizer"] != changed["model.tokenizer"]
    text = (place / "model/tokenizer.json").read_text()
    (place / "model/tokenizer.json").write_text(text + "\n")
    refused(place, state, "model.files")


def test_adapter(place: Path, state: dict[str, Any], tiny_checkpoint: Path) -> None:
    """Any byte of its configuration or its weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    adapter = write_adapter(place / "adapter", model, {"model.decoder.layers.0.fc1": 2})
    refused(place, state, "model.adapter", model__adapter=str(adapter))
    own, _ = take(place, model__adapter=str(adapter))
    for name, at in (("adapter_config.json", 3), ("adapter_model.safetensors", -5)):
        content = bytearray((adapter / name).read_bytes())
        content[at] ^= 1
        (adapter / name).write_bytes(content)
        changed, _ = take(place, model__adapter=str(adapter))
        assert own["model.adapter"] != changed["model.adapter"]
        own = changed


def test_code_version(place: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.generate.fingerprint, "CODE_VERSION", 999)
    message = refused(place, state, "code_version")
    assert "now it is 999" in message


def test_input_files(place: Path, state: dict[str, Any]) -> None:
    path = place / "in/b.jsonl"
    os.utime(path, ns=(1, 1))
    message = refused(place, state, "input.files")
    assert "input.files: b.jsonl: the run was started with '" in message
    assert "mtime 1 ns, 3 rows'" in message
    assert "a.jsonl" not in message
    path.unlink()
    assert "now it is None" in refused(place, state, "input.files")
    for name in "cdefg":
        write_jsonl(place / f"in/{name}.jsonl", [{"id": name, "prompt": "x"}])
    assert "input.files: 3 more files differ" in refused(place, state, "input.files")


def test_files_in_another_order_are_another_input() -> None:
    a, b = ["a", 1, 1, None, 1], ["b", 1, 1, None, 1]
    assert compare_files([a, b], [a, b]) == []
    assert compare_files([a, b], [b, a]) == ["the same files come in another order"]
    assert "etag x" in compare_files([a], [["a", 1, 1, "x", 1]])[0]


def test_keys_that_a_retry_may_change(place: Path, state: dict[str, Any]) -> None:
    now, plan = take(place, input__too_long="truncate_left")
    compare_fingerprints(state, now, plan, free=("input.too_long",))
