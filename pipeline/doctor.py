"""What this machine is, what a run would choose on it, and what is wrong. Loads the model once, changes nothing."""

import importlib.metadata
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from actors.generator import Generator, GeneratorConfig, choose_device, free_bytes
from pipeline.checks import check_model, resolve_dtype
from pipeline.cluster import OBJECT_STORE_BYTES, Cluster, num_cores, plan_pool, start_ray
from pipeline.config import ConfigError, JobConfig
from pipeline.input.files import list_input
from pipeline.machine import provenance
from pipeline.run_folder import Note, RunFolder
from skipdecode.cost import cache_bytes_per_row

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
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

    device = choose_device("auto")
    document: dict[str, Any] = {
        "machine": provenance(device, PACKAGES) | machine(),
        "gpus": gpus(),
        "ray": attempt(ray_facts),
    }
    problems += wrong_versions() + wrong_devices() + wrong_places()
    document["choice"] = attempt(lambda: choice(config, device, note))
    attempt(lambda: pool(config, document["ray"]))
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


def ray_facts() -> dict[str, Any]:
    """Of the cluster that RAY_ADDRESS names; without one, of what a run would start in its own process."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        cores, num_gpus = num_cores(), torch.cuda.device_count()
        return {"address": None, "num_cpus": float(max(8, 4 * cores)), "num_gpus": float(num_gpus), "nodes": 1}
    try:
        cluster = start_ray()
    except Exception as error:  # Ray raises what its transport raised
        raise ConfigError(
            f"RAY_ADDRESS: {address} does not answer ({error}); unset it to run on this machine alone"
        ) from error
    nodes = len(cluster.node_cpus)
    return {"address": address, "num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus, "nodes": nodes}


def pool(config: JobConfig, facts: dict[str, Any] | None) -> None:
    """ConfigError when the pool of decode workers does not fit."""
    if facts is not None and facts["address"] is None:
        cluster = Cluster(facts["num_cpus"], facts["num_gpus"], num_cores(), is_embedded=True)
        plan_pool(config.actors, cluster, {"CPU": facts["num_cpus"], "GPU": facts["num_gpus"]})


def choice(config: JobConfig, device: torch.device, note: Note) -> dict[str, Any]:
    """Loads the model as a worker does, and says what it would decode with."""
    model = check_model(config, note)
    note(f"model: loading {model.source} on {device}")
    dtype = resolve_dtype(config.model.dtype, device.type)
    size = config.actors.batch_size
    generator = Generator(
        GeneratorConfig(
            source=str(model.folder),
            decode=model.decode,
            prefill=config.prefill.method,
            dtype=dtype,
            device=device.type,
            batch_size=None if size == "auto" else size,
            length_buckets=config.actors.length_buckets,
            deterministic=config.sampling.deterministic,
            baseline_fraction=config.baseline.fraction,
        )
    )
    new = config.sampling.max_new_tokens
    buckets = [b for b in config.actors.length_buckets if b + new <= model.config.max_position_embeddings]
    schedule = generator.schedule(new)
    shape = {"num_new": new, "itemsize": generator.dtype.itemsize}
    return {
        "model": model.source,
        "layers": model.config.num_hidden_layers,
        "decode": model.decode,
        "device": str(device),
        "dtype": dtype,
        "load_s": generator.load_s,
        "batch_size": {str(bucket): generator.batch_size(bucket, new) for bucket in buckets},
        "cache_bytes_per_row": {
            str(b): cache_bytes_per_row(model.config, schedule, prompt_columns=b, **shape) for b in buckets
        },
    }


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


def wrong_versions() -> list[str]:
    """Dependencies of pyproject.toml that are missing, or that are there in another version."""
    wrong = []
    wanted = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    for requirement in map(Requirement, wanted):
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed; pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(there.partition("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {there}, wanted {requirement.specifier}; pip install '{requirement}'")
    return wrong


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
