"""The number of training workers and their resources; a pool that does not fit is a `ConfigError` instead of a wait.

The counterpart of `pipeline.cluster.pool.plan_pool` for Ray Train, which starts all workers at once or none.
"""

from dataclasses import dataclass

from pipeline.cluster.pool import Cluster, fit, node_shapes
from pipeline.config.job import ConfigError
from pipeline.training.config import WorkersSection


@dataclass(frozen=True)
class TrainPool:
    num_workers: int
    num_cpus: float
    """Asked for by each worker, in Ray's units."""
    use_gpu: bool
    """One each."""
    threads: int
    """torch threads of each worker."""


def plan_workers(workers: WorkersSection, cluster: Cluster, free: dict[str, float]) -> TrainPool:
    """The pool for `cluster`, of which `free` is not taken by others."""
    use_gpu = cluster.num_gpus >= 1 if workers.use_gpu == "auto" else workers.use_gpu
    if use_gpu and cluster.num_gpus < 1:
        raise ConfigError(
            "workers.use_gpu", "true, but the cluster has no GPU; set workers.use_gpu=false to train on CPUs"
        )
    count = workers.num_workers
    if count == "auto":
        count = int(cluster.num_gpus) if use_gpu else 1
    if use_gpu and count > cluster.num_gpus:
        raise ConfigError(
            "workers.num_workers",
            f"{count} workers need a GPU each, the cluster has {cluster.num_gpus:g}; lower workers.num_workers",
        )
    if not use_gpu and workers.num_cpus == "auto" and count > cluster.num_cores:
        raise ConfigError(
            "workers.num_workers",
            f"{count} workers need a core each, the cluster has {cluster.num_cores}; "
            "lower workers.num_workers, or set workers.num_cpus to share cores",
        )
    num_cpus = _num_cpus(workers, cluster, count, use_gpu)
    num_gpus = 1.0 if use_gpu else 0.0
    asked = f"{count} workers with {num_cpus:g} CPUs" + (" and 1 GPU" if use_gpu else "") + " each"
    for name, needed in (("CPU", count * num_cpus), ("GPU", count * num_gpus)):
        if needed > free.get(name, 0.0) + 1e-6:
            raise ConfigError(
                "workers.num_workers",
                f"{asked} need {needed:g} {name}s, {free.get(name, 0.0):g} are free; "
                "lower workers.num_workers or workers.num_cpus, or wait for other jobs",
            )
    if sum(fit(cpus, gpus, num_cpus, num_gpus) for cpus, gpus in node_shapes(cluster)) < count:
        shapes = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in node_shapes(cluster))
        raise ConfigError(
            "workers.num_workers",
            f"{asked}; a worker must fit into one node, and the nodes have {shapes}; "
            "lower workers.num_workers or workers.num_cpus",
        )
    per_node = -(-count // len(node_shapes(cluster)))
    cores = min(cluster.num_cores, int(max(cpus for cpus, _ in node_shapes(cluster))))
    return TrainPool(count, num_cpus, use_gpu, workers.threads or max(1, cores // per_node))


def _num_cpus(workers: WorkersSection, cluster: Cluster, count: int, use_gpu: bool) -> float:
    if workers.num_cpus != "auto":
        return float(workers.num_cpus)
    if use_gpu or cluster.is_embedded:
        return 1.0  # the GPU works; or the CPUs are not real cores
    return max(1.0, float(int(min(cluster.num_cpus / count, max(cpus for cpus, _ in node_shapes(cluster))))))
