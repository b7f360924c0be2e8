"""The pool of training workers: what fits, what each gets, and what is refused."""

import pytest

from pipeline.cluster.pool import Cluster
from pipeline.config.job import ConfigError
from pipeline.training.config import WorkersSection
from pipeline.training.pool import TrainPool, plan_workers

LAPTOP = Cluster(8.0, 0.0, 2, is_embedded=True, node_cpus=(8.0,), node_gpus=(0.0,))
NODES = Cluster(32.0, 0.0, 32, is_embedded=False, node_cpus=(16.0, 16.0), node_gpus=(0.0, 0.0))
GPUS = Cluster(64.0, 8.0, 64, is_embedded=False, node_cpus=(32.0, 32.0), node_gpus=(4.0, 4.0))


def plan(cluster: Cluster, free: dict[str, float] | None = None, **keys: object) -> TrainPool:
    free = {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus} if free is None else free
    return plan_workers(WorkersSection(**keys), cluster, free)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cluster", "keys", "pool"),
    [
        (LAPTOP, {}, TrainPool(1, 1.0, False, 2)),
        (LAPTOP, {"num_workers": 2}, TrainPool(2, 1.0, False, 1)),
        (LAPTOP, {"num_workers": 4, "num_cpus": 0.5}, TrainPool(4, 0.5, False, 1)),
        (LAPTOP, {"threads": 1}, TrainPool(1, 1.0, False, 1)),
        (NODES, {}, TrainPool(1, 16.0, False, 16)),
        (NODES, {"num_workers": 4}, TrainPool(4, 8.0, False, 8)),
        (GPUS, {}, TrainPool(8, 1.0, True, 8)),
        (GPUS, {"use_gpu": False}, TrainPool(1, 32.0, False, 32)),
        (GPUS, {"num_workers": 2, "num_cpus": 4}, TrainPool(2, 4.0, True, 32)),
    ],
)
def test_what_fits(cluster: Cluster, keys: dict[str, object], pool: TrainPool) -> None:
    assert plan(cluster, **keys) == pool


@pytest.mark.parametrize(
    ("cluster", "keys", "message"),
    [
        (LAPTOP, {"use_gpu": True}, "workers.use_gpu: true, but the cluster has no GPU"),
        (LAPTOP, {"num_workers": 3}, "workers.num_workers: 3 workers need a core each, the cluster has 2"),
        (LAPTOP, {"num_workers": 3, "num_cpus": 4}, "need 12 CPUs, 8 are free"),
        (GPUS, {"num_workers": 9}, "9 workers need a GPU each, the cluster has 8"),
        (NODES, {"num_cpus": 20}, "must fit into one node, and the nodes have 16 CPUs and 0 GPUs, 16 CPUs and 0 GPUs"),
        (GPUS, {"num_workers": 5, "num_cpus": 12}, "5 workers with 12 CPUs and 1 GPU each; a worker must fit into one"),
    ],
)
def test_what_does_not(cluster: Cluster, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(cluster, **keys)


def test_what_others_hold_is_not_counted() -> None:
    with pytest.raises(ConfigError, match=r"need 8 GPUs, 3 are free; .* wait for other jobs"):
        plan(GPUS, {"CPU": 64.0, "GPU": 3.0})
