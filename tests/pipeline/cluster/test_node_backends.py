"""What decodes where the workers are: one type for a mixed pool, refusals by node, a forced name handed on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.cluster_utils import Cluster as RayCluster

from pipeline.cluster.node_backends import (
    NodeBackend,
    find_backends,
    reason_against,
    reason_for_torch,
    resolve_dtype,
)
from pipeline.cluster.pool import Cluster, Pool
from pipeline.config.job import ActorsConfig, ConfigError, JobConfig
from pipeline.generate.plan import resolve_run_dtype
from skipdecode.backends import choice
from skipdecode.backends.choice import Choice

ROOT = Path(__file__).parents[3]
WIDE = NodeBackend("wide", Choice("avx512", "AVX-512 with BF16 and VNNI; no AMX", "bfloat16", None))
OLD = NodeBackend("old", Choice("avx2", "AVX2; no AVX-512", "float32", "the back end is avx2, which has none"))
ASK = """
import json, os, ray
from pipeline.cluster.pool import start_ray
from pipeline.cluster.node_backends import find_backends
cluster = start_ray()
found = find_backends(cluster, 1.0)
told = ray.get(ray.remote(lambda: os.environ.get("SKIPDECODE_KERNELS")).remote())
print(json.dumps({"names": [one.backend.name for one in found], "reason": found[0].backend.reason, "worker": told}))
"""


def test_one_type_for_all_workers() -> None:
    assert resolve_dtype("auto", "cpu", (WIDE, WIDE)) == "bfloat16"
    assert resolve_dtype("auto", "cpu", (WIDE, OLD)) == "float32"
    assert resolve_dtype("auto", "cuda", ()) == "bfloat16"
    assert resolve_dtype("float16", "cpu", (OLD,)) == "float16"


def test_quantized_weights_are_refused_by_node() -> None:
    assert reason_against("int8", (WIDE, WIDE), "bfloat16") is None
    assert reason_against("int8", (WIDE, OLD), "bfloat16") == "the back end is avx2, which has none (on old)"
    assert reason_against("int4", (WIDE, OLD), "float32") is None
    assert reason_against("int4", (WIDE, OLD), "bfloat16") == "the back end avx2 (on old) has no kernels for bfloat16"
    bare = NodeBackend("bare", Choice("torch", "no AVX2", "float32", "the back end is torch"))
    assert str(reason_against("int4", (WIDE, bare), "float32")).endswith("only amx, avx512 and avx2 have it (on bare)")
    assert reason_against(None, (OLD, bare), "float32") is None


def test_a_node_without_kernels_is_found() -> None:
    bare = NodeBackend("bare", Choice("torch", "no AVX2", "float32", "the back end is torch"))
    assert reason_for_torch((WIDE, OLD), "float32") is None
    assert reason_for_torch((WIDE,), "bfloat16") is None
    assert reason_for_torch((WIDE, OLD), "bfloat16") == "the back end avx2 (on old) has no kernels for bfloat16"
    assert reason_for_torch((WIDE, bare), "float32") == "the back end torch (on bare) has no kernels for float32"
    assert reason_for_torch((WIDE,), "float16") is not None


def test_required_kernels_that_are_not_there_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "torch")
    embedded, pool = Cluster(8, 0, 2, is_embedded=True), Pool(1, 1, 1.0, 0.0, 1)
    model: Any = SimpleNamespace(decode={}, config=None)
    assert resolve_run_dtype(JobConfig(), model, None, embedded, pool) in ("float32", "bfloat16")
    config = JobConfig(actors=ActorsConfig(require_kernels=True))
    with pytest.raises(ConfigError, match=r"^actors\.require_kernels: the back end torch \(on .*\) has no kernels for"):
        resolve_run_dtype(config, model, None, embedded, pool)


def test_an_embedded_ray_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = Cluster(8, 0, 2, is_embedded=True)
    monkeypatch.setenv(choice.VARIABLE, "torch")
    (found,) = find_backends(embedded, 1.0)
    assert found.backend is not None
    assert found.backend.name == "torch"
    monkeypatch.setenv(choice.VARIABLE, "neon")
    with pytest.raises(ConfigError, match=r"SKIPDECODE_KERNELS: neon is unknown"):
        find_backends(embedded, 1.0)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_a_name_that_the_driver_forces_reaches_the_nodes() -> None:
    """Two nodes that were started without the variable."""
    before = os.environ.pop(choice.VARIABLE, None), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        env = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)}
        for forced in ("torch", None):
            own = env | ({} if forced is None else {choice.VARIABLE: forced})
            done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, env=own, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout.splitlines()[-1])
            assert told["worker"] == forced
            assert told["names"] == 2 * [forced or choice.choose().name]
            assert ("forced" in told["reason"]) == (forced is not None)
    finally:
        cluster.shutdown()
        for name, value in zip((choice.VARIABLE, "PYTHONPATH"), before, strict=True):
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
