"""Sizing the pool: what `auto` means, and what is refused."""

from pathlib import Path

import pytest

from pipeline.cluster.pool import Cluster, plan_pool, unseen_gpus
from pipeline.config.job import ActorsConfig, ConfigError

LAPTOP = Cluster(num_cpus=8, num_gpus=0, num_cores=2, is_embedded=True)
SMALL = Cluster(num_cpus=2, num_gpus=0, num_cores=2, is_embedded=False)
GPU_BOX = Cluster(num_cpus=64, num_gpus=8, num_cores=64, is_embedded=False)
TIGHT_GPU_BOX = Cluster(num_cpus=4, num_gpus=4, num_cores=4, is_embedded=False)
CPU_CLUSTER = Cluster(num_cpus=64, num_gpus=0, num_cores=64, is_embedded=False)


def free(cluster: Cluster) -> dict[str, float]:
    return {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus}


@pytest.mark.parametrize(
    ("actors", "cluster", "size", "threads"),
    [
        ({}, LAPTOP, (1, 1), 2),
        ({"num_actors": 2}, LAPTOP, (2, 2), 1),
        ({"num_actors": 2}, SMALL, (2, 2), 1),
        ({}, CPU_CLUSTER, (16, 16), 4),
        ({"num_actors": 2, "num_cpus": 4}, CPU_CLUSTER, (2, 2), 4),
        ({"num_cpus": 0.5}, LAPTOP, (1, 1), 1),
        ({}, GPU_BOX, (8, 8), 1),
        ({"num_gpus": 0.5}, GPU_BOX, (16, 16), 1),
        ({"num_actors": (1, 4)}, GPU_BOX, (1, 4), 1),
        ({}, TIGHT_GPU_BOX, (4, 4), 1),
        ({"num_actors": (1, 8)}, CPU_CLUSTER, (1, 8), 8),
        ({"num_actors": (1, 1000)}, SMALL, (1, 1000), 1),
    ],
)
def test_the_pool_fits_and_leaves_room(actors: dict, cluster: Cluster, size: tuple[int, int], threads: int) -> None:
    pool = plan_pool(ActorsConfig(**actors), cluster, free(cluster))
    assert (pool.min_size, pool.max_size) == size
    assert pool.num_threads == threads
    assert pool.num_cpus > 0
    assert pool.min_size * pool.num_cpus + 1 <= cluster.num_cpus
    if pool.max_size <= cluster.num_cores:
        assert pool.max_size * pool.num_cpus + 1 <= cluster.num_cpus, "the pool could not grow to its size"
    assert pool.min_size * pool.num_gpus <= cluster.num_gpus
    assert pool.num_cpus < 1 or pool.num_cpus == int(pool.num_cpus), "Ray wants whole numbers above 1"


@pytest.mark.parametrize(
    ("actors", "cluster", "message"),
    [
        ({"num_actors": 3}, SMALL, "3 actors on CPUs need a core each, the cluster has 2"),
        ({"num_actors": 2, "num_cpus": 1}, SMALL, "need 3 CPUs, 2 of 2 are free"),
        ({"num_actors": 9}, GPU_BOX, "9 actors with 1 GPUs each need 9 GPUs, the cluster has 8"),
        ({"num_gpus": 1}, SMALL, "need 1 GPUs, the cluster has 0"),
        ({"num_actors": (1, 64), "num_gpus": 1}, SMALL, "grows by itself, keep nodes for the first actors up"),
    ],
)
def test_what_cannot_fit_names_the_key(actors: dict, cluster: Cluster, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^actors\.num_actors: ") as caught:
        plan_pool(ActorsConfig(**actors), cluster, free(cluster))
    assert message in str(caught.value)


def test_what_others_hold_counts() -> None:
    with pytest.raises(ConfigError, match="4 of 8 are free"):
        plan_pool(ActorsConfig(), GPU_BOX, {"CPU": 64, "GPU": 4})
    with pytest.raises(ConfigError, match=r"0\.5 of 2 are free"):
        plan_pool(ActorsConfig(), SMALL, {"CPU": 0.5})


def test_an_actor_must_fit_into_one_node() -> None:
    small_nodes = Cluster(4, 0, 4, is_embedded=False, node_cpus=(2, 2), node_gpus=(0, 0))
    pool = plan_pool(ActorsConfig(), small_nodes, free(small_nodes))
    assert pool.num_cpus <= 2, "the share of the whole cluster fits no node"
    assert pool.num_threads <= 2
    with pytest.raises(
        ConfigError, match=r"must fit into one node, and the nodes \(2 CPUs and 0 GPUs, 2 CPUs and 0 GPUs\) hold 0"
    ):
        plan_pool(ActorsConfig(num_cpus=3), small_nodes, free(small_nodes))
    gpu_nodes = Cluster(16, 2, 16, is_embedded=False, node_cpus=(8, 8), node_gpus=(1, 1))
    with pytest.raises(ConfigError, match="hold 0"):
        plan_pool(ActorsConfig(num_gpus=2), gpu_nodes, free(gpu_nodes))
    assert plan_pool(ActorsConfig(), gpu_nodes, free(gpu_nodes)).min_size == 2


@pytest.mark.parametrize(
    ("num_gpus", "node_gpus", "size"),
    [(2, (3, 3), 2), (2, (3, 1), 1), (2, (4, 3), 3), (0.4, (1, 1), 4), (0.1, (1, 1), 20), (3, (3, 3), 2)],
)
def test_auto_counts_the_actors_of_each_node(num_gpus: float, node_gpus: tuple[int, int], size: int) -> None:
    """GPUs that two nodes have left over make no actor."""
    nodes = Cluster(128, sum(node_gpus), 128, is_embedded=False, node_cpus=(64, 64), node_gpus=node_gpus)
    pool = plan_pool(ActorsConfig(num_gpus=num_gpus), nodes, free(nodes))
    assert (pool.min_size, pool.max_size) == (size, size)


def test_gpus_that_ray_does_not_count_are_remarked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks NVML, and counts none where that cannot be opened: a corpus would go through the CPUs without a word."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = str(tmp_path / "nvidia[0-9]*")
    assert unseen_gpus(ActorsConfig(), LAPTOP, devices) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    remark = unseen_gpus(ActorsConfig(), LAPTOP, devices)
    assert remark is not None
    assert f"{tmp_path / 'nvidia0'}, {tmp_path / 'nvidia1'}, and Ray counts no GPU" in remark
    assert "--num-gpus=2" in remark
    assert unseen_gpus(ActorsConfig(num_gpus=0), LAPTOP, devices) is None, "it is meant"
    assert unseen_gpus(ActorsConfig(), GPU_BOX, devices) is None
    assert unseen_gpus(ActorsConfig(), CPU_CLUSTER, devices) is None, "this machine is not its workers'"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unseen_gpus(ActorsConfig(), LAPTOP, devices) is None, "hidden on purpose"
