"""The configuration of an endpoint: its file, what is refused by key, and what a replica makes of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from jobs import serve as serve_verb
from pipeline.config.job import ConfigError
from pipeline.service.app import make_spec, replica_threads
from pipeline.service.config import ServeConfig
from pipeline.service.serve import load
from tests.support.service_helpers import DEMO, ROOT, free_port

CONFIG = str(ROOT / "configs/serve.yaml")


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


def test_threads_are_counted_where_the_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    assert make_spec(load(CONFIG, [f"model.source={DEMO}"], None, None).args).generator.num_threads is None
    args = load(CONFIG, [f"model.source={DEMO}", "engine.num_threads=3"], None, None).args
    assert make_spec(args).generator.num_threads == 3


def test_another_host_needs_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    assert serve_verb.main(["--config", CONFIG, "--host", "0.0.0.0", "--port", str(free_port())]) == 2
    assert "no API keys are configured; set SKIPDECODE_API_KEYS" in capsys.readouterr().err


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert serve_verb.main(["--config", CONFIG, "--port", url.rpartition(":")[2]]) == 2
    assert "is not available" in capsys.readouterr().err
