"""Examines this machine and a configuration as a run would see them. Loads the model once, and changes nothing."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from actors.generator import Generator
from pipeline.cluster.machine import provenance
from pipeline.cluster.node_backends import (
    NodeBackend,
    find_backends,
    look,
    reason_against,
    reason_for_torch,
    resolve_dtype,
)
from pipeline.cluster.pool import Cluster, Pool, find_pool, plan_pool, start_ray
from pipeline.config.job import ConfigError, JobConfig
from pipeline.doctor.corpus_estimate import Worker, estimate
from pipeline.doctor.facts import (
    GIB,
    check_shared_memory,
    cpu_backend,
    cuda_backend,
    gpus,
    machine,
    says_nothing_of_cpus,
    wrong_devices,
)
from pipeline.doctor.versions import check_versions
from pipeline.formatting import Json, Log
from pipeline.generate.stage_config import local_paths, make_generator_config
from pipeline.input.expansion import Expansion
from pipeline.input.files import Listing, list_input
from pipeline.resolve_model import check_exact_drafts, check_kv_cache_dtype, check_model, check_quantization
from pipeline.store.run_folder import RunFolder
from skipdecode.backends.fp8 import FP8
from skipdecode.backends.host_memory import num_cores
from skipdecode.config.model import ON_CPUS
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.model.devices import choose_device
from skipdecode.schedules.from_config import make_schedule

LOW_DISK_BYTES = 1 << 30
WARNING = "warning: "
PACKAGES = ("ray", "torch", "pyarrow", "numpy", "tokenizers")


T = TypeVar("T")


@dataclass(frozen=True)
class RayFacts:
    address: str | None
    num_cpus: float
    num_gpus: float
    nodes: int


@dataclass(frozen=True)
class Choice:
    """How a worker would decode; `load_s` and `batch_size` are None if this machine cannot load the model."""

    model: str
    layers: int
    implementation: str
    """Whose layers run: `own` or `transformers`."""
    decode: Mapping[str, Json]
    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    load_s: float | None
    batch_size: dict[str, int] | None
    """By prompt length."""
    cache_bytes_per_row: dict[str, int]
    """By prompt length."""


@dataclass
class Output:
    """Where a run would write."""

    path: str
    exists: bool
    free_bytes: int | None = None
    """None for a folder that is not on this machine."""


def examine(config: JobConfig, has_input: bool, log: Log) -> dict[str, Json]:
    """The findings as a JSON document.

    `problems` are reasons why a run would not start, each with its remedy; `warnings` do not stop it, and go to `log`
    too. `has_input` says that the configuration names an input; the default one need not exist.
    """
    problems, warnings = list[str](), list[str]()

    def heard(text: str) -> None:
        if text.startswith(WARNING):
            warnings.append(text.removeprefix(WARNING))
        log(text)

    def attempt(look: Callable[[], T]) -> T | None:
        """What `look` returns; None, and another problem, if it raises what would end a run."""
        try:
            return look()
        except (ConfigError, OSError, RuntimeError) as error:
            problems.append(str(error))
            return None

    cluster = attempt(lambda: find_cluster(heard))
    document: dict[str, Json] = {
        "machine": provenance(choose_device("auto"), PACKAGES) | asdict(machine()),
        "gpus": [asdict(gpu) for gpu in gpus()],
        "ray": None if cluster is None else asdict(ray_facts(cluster)),
    }
    problems += check_versions().wrong + wrong_devices() + check_shared_memory()
    on_gpu = attempt(cuda_backend)
    if on_gpu is not None:
        log(f"CUDA kernels: {on_gpu}")
    document["cuda_backend"] = None if on_gpu is None else asdict(on_gpu)
    backend = None if says_nothing_of_cpus() else attempt(cpu_backend)
    if backend is not None:
        log(f"CPU kernels: {backend}")
    document["cpu_backend"] = None if backend is None else asdict(backend)
    pool = None if cluster is None else attempt(lambda: fitting_pool(config, cluster))
    worker_pool = pool or pool_of_one(config, cluster)
    device = worker_device(worker_pool)
    nodes = attempt(lambda: decoding_nodes(cluster, pool, device))
    for node in nodes or ():
        log(f"workers on {node.node}: {node.backend}")
    document["worker_backends"] = [asdict(node) for node in nodes or ()]
    worker = Worker()
    chosen = None if nodes is None else attempt(lambda: choice(config, worker_pool, nodes, heard, worker))
    document["choice"] = None if chosen is None else asdict(chosen)
    if has_input:
        listing = attempt(lambda: list_files(config))
        document["input"] = None if listing is None else {"files": len(listing.files), "format": listing.format}
        if listing is not None and worker.model is not None:
            actors = 1 if pool is None else pool.max_size
            expected = attempt(lambda: estimate(config, listing, worker, actors, heard))
            document["estimate"] = None if expected is None else asdict(expected)
    target = attempt(lambda: output(config, problems))
    document["output"] = None if target is None else asdict(target)
    document["problems"], document["warnings"] = [*problems], [*warnings]
    return document


def list_files(config: JobConfig) -> Listing:
    return list_input(config.input, config.limits.max_line_bytes, Expansion.of(config.input, config.sampling))


def find_cluster(log: Log) -> Cluster:
    """The cluster that RAY_ADDRESS names; without it, the embedded one that a run would start."""
    if os.environ.get("RAY_ADDRESS"):
        return start_ray(log)
    cores = num_cores()
    return Cluster(float(max(8, 4 * cores)), float(torch.cuda.device_count()), cores, is_embedded=True)


def ray_facts(cluster: Cluster) -> RayFacts:
    address = os.environ.get("RAY_ADDRESS") or None
    return RayFacts(address, cluster.num_cpus, cluster.num_gpus, len(cluster.node_cpus) or 1)


def fitting_pool(config: JobConfig, cluster: Cluster) -> Pool:
    """The pool of decode workers that a run would start; ConfigError when it does not fit."""
    if os.environ.get("RAY_ADDRESS"):
        return find_pool(config.actors, cluster)
    return plan_pool(config.actors, cluster, {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus})


def pool_of_one(config: JobConfig, cluster: Cluster | None) -> Pool:
    """One worker of the requested kind, to examine the rest where no pool fits."""
    num_gpus = config.actors.num_gpus
    if num_gpus == "auto":
        num_gpus = 1.0 if cluster is not None and cluster.num_gpus else 0.0
    return Pool(1, 1, 1.0, float(num_gpus), num_cores())


def worker_device(pool: Pool) -> torch.device:
    """Where workers would decode; the GPUs are the cluster's, and this machine need not have any."""
    return torch.device("cuda" if pool.num_gpus else "cpu")


def decoding_nodes(cluster: Cluster | None, pool: Pool | None, device: torch.device) -> Sequence[NodeBackend]:
    """The CPU back end of every node with workers, none for GPUs; ConfigError if a node lacks the requested one."""
    if device.type != "cpu":
        return ()
    if cluster is None or pool is None or cluster.is_embedded:
        cpu_backend()  # raises the error that would end a run
        return (look(),)
    return find_backends(cluster, pool.num_cpus)


def choice(
    config: JobConfig, pool: Pool, nodes: Sequence[NodeBackend], log: Log, worker: Worker | None = None
) -> Choice:
    """Loads the model into `worker` as a worker of `pool` would, if this machine has such a device."""
    worker, device = worker or Worker(), worker_device(pool)
    model = worker.model = check_model(config, log)
    dtype = resolve_dtype(config.model.dtype, device.type, nodes)
    lacking = reason_against(config.model.quantization, nodes, dtype)
    check_quantization(config.model.quantization, model.config, dtype, device.type, lacking)
    check_kv_cache_dtype(config.model.kv_cache_dtype, model.config, dtype, device.type)
    lacking = reason_for_torch(nodes, dtype)
    check_exact_drafts(model.decode, config.sampling.deterministic, model.config, device.type, lacking)
    new = config.sampling.max_new_tokens
    buckets = [b for b in config.actors.length_buckets if b + new <= model.config.max_position_embeddings]
    swiftkv = model.config.swiftkv_layer(model.prefill)
    layers = model.config.num_hidden_layers
    schedule = make_schedule(model.decode, num_layers=layers, max_new_tokens=new, swiftkv_from=swiftkv)
    kv_cache_dtype = config.model.kv_cache_dtype
    shape = {"num_new": new, "itemsize": getattr(torch, dtype).itemsize if kv_cache_dtype == "auto" else FP8.itemsize}
    found = Choice(
        model=model.source,
        layers=layers,
        implementation=model.config.implementation,
        decode=model.decode,
        device=str(device),
        dtype=dtype,
        quantization=config.model.quantization,
        kv_cache_dtype=kv_cache_dtype,
        load_s=None,
        batch_size=None,
        cache_bytes_per_row={
            str(b): cache_bytes_per_row(model.config, schedule, prompt_columns=b, **shape) for b in buckets
        },
    )
    if device.type == "cuda" and not torch.cuda.is_available():
        return found
    if config.model.quantization in ON_CPUS and cpu_backend().lacks(config.model.quantization) is not None:
        return found
    log(f"model: loading {model.source} on {device}")
    generator = worker.generator = Generator(
        make_generator_config(config, model, dtype, pool, local_paths(config, model))
    )
    if generator.graphs is not None:
        log(f"CUDA graphs: {generator.graphs.describe()}")
    sizes = {str(bucket): generator.batch_size(bucket, new) for bucket in buckets}
    return replace(found, load_s=generator.load_s, batch_size=sizes)


def output(config: JobConfig, problems: list[str]) -> Output:
    """Examines `output.path` without creating anything; adds to `problems`."""
    folder = RunFolder.open(config.output.path)
    found = Output(folder.shown, folder.exists())
    if folder.is_local:
        existing = next(p for p in (Path(folder.root), *Path(folder.root).parents) if p.exists())
        found.free_bytes = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            problems.append(f"output.path: {existing} is not writable for this user; choose another output.path")
        if found.free_bytes < LOW_DISK_BYTES:
            problems.append(f"output.path: {found.free_bytes / GIB:.1f} GiB are free at {existing}; make room")
    if found.exists and config.output.if_exists == "fail":
        problems.append(
            f"output.path: {folder.shown} exists already; use --resume to continue it, --overwrite to start over, or "
            "another output.path"
        )
    return found
