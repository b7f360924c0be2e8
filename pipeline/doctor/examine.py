"""What this machine is, what a run would choose on it, and what is wrong. Loads the model once, changes nothing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.generator import Generator, GeneratorConfig, choose_device, free_bytes
from pipeline.checkpoint import ResolvedModel, check_model, check_quantization, resolve_dtype
from pipeline.cluster import OBJECT_STORE_BYTES, Cluster, Pool, find_pool, num_cores, plan_pool, start_ray
from pipeline.config import ConfigError, JobConfig
from pipeline.doctor.versions import check_versions
from pipeline.input.files import list_input
from pipeline.machine import provenance
from pipeline.store.run_folder import RunFolder
from pipeline.units import Note
from skipdecode import cpu_kernels
from skipdecode.cost import cache_bytes_per_row
from skipdecode.hub import resolve_source
from skipdecode.schedule import make_schedule

LOW_DISK_BYTES = 1 << 30
PACKAGES = ("ray", "torch", "pyarrow", "numpy", "tokenizers")
GIB = 1 << 30


def examine(config: JobConfig, has_input: bool, note: Note) -> dict[str, Any]:
    """Everything that was found; `problems`: what a run would stumble over, in words, with the remedy.

    `has_input`: whether the configuration names an input; the default one need not be there.
    """
    problems: list[str] = []

    def attempt(look: Callable[[], Any]) -> Any:
        """What `look` finds; None, and a problem, when a run would be refused."""
        try:
            return look()
        except (ConfigError, OSError, RuntimeError) as error:
            problems.append(str(error))
            return None

    cluster = attempt(find_cluster)
    document: dict[str, Any] = {
        "machine": provenance(choose_device("auto"), PACKAGES) | machine(),
        "gpus": gpus(),
        "ray": None if cluster is None else ray_facts(cluster),
    }
    problems += check_versions().wrong + wrong_devices() + wrong_places()
    pool = None if cluster is None else attempt(lambda: fitting_pool(config, cluster))
    device = worker_device(config, cluster, pool)
    document["choice"] = attempt(lambda: choice(config, device, note))
    if has_input:
        found = attempt(lambda: list_input(config.input))
        document["input"] = None if found is None else {"files": len(found.files), "format": found.format}
    document["output"] = attempt(lambda: output(config, problems))
    return document | {"problems": problems}


def machine() -> dict[str, Any]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "usable_cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * page,
        "free_memory_bytes": free_bytes(torch.device("cpu")),
        "has_amx_bf16": torch.cpu._is_amx_tile_supported(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    }


def gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": total,
                "free_memory_bytes": free,
            }
        )
    return found


def find_cluster() -> Cluster:
    """That which RAY_ADDRESS names, joined; without one, what a run would start in its own process."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        cores = num_cores()
        return Cluster(float(max(8, 4 * cores)), float(torch.cuda.device_count()), cores, is_embedded=True)
    try:
        return start_ray()
    except Exception as error:  # Ray raises what its transport raised
        raise ConfigError(
            "", f"RAY_ADDRESS: {address} does not answer ({error}); unset it to run on this machine alone"
        ) from error


def ray_facts(cluster: Cluster) -> dict[str, Any]:
    return {
        "address": os.environ.get("RAY_ADDRESS") or None,
        "num_cpus": cluster.num_cpus,
        "num_gpus": cluster.num_gpus,
        "nodes": len(cluster.node_cpus) or 1,
    }


def fitting_pool(config: JobConfig, cluster: Cluster) -> Pool:
    """The pool of decode workers that a run would start; ConfigError when it does not fit."""
    if os.environ.get("RAY_ADDRESS"):
        return find_pool(config.actors, cluster)
    return plan_pool(config.actors, cluster, {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus})


def worker_device(config: JobConfig, cluster: Cluster | None, pool: Pool | None) -> torch.device:
    """Where workers would decode: on GPUs of the cluster, which this machine need not have."""
    if pool is not None:
        return torch.device("cuda" if pool.num_gpus else "cpu")
    num_gpus = config.actors.num_gpus  # no pool fits: what was asked for
    has_gpu = bool(cluster and cluster.num_gpus) if num_gpus == "auto" else num_gpus > 0
    return torch.device("cuda" if has_gpu else "cpu")


def choice(config: JobConfig, device: torch.device, note: Note) -> dict[str, Any]:
    """What a worker on `device` would decode with. Where this machine has such a device the model is loaded as a worker
    does; else `load_s` and `batch_size` are null."""
    model = check_model(config, note)
    dtype = resolve_dtype(config.model.dtype, device.type)
    is_here = not os.environ.get("RAY_ADDRESS")
    check_quantization(config.model.quantization, model.config, dtype, device.type, is_here=is_here)
    new = config.sampling.max_new_tokens
    buckets = [b for b in config.actors.length_buckets if b + new <= model.config.max_position_embeddings]
    swiftkv = model.config.kv_layers(config.prefill.method)
    layers = model.config.num_hidden_layers
    schedule = make_schedule(model.decode, num_layers=layers, max_new_tokens=new, kv_layers=swiftkv)
    shape = {"num_new": new, "itemsize": getattr(torch, dtype).itemsize}
    found: dict[str, Any] = {
        "model": model.source,
        "layers": layers,
        "decode": model.decode,
        "device": str(device),
        "dtype": dtype,
        "quantization": config.model.quantization,
        "load_s": None,
        "batch_size": None,
        "cache_bytes_per_row": {
            str(b): cache_bytes_per_row(model.config, schedule, prompt_columns=b, **shape) for b in buckets
        },
    }
    if device.type == "cuda" and not torch.cuda.is_available():
        return found
    if config.model.quantization is not None and not cpu_kernels.has_tiles():
        return found
    note(f"model: loading {model.source} on {device}")
    generator = Generator(generator_config(config, model, device, dtype))
    sizes = {str(bucket): generator.batch_size(bucket, new) for bucket in buckets}
    return found | {"load_s": generator.load_s, "batch_size": sizes}


def generator_config(config: JobConfig, model: ResolvedModel, device: torch.device, dtype: str) -> GeneratorConfig:
    """As `spec.make_spec` tells a worker, on this machine."""
    tokenizer, size = config.model.tokenizer, config.actors.batch_size
    return GeneratorConfig(
        source=str(model.folder),
        tokenizer=tokenizer and str(resolve_source(tokenizer, "model.tokenizer")),
        decode=model.decode,
        prefill=config.prefill.method,
        dtype=dtype,
        quantization=config.model.quantization,
        device=device.type,
        batch_size=None if size == "auto" else size,
        length_buckets=config.actors.length_buckets,
        deterministic=config.sampling.deterministic,
        baseline_fraction=config.baseline.fraction,
    )


def output(config: JobConfig, problems: list[str]) -> dict[str, Any]:
    """Where a run would write; nothing is created."""
    folder = RunFolder.open(config.output.path)
    found: dict[str, Any] = {"path": folder.shown, "exists": folder.exists()}
    if folder.is_local:
        place = next(p for p in (Path(folder.root), *Path(folder.root).parents) if p.exists())
        found["free_bytes"] = shutil.disk_usage(place).free
        if not os.access(place, os.W_OK):
            problems.append(f"output.path: {place} is not writable for this user; choose another output.path")
        if found["free_bytes"] < LOW_DISK_BYTES:
            problems.append(f"output.path: {found['free_bytes'] / GIB:.1f} GiB are free at {place}; make room")
    if found["exists"] and config.output.if_exists == "fail":
        problems.append(
            f"output.path: {folder.shown} exists already; use --resume to go on with it, --overwrite to start anew, or "
            "another output.path"
        )
    return found


def wrong_devices() -> list[str]:
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if has_driver and not torch.cuda.is_available():
        return [
            f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU; install a CUDA build of "
            "torch, or check CUDA_VISIBLE_DEVICES"
        ]
    return []


def wrong_places() -> list[str]:
    if not os.path.isdir("/dev/shm"):
        return []
    total = shutil.disk_usage("/dev/shm").total
    wanted = min(OBJECT_STORE_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5)
    if total < wanted:
        return [
            f"/dev/shm holds {total / GIB:.1f} GiB, and Ray's object store wants {wanted / GIB:.1f}: it would lie on "
            "disk; give the container more (docker run --shm-size=4g)"
        ]
    return []
