"""The configuration of an endpoint: its file, what is refused by key, and what a replica makes of it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import serve as serve_verb
from pipeline.config.job import ConfigError
from pipeline.service.app import make_spec, replica_threads
from pipeline.service.auth import digest
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import choose_scheduler
from pipeline.service.serve import StopSignals, load, serve_until_stopped
from tests.support.service_helpers import DEMO, ROOT, free_port

CONFIG = str(ROOT / "configs/serve.yaml")


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_API_KEYS", "my-secret-key")


def test_the_file_is_a_serve_configuration() -> None:
    """`serve deploy` checks with this class."""
    tree = yaml.safe_load(Path(CONFIG).read_text())
    schema = ServeDeploySchema.model_validate(tree)
    assert schema.applications[0].import_path == "pipeline.service.app:build_app"
    ServeConfig.model_validate(schema.applications[0].args)


def test_overrides_and_options() -> None:
    file = load(CONFIG, ["engine.batch_size=7", "decode.speedup=3"], None, 1234)
    assert (file.args.engine.batch_size, file.args.decode.speedup, file.http.port) == (7, 3, 1234)
    assert file.deployment["max_ongoing_requests"] == 4096
    assert load(None, [], None, None).http.model_dump() == {"host": "127.0.0.1", "port": 8000}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.batchsize=7"], "engine.batchsize: unknown key; did you mean 'batch_size'"),
        (["engine.scheduler=fifo"], "engine.scheduler:"),
        (["limits.max_waiting=0"], "limits.max_waiting:"),
        (["sampling.temperature=-1"], "sampling.temperature:"),
        (["model.source=nowhere/at/all"], "model.source: 'nowhere/at/all' is not a folder"),
        (["engine.scheduler=continuous", "sampling.deterministic=true"], "sampling.deterministic: needs fixed"),
        (["engine.scheduler=continuous", "decode.ffn_skip={mode: row}"], "decode.ffn_skip.mode: the continuous"),
        (["batches.workers=shared", "sampling.deterministic=true"], "fixed batch shapes, which batches.workers=shared"),
        (["batches.workers=shared", "engine.scheduler=cohort"], "batches.workers: shared needs a batch that rows join"),
        (
            ["batches.workers=shared", "decode={method: skipdecode, speedup: 2}"],
            "batches.workers: shared needs one schedule for all rows, and without decode.horizon",
        ),
        (["batch"], "expected key=value"),
    ],
)
def test_bad_configurations_name_the_key(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    with pytest.raises(ConfigError) as caught:
        make_spec(load(CONFIG, [f"model.source={DEMO}", *overrides], None, None).args)
    assert message in str(caught.value)


def test_drafts_in_fixed_bits_are_for_cpus(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica is started for what no GPU has, or no model of that width."""
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)
    keys = ["engine.scheduler=cohort", "decode.lossless=auto", "sampling.deterministic=true"]
    assert make_spec(load(CONFIG, [f"model.source={DEMO}", *keys], None, None).args).generator.device == "cpu"
    with pytest.raises(ConfigError, match=r"decode\.lossless: .*hidden_size 48 is no multiple of 32"):
        make_spec(load(CONFIG, [f"model.source={tiny_checkpoint}", *keys], None, None).args)
    keys.append(f"model.source={DEMO}")
    with pytest.raises(ConfigError, match=r"decode\.lossless: .*kernels for CPUs have no float16"):
        make_spec(load(CONFIG, [*keys, "model.dtype=float16"], None, None).args)
    monkeypatch.setenv("SKIPDECODE_KERNELS", "torch")
    with pytest.raises(ConfigError, match=r"decode\.lossless: .*the back end torch .*has no kernels for"):
        make_spec(load(CONFIG, keys, None, None).args)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"logging_config": {"log_level": "DEBUG"}}, "logging_config: only `serve deploy`"),
        ({"applications": [{"runtime_env": {"pip": ["x"]}}]}, "applications.0.runtime_env: only `serve deploy`"),
        (
            {"applications": [{"deployments": [{"name": "Other"}]}]},
            "deployments.0.name: must be Completions, got 'Other'",
        ),
        ({"applications": [{"deployments": [{"name": "Completions"}, {"name": "B"}]}]}, "deployments.1: there is one"),
    ],
)
def test_what_would_not_be_applied_is_refused(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    """The same file is good for `serve deploy`, which applies it."""
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "serve.yaml"), [], None, None)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("num_cores", "num_cpus", "threads"), [(8, 1, 7), (8, 0.5, 7), (8, 4, 3), (2, 4, 1), (1, 1, 1), (64, 16.0, 15)]
)
def test_threads_of_a_replica(num_cores: int, num_cpus: float, threads: int) -> None:
    assert replica_threads(num_cores, num_cpus) == threads


def test_a_quantized_replica_is_told_where_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would fail to load, and be started again for ever."""
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    given = [f"model.source={DEMO}", "model.quantization=int8"]
    config = make_spec(load(CONFIG, given, None, None).args).generator
    assert (config.device, config.dtype, config.quantization) == ("cpu", "bfloat16", "int8")
    with pytest.raises(ConfigError, match=r"model\.quantization: .* float32 on cpu"):
        make_spec(load(CONFIG, [*given, "model.dtype=float32"], None, None).args)


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_a_replica_with_fp8_runs_on_gpus(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    given = [f"model.source={DEMO}", f"model.{key}=fp8"]
    config = make_spec(load(CONFIG, given, None, None).args).generator
    assert (config.device, config.dtype, getattr(config, key)) == ("cuda", "bfloat16", "fp8")
    with pytest.raises(ConfigError, match=rf"model\.{key}: .* float32 on cuda"):
        make_spec(load(CONFIG, [*given, "model.dtype=float32"], None, None).args)


def test_threads_are_counted_where_the_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    assert make_spec(load(CONFIG, [f"model.source={DEMO}"], None, None).args).generator.num_threads is None
    args = load(CONFIG, [f"model.source={DEMO}", "engine.num_threads=3"], None, None).args
    assert make_spec(args).generator.num_threads == 3


def test_another_host_needs_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    keys = ["--config", CONFIG, "--host", "0.0.0.0", "--port", str(free_port()), "auth.open_on_loopback=true"]
    assert serve_verb.main(keys) == 2
    assert "set SKIPDECODE_API_KEYS=KEY" in capsys.readouterr().err


def test_a_key_is_made_where_none_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And printed with an address of the page that has it, as Jupyter does."""
    made: list[str | None] = []

    @contextmanager
    def running(file: Any, key: str | None, *_: Any) -> Iterator[str]:
        made.append(key)
        yield "http://127.0.0.1:8000/"

    def said(*overrides: str) -> str:
        lines: list[str] = []
        serve_until_stopped(CONFIG, [f"model.source={DEMO}", *overrides], host=None, port=None, log=lines.append)
        return "\n".join(lines)

    monkeypatch.setattr("pipeline.service.serve.running", running)
    monkeypatch.setattr("pipeline.service.serve.drain", lambda *_: 0)
    monkeypatch.setattr("pipeline.service.serve.StopSignals.wait", lambda _: None)
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    first, second = said(), said()
    assert None not in made[:2]
    assert made[0] != made[1]
    for text, key in ((first, made[0]), (second, made[1])):
        assert f"http://127.0.0.1:8000/#key={key} (page)" in text
        assert f"SKIPDECODE_API_KEYS is not set: {key}" in text
        assert len(str(key)) == 32
    open_to_all = said("auth.open_on_loopback=true")
    monkeypatch.setenv("SKIPDECODE_API_KEYS", "my-secret-key")
    for text in (open_to_all, said()):
        assert made.pop() is None
        assert "key" not in text.replace("skipdecode", "").lower()


def test_the_made_key_is_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    args = load(CONFIG, [f"model.source={DEMO}"], None, None).args
    assert make_spec(args, "made-for-this-start").key_digests == (digest("made-for-this-start"),)
    with pytest.raises(ConfigError, match="no API keys where the application is built"):
        make_spec(args)


def test_a_signal_ends_the_start_or_the_serving_once() -> None:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        signals = StopSignals()
        signals.install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # while the server comes down
        signal.raise_signal(signal.SIGINT)
        signals = StopSignals()
        signals.install()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        signals.wait()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert serve_verb.main(["--config", CONFIG, "--port", url.rpartition(":")[2]]) == 2
    assert "is not available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "decode", "device", "scheduler"),
    [
        ({}, {"method": "full"}, "cpu", "continuous"),
        ({}, {"method": "skipdecode", "speedup": 2}, "cpu", "continuous"),
        ({}, {"method": "skipdecode", "speedup": 2, "lossless": True}, "cpu", "continuous"),
        ({}, {"method": "full", "ffn_skip": {"mode": "row", "cold_start": 1, "cold_end": 1}}, "cpu", "cohort"),
        ({"sampling": {"deterministic": True}}, {"method": "full"}, "cpu", "cohort"),
        ({"engine": {"scheduler": "cohort"}}, {"method": "full"}, "cpu", "cohort"),
        ({}, {"method": "full"}, "cuda", "cohort"),
        ({"batches": {"workers": "shared"}}, {"method": "full"}, "cuda", "continuous"),
    ],
)
def test_the_scheduler_suits_the_device_and_the_schedule(
    tiny_checkpoint: Path, args: dict[str, Any], decode: dict[str, Any], device: str, scheduler: str
) -> None:
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32"))
    generator.device = torch.device(device)  # as it would be there; nothing runs
    assert choose_scheduler(ServeConfig.model_validate(args), generator) == scheduler
