"""Joining or starting Ray, and sizing the pool of decode actors before anything is started.

A pool that takes every CPU leaves none to readers and writers, and Ray then waits without an error. So some CPUs are
kept free, and a pool that cannot fit is a `ConfigError` at once. Joins the cluster that RAY_ADDRESS names (as under
`ray job submit`), otherwise starts one in this process.
"""

import glob
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config.job import ActorsConfig, ConfigError
from pipeline.formatting import Log
from skipdecode.backends.choice import VARIABLE
from skipdecode.backends.host_memory import num_cores, total_bytes

NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
IO_CPUS = 1.0  # kept free for reading, tokenising and writing
STAGE_CPUS = 0.25  # asked for by each such task
CPUS_PER_ACTOR = 4  # `auto` on a CPU: cores that one decoder can use before a second one pays more
FREE_WAIT_S = 15.0  # for CPUs and GPUs that others are about to give back
MAX_OBJECT_STORE_BYTES = 2 << 30  # of an embedded Ray; rows are small and stream through


@dataclass(frozen=True)
class Cluster:
    """The cluster's resources in Ray's units, and its real cores."""

    num_cpus: float
    num_gpus: float
    num_cores: int
    """Cores that CPU decoders may use in all; an embedded Ray announces more CPUs than that."""
    is_embedded: bool
    node_cpus: tuple[float, ...] = ()
    """CPUs of each node, in Ray's units: an actor must fit into one."""
    node_gpus: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pool:
    """How many decode actors run and what each asks for."""

    min_size: int
    max_size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    """torch threads of each actor."""


def start_ray(log: Log = lambda _: None) -> Cluster:
    """Joins RAY_ADDRESS or starts an embedded Ray; quiet either way. ConfigError if the environment does not allow it.

    `log` receives a warning if whoever reaches the cluster may use it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the announced default; silences a warning
    from pipeline.cluster.ray_environment import (  # here: actors without tables need no Ray Data
        check_cluster,
        check_worker_starts,
        provide_temporary_folder,
        provide_token,
        slow_start_is_named,
        unreachable,
    )
    from pipeline.cluster.ray_internals import NOISY_LOGGERS, ignore_uv_run, job_env_vars

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        return look_at_cluster()
    options: dict[str, str | int | bool] = {"logging_level": logging.WARNING, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS", "local") or "local"
    if is_embedded := address == "local":
        provide_temporary_folder(log)
        provide_token()
        ignore_uv_run()
        with slow_start_is_named():
            _start_embedded(options)
    else:
        check_cluster(address, log)
        forced = os.environ.get(VARIABLE)  # workers of an embedded Ray have it from this process
        own = {"env_vars": {VARIABLE: forced}} if forced and VARIABLE not in job_env_vars() else None
        try:
            ray.init(runtime_env=own, **options)
        except Exception as error:  # Ray raises whatever its transport raised
            raise unreachable(address, error) from error
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    check_worker_starts()
    return look_at_cluster(is_embedded)


def _start_embedded(options: dict[str, str | int | bool]) -> None:
    """Starts a Ray on this machine that ends with this process."""
    cores = num_cores()
    # Ray's 15 lets everything else on the machine go before decoding; a thread that waits holds up all of a product
    os.environ.setdefault("RAY_worker_niceness", "0")
    # a worker takes 0.7 % of a core while it waits: no more of them than there is work for
    os.environ.setdefault("RAY_num_workers_soft_limit", str(max(1, cores // 2)))
    # nor are they ended after a second, to be started again for the next window: that takes a core for one
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "30000")
    # nor is the first one waited for here, which would be for ever if it cannot start (`check_worker_starts`)
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")  # new logs not looked for all the time
    ray.init(
        # "local": else Ray joins whatever a file left behind by another cluster points to
        address="local",
        # more CPUs than cores: reading and writing are waiting, and decode actors set their threads themselves
        num_cpus=max(8, 4 * cores),
        include_dashboard=False,
        object_store_memory=object_store_bytes(),
        **options,
    )


def object_store_bytes() -> int:
    """Bytes of the object store of an embedded Ray."""
    return min(MAX_OBJECT_STORE_BYTES, total_bytes() // 5)


def look_at_cluster(is_embedded: bool = False) -> Cluster:
    """The cluster that this process has joined."""
    cores = num_cores()
    total = ray.cluster_resources()
    num_cpus = total.get("CPU", 0.0)
    is_embedded = is_embedded or (num_cpus > cores and len(ray.nodes()) == 1)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Cluster(
        num_cpus,
        total.get("GPU", 0.0),
        cores if is_embedded else int(num_cpus),
        is_embedded,
        tuple(node.get("CPU", 0.0) for node in nodes),
        tuple(node.get("GPU", 0.0) for node in nodes),
    )


def unseen_gpus(actors: ActorsConfig, cluster: Cluster, devices: str = NVIDIA_DEVICES) -> str | None:
    """A remark where this machine has NVIDIA devices and its Ray has found none; None where that is meant, or unknown.

    Ray asks NVML, and where that cannot be opened it counts no GPU without a word; torch may see them all the same.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if cluster.num_gpus or not cluster.is_embedded or actors.num_gpus != "auto" or is_hidden:
        return None
    found = sorted(glob.glob(devices))
    if not found:
        return None
    return (
        f"warning: this machine has {', '.join(found)}, and Ray counts no GPU, so CPUs decode; if that is not meant, "
        f"`ray start --head --num-gpus={len(found)}` and RAY_ADDRESS=auto use them (actors.num_gpus=0 if it is)"
    )


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """For actors that the run needs as long as its driver lives: no other node takes them along."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def find_pool(actors: ActorsConfig, cluster: Cluster) -> Pool:
    """`plan_pool` for what is free now, or becomes so soon: tasks that have just ended hold their CPUs for a moment."""
    plan_pool(actors, cluster, ray.cluster_resources())  # what can never fit is refused at once
    deadline = time.monotonic() + FREE_WAIT_S
    while time.monotonic() < deadline:
        with suppress(ConfigError):
            return plan_pool(actors, cluster, ray.available_resources())
        time.sleep(0.2)
    return plan_pool(actors, cluster, ray.available_resources())


def plan_pool(actors: ActorsConfig, cluster: Cluster, free: dict[str, float]) -> Pool:
    """The pool for `cluster`, of which `free` is not taken by others; ConfigError when it cannot fit."""
    num_gpus = (1.0 if cluster.num_gpus else 0.0) if actors.num_gpus == "auto" else float(actors.num_gpus)
    low, high = _sizes(actors, cluster, num_gpus)
    if num_gpus and low * num_gpus > cluster.num_gpus:
        raise ConfigError(
            "actors.num_actors",
            f"{low} actors with {num_gpus:g} GPUs each need {low * num_gpus:g} GPUs, "
            f"the cluster has {cluster.num_gpus:g}; lower actors.num_actors or actors.num_gpus (or, if the cluster "
            "grows by itself, keep nodes for the first actors up: what cannot start is refused at once)",
        )
    if not num_gpus and actors.num_cpus == "auto" and low > cluster.num_cores:
        raise ConfigError(
            "actors.num_actors",
            f"{low} actors on CPUs need a core each, the cluster has {cluster.num_cores}; "
            "lower actors.num_actors, or set actors.num_cpus below 1 to share cores",
        )
    num_cpus = _cpus_per_actor(actors, cluster, high, num_gpus)  # what the pool may grow to must fit beside it
    needed = low * num_cpus + IO_CPUS
    if needed > free.get("CPU", 0.0) + 1e-6:
        raise ConfigError(
            "actors.num_actors",
            f"{low} actors with {num_cpus:g} CPUs each and {IO_CPUS:g} CPU for reading and writing "
            f"need {needed:g} CPUs, {free.get('CPU', 0.0):g} of {cluster.num_cpus:g} are free; "
            "lower actors.num_actors or actors.num_cpus",
        )
    if num_gpus and low * num_gpus > free.get("GPU", 0.0) + 1e-6:
        raise ConfigError(
            "actors.num_actors",
            f"{low} actors need {low * num_gpus:g} GPUs, "
            f"{free.get('GPU', 0.0):g} of {cluster.num_gpus:g} are free; wait for other jobs, or ask for fewer",
        )
    fits = sum(fit(cpus, gpus, num_cpus, num_gpus) for cpus, gpus in node_shapes(cluster))
    if fits < low:
        shapes = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in node_shapes(cluster))
        raise ConfigError(
            "actors.num_actors",
            f"{low} actors with {num_cpus:g} CPUs and {num_gpus:g} GPUs each; an actor "
            f"must fit into one node, and the nodes ({shapes}) hold {fits}; "
            "lower actors.num_actors, actors.num_cpus or actors.num_gpus",
        )
    cores = min(cluster.num_cores, int(max(cpus for cpus, _ in node_shapes(cluster))))  # of one node
    per_node = -(-high // len(node_shapes(cluster)))
    threads = cores // per_node if not num_gpus else int(num_cpus)
    if actors.num_cpus != "auto":
        threads = min(threads, int(num_cpus))  # no more than it was given
    return Pool(low, high, num_cpus, num_gpus, max(1, threads))


def node_shapes(cluster: Cluster) -> list[tuple[float, float]]:
    """(CPUs, GPUs) of each node."""
    return list(zip(cluster.node_cpus, cluster.node_gpus, strict=True)) or [(cluster.num_cpus, cluster.num_gpus)]


def fit(cpus: float, gpus: float, num_cpus: float, num_gpus: float) -> int:
    """How many actors a node holds."""
    by_cpu = int(cpus / num_cpus + 1e-6)
    return min(by_cpu, int(gpus / num_gpus + 1e-6)) if num_gpus else by_cpu


def _sizes(actors: ActorsConfig, cluster: Cluster, num_gpus: float) -> tuple[int, int]:
    if actors.num_actors == "auto":
        by_node = [int(gpus / num_gpus + 1e-6) for _, gpus in node_shapes(cluster)] if num_gpus else []
        count = max(1, sum(by_node) if num_gpus else cluster.num_cores // CPUS_PER_ACTOR)
        return count, count
    if isinstance(actors.num_actors, int):
        return actors.num_actors, actors.num_actors
    return actors.num_actors


def _cpus_per_actor(actors: ActorsConfig, cluster: Cluster, num_actors: int, num_gpus: float) -> float:
    if actors.num_cpus != "auto":
        return float(actors.num_cpus)
    share = max(cluster.num_cpus - IO_CPUS, 0.1) / num_actors
    if num_gpus or cluster.is_embedded:
        share = min(share, 1.0)  # the GPU works; or the CPUs are not real cores
    share = min(share, max(cpus for cpus, _ in node_shapes(cluster)))
    return float(int(share)) if share >= 1 else max(0.01, int(share * 100) / 100)  # Ray wants whole numbers above 1
