"""`jobs.doctor`: says what is there, what would be chosen, and what is wrong, each with its remedy."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs.doctor import main, show
from pipeline.cluster.node_backends import look
from pipeline.cluster.pool import Cluster, Pool, object_store_bytes
from pipeline.config.job import ActorsConfig, ConfigError, JobConfig, ModelConfig, SamplingConfig, build_config
from pipeline.doctor import examine as doctor
from pipeline.doctor import versions
from pipeline.doctor.corpus_estimate import Worker, estimate
from pipeline.doctor.facts import GIB, check_shared_memory
from pipeline.formatting import Json
from pipeline.resolve_model import check_model
from skipdecode.backends.host_memory import num_cores
from tests.support.input_helpers import write_jsonl


def test_it_says_what_a_worker_would_choose(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"model.source={tiny_checkpoint}", "sampling.max_new_tokens=40", "decode.speedup=2", "model.dtype=float32"]
    assert main([*keys, "-o", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["problems"] == []
    (warning,) = document["warnings"]
    assert f"warning: {warning}" in captured.err, "the checkpoint is not tuned"
    assert captured.err.splitlines()[-1] == "1 warning"
    choice, machine = document["choice"], document["machine"]
    assert (choice["layers"], choice["dtype"], choice["device"]) == (6, "float32", "cpu")
    worker = Generator(
        GeneratorConfig(str(tiny_checkpoint), {"method": "skipdecode", "speedup": 2}, dtype="float32", device="cpu")
    )
    assert choice["batch_size"] == {"32": worker.batch_size(32, 40), "64": worker.batch_size(64, 40)}
    assert machine["torch"] == torch.__version__
    assert 0 < machine["free_memory_bytes"] <= machine["memory_bytes"]
    assert machine["usable_cores"] == num_cores()
    assert not (tmp_path / "run").exists(), "it changes nothing"


def test_shared_memory_that_is_smaller_than_rays_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cluster.pool.total_bytes", lambda: 5 * GIB)
    assert object_store_bytes() == GIB
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=GIB))
    assert check_shared_memory() == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=GIB // 2))
    (problem,) = check_shared_memory()
    assert "/dev/shm holds 0.5 GiB, and Ray's object store wants 1.0" in problem
    assert "--shm-size" in problem


def test_it_says_all_that_is_wrong_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").touch()
    keys = ["model.source=/nowhere", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "run"),
            "actors.num_actors=3", "actors.num_gpus=1"]  # fmt: skip
    assert main(keys) == 1
    captured = capsys.readouterr()
    text = "\n".join(json.loads(captured.out.splitlines()[-1])["problems"])
    for part in ("model.source: '/nowhere'", "none.jsonl: no such file", "exists already; use --resume",
                 "actors.num_actors: 3 actors with 1 GPUs each"):  # fmt: skip
        assert part in text
        assert part in captured.err
    assert "4 problems" in captured.err


def test_it_names_the_kernels_of_this_cpu_and_why(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"model.source={tiny_checkpoint}", "sampling.max_new_tokens=8", "-o", str(tmp_path / "run")]
    monkeypatch.setenv("SKIPDECODE_KERNELS", "torch")
    assert main(keys) == 0
    captured = capsys.readouterr()
    backend = json.loads(captured.out.splitlines()[-1])["cpu_backend"]
    assert (backend["name"], backend["reason"].partition(";")[0]) == ("torch", "forced by SKIPDECODE_KERNELS")
    assert f"CPU kernels: torch ({backend['reason']})" in captured.err
    monkeypatch.setenv("SKIPDECODE_KERNELS", "none-such")
    assert main(keys) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["cpu_backend"], document["choice"]) == (None, None)
    assert document["problems"][0].startswith("SKIPDECODE_KERNELS: none-such is unknown")


def test_a_bad_key_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode.spedup=3"]) == 2
    assert "did you mean 'speedup'?" in capsys.readouterr().err


def test_a_missing_or_old_dependency_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["numpy>=99", "no-such-package>=1", "torch>=2"]\n')
    monkeypatch.setattr(versions, "PROJECT", project)
    found = versions.check_versions()
    assert len(found.wrong) == 1
    assert "wanted >=99" in found.wrong[0]
    assert found.missing == ["no-such-package is not installed; pip install 'no-such-package>=1'"]
    assert main(["decode.no_such_key=1"]) == 1, "said before anything is imported that may need it"
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == {"problems": found.missing}
    assert "no-such-package is not installed" in captured.err


def test_without_a_checkout_the_installed_package_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["numpy>=99", "no-such-package>=1", 'no-such-tool>=1; extra == "test"']
    monkeypatch.setattr(versions, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr("importlib.metadata.requires", {versions.NAME: needs}.get)
    found = versions.check_versions()
    assert len(found.wrong) == 1
    assert found.missing == ["no-such-package is not installed; pip install 'no-such-package>=1'"]


def test_what_is_missing_is_found_without_importing_it() -> None:
    code = (
        "import pipeline.doctor.versions as v, sys; v.check_versions(); print(*{n.split('.')[0] for n in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", f"import jobs.doctor; {code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"torch", "ray", "numpy", "pyarrow", "pydantic", "yaml", "tokenizers"}


def test_a_tokenizer_of_its_own_is_used(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a run, where the model's folder has none."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(tiny_checkpoint, model)
    tokenizer.mkdir()
    (model / "tokenizer.json").rename(tokenizer / "tokenizer.json")
    keys = [f"model.source={model}", "sampling.max_new_tokens=8", "-o", str(tmp_path / "run")]
    assert main([*keys, f"model.tokenizer={tokenizer}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["choice"]["load_s"] > 0
    assert main(keys) == 1, "without it a run would be refused"
    assert "tokenizer" in json.loads(capsys.readouterr().out.splitlines()[-1])["problems"][0]


GPUS = Cluster(64.0, 8.0, 64, is_embedded=False, node_cpus=(64.0,), node_gpus=(8.0,))


@pytest.mark.parametrize(
    ("num_gpus", "cluster", "device"),
    [(0, GPUS, "cpu"), ("auto", GPUS, "cuda"), (1, None, "cuda"), (0.5, None, "cuda"), ("auto", None, "cpu")],
)
def test_where_no_pool_fits_the_device_is_that_which_was_asked_for(
    num_gpus: str | float, cluster: Cluster | None, device: str
) -> None:
    config = JobConfig(actors=ActorsConfig(num_gpus=num_gpus))
    assert doctor.worker_device(doctor.pool_of_one(config, cluster)).type == device


def test_the_model_is_loaded_as_a_worker_of_the_pool_loads_it(tiny_checkpoint: Path) -> None:
    """Else the estimate of two workers with a core each would be that of two with two."""
    config = JobConfig(model=ModelConfig(source=str(tiny_checkpoint)), sampling=SamplingConfig(max_new_tokens=8))
    worker, threads = Worker(), torch.get_num_threads()
    try:
        doctor.choice(config, Pool(2, 2, 1.0, 0.0, num_threads=1), (look(),), print, worker)
        assert worker.generator is not None
        assert worker.generator.config.num_threads == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the model would be loaded")
def test_on_a_head_without_a_gpu_the_choice_is_what_can_be_known(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JobConfig(model=ModelConfig(source=str(tiny_checkpoint)))
    found = asdict(doctor.choice(config, Pool(1, 1, 1.0, 1.0, 1), (), print))
    assert (found["device"], found["dtype"], found["load_s"], found["batch_size"]) == ("cuda", "bfloat16", None, None)
    assert found["cache_bytes_per_row"]["32"] > 0
    machine = dict.fromkeys(("torch", "ray", "pyarrow", "numpy", "tokenizers", "device"), "x")
    machine |= {"has_amx_bf16": False, "usable_cores": 1, "free_memory_bytes": 1, "memory_bytes": 1}  # type: ignore[dict-item]
    show({"machine": machine, "gpus": [], "ray": None, "choice": found, "problems": [], "warnings": []})
    assert "only known on a machine that can load the model" in capsys.readouterr().err


@pytest.fixture
def cluster(own_ray: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real one of two CPUs; its address."""
    address = ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR").address_info[
        "address"
    ]
    monkeypatch.setenv("RAY_ADDRESS", address)
    return address


@pytest.mark.slow
@pytest.mark.ray
def test_a_pool_that_does_not_fit_the_cluster_is_a_problem(
    cluster: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"model.source={tiny_checkpoint}", "sampling.max_new_tokens=8", "-o", str(tmp_path / "run")]
    assert main([*keys, "actors.num_actors=64"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["ray"] == {"address": cluster, "num_cpus": 2.0, "num_gpus": 0.0, "nodes": 1}
    (problem,) = document["problems"]
    assert problem.startswith("actors.num_actors: 64 actors")
    assert main(keys) == 0


def test_a_cluster_that_does_not_answer_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("pipeline.cluster.ray_environment.CLUSTER_ANSWERS_S", 0.1)
    assert main([]) == 1
    assert "WRONG: RAY_ADDRESS: the Ray cluster at 127.0.0.1:1 cannot be joined" in capsys.readouterr().err


def test_a_column_that_the_run_writes_itself_is_refused_as_a_run_refuses_it(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "The Mill", "logprobs": 1}])
    tree: dict[str, Json] = {"model": {"source": str(tiny_checkpoint)}, "input": {"path": [str(source)]}}
    scored = build_config(JobConfig, tree | {"sampling": {"logprobs": 1}})
    for config in (scored, build_config(JobConfig, tree)):
        worker = Worker(check_model(config, print))
        if config is scored:
            with pytest.raises(ConfigError, match=r"input.path: the input has a column 'logprobs', which this run"):
                estimate(config, doctor.list_files(config), worker, 1, print)
        else:
            assert estimate(config, doctor.list_files(config), worker, 1, print).rows == 1
