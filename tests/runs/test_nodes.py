"""Runs on several Ray nodes of this machine: work spreads, a node joins late and gets work, a node goes and no row is
lost; a corpus larger than the object store passes through it without spilling."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster

from tests.support.processes import command, environment, rows, run, start, state, wait_for, workers, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/opt-e2e"
MIB = 1 << 20


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """`make_cluster(**head)`: a head on this machine; ends with the test."""
    made: list[Cluster] = []
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}

    def make(**head: Any) -> Cluster:
        made.append(Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False}))
        return made[0]

    yield make
    for cluster in made:
        cluster.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def decoders(node: Any) -> set[int]:
    """Pids of the decode workers of one node: children of its raylet."""
    raylet = node.all_processes["raylet"][0].process.pid
    children = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == raylet:
                children.add(int(entry.name))
    return workers(children)


def rows_by_pid(output: Path) -> dict[int, int]:
    """Rows that each worker process decoded, from the run's own records."""
    folder = output / "metrics"
    starts, windows = (
        ds.dataset(sorted(folder.glob(f"{kind}-*.parquet"))).to_table().to_pylist() for kind in ("workers", "windows")
    )
    found: dict[int, int] = {}
    for at, begun in enumerate(starts):
        later = [s["ready_at"] for s in starts[at + 1 :] if s["worker"] == begun["worker"]]
        end = min(later, default=float("inf"))
        mine = [w for w in windows if w["worker"] == begun["worker"] and begun["ready_at"] <= w["started_at"] < end]
        found[begun["pid"]] = sum(w["rows"] for w in mine)
    return found


def test_a_node_that_joins_late_gets_work_and_one_that_goes_loses_nothing(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """The head alone; a second node comes and works; a third comes, and the second is gone at once."""
    cluster = make_cluster(num_cpus=3, object_store_memory=150 * MIB)
    count, output = 2000, tmp_path / "run"
    wanted = [
        *command(MODEL, write_prompts(tmp_path / "in.jsonl", count), output), "actors.num_actors=[1,2]",
        "actors.num_cpus=2", "actors.batch_size=16", "actors.window_batches=1", "sampling.max_new_tokens=40",
        "sampling.ignore_eos=true", "decode.method=full",
    ]  # fmt: skip

    def written() -> int:
        return len(list(output.glob("data/status=ok/*.parquet")))

    driver = start(wanted, environment(None, tmp_path, RAY_ADDRESS=cluster.address))
    try:
        wait_for(written, driver)
        # Ray Data grows a pool while the stages' shares of the CPUs allow it: a node of two would not do
        second = cluster.add_node(num_cpus=12, object_store_memory=150 * MIB)
        on_second = wait_for(lambda: decoders(second), driver)
        files = written()
        wait_for(lambda: written() > files + 20, driver)  # time to load the model and to decode
        third = cluster.add_node(num_cpus=12, object_store_memory=150 * MIB)
        assert driver.poll() is None, "the run was over before the node went"
        cluster.remove_node(second, allow_graceful=False)
        on_third = wait_for(lambda: decoders(third), driver)
        _, err = driver.communicate(timeout=600)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, err
    assert len(rows(output, "ok")) == count
    assert state(output)["books"] == {"input": count, "ok": count, "failed": 0, "closed": True}
    done = rows_by_pid(output)
    assert sum(done.get(pid, 0) for pid in on_second) > 0, f"the second node got no work: {done}"
    assert sum(done.get(pid, 0) for pid in on_third) > 0, f"nothing went on where the second left off: {done}"
    verified = run([sys.executable, "-m", "jobs.verify", str(output)], environment(None, tmp_path))
    assert verified.returncode == 0, verified.stderr


def test_work_spreads_over_the_nodes_that_are_there(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(num_cpus=2, object_store_memory=150 * MIB)
    others = [cluster.add_node(num_cpus=1, object_store_memory=150 * MIB) for _ in range(2)]
    count, output = 480, tmp_path / "run"
    wanted = [
        *command(MODEL, write_prompts(tmp_path / "in.jsonl", count), output), "actors.num_actors=3",
        "actors.num_cpus=1", "sampling.max_new_tokens=24", "sampling.ignore_eos=true", "actors.window_batches=2",
    ]  # fmt: skip
    driver = start(wanted, environment(None, tmp_path, RAY_ADDRESS=cluster.address))
    try:
        pids = [wait_for(lambda node=node: decoders(node), driver) for node in [cluster.head_node, *others]]
        _, err = driver.communicate(timeout=600)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, err
    assert len(rows(output, "ok")) == count
    shares = [sum(rows_by_pid(output).get(pid, 0) for pid in own) for own in pids]
    assert sum(shares) == count
    assert min(shares) > count / 12, f"rows by node: {shares}"


def spilled(address: str) -> float:
    """MiB that the cluster has spilled since it began, as Ray counts."""
    code = f"import ray; ray.init({address!r}, logging_level='ERROR'); from ray._private.internal_api import "
    code += "memory_summary; print(memory_summary(stats_only=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Plasma memory usage" in done.stdout
    return sum(float(size) for size in re.findall(r"Spilled ([0-9.]+) MiB", done.stdout))


def test_a_corpus_larger_than_the_object_store_does_not_spill(
    make_cluster: Callable[..., Cluster], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """400 MB of rows, whose own column passes through, against an object store of 100 MiB."""
    cluster = make_cluster(num_cpus=8, object_store_memory=100 * MIB)
    source, output = tmp_path / "in", tmp_path / "run"
    source.mkdir()
    for part in range(8):
        ids = [f"r{part}-{i}" for i in range(250)]
        payload = [os.urandom(100_000).hex() for _ in ids]
        table = pa.table({"id": ids, "prompt": [f"row {i % 53}" for i in range(250)], "payload": payload})
        pq.write_table(table, source / f"{part}.parquet", compression="none")
    assert sum(path.stat().st_size for path in source.iterdir()) > 3 * 100 * MIB
    wanted = [*command(tiny_checkpoint, source, output), "actors.num_actors=2", "actors.num_cpus=1"]
    done = run(wanted, environment(None, tmp_path, RAY_ADDRESS=cluster.address))
    assert done.returncode == 0, done.stderr
    assert state(output)["books"] == {"input": 2000, "ok": 2000, "failed": 0, "closed": True}
    assert spilled(cluster.address) == 0


def test_a_large_file_moves_where_one_cpu_is_left_for_all_but_decoding(
    make_cluster: Callable[..., Cluster], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A reader that must wait holds its share of that CPU: every stage behind it must find one too."""
    source, output = tmp_path / "in.jsonl", tmp_path / "run"
    with source.open("w") as lines:
        for number in range(40_000):
            row = {"id": f"r{number}", "prompt": f"row {number % 97}", "log": "x" * 2000}
            lines.write(json.dumps(row) + "\n")
    address = make_cluster(num_cpus=2, object_store_memory=400 * MIB).address
    more = ["actors.num_cpus=1", "sampling.max_new_tokens=5", "actors.batch_size=128", "actors.window_batches=4"]
    done = run(
        command(tiny_checkpoint, source, output, "actors.num_actors=1", *more),
        environment(None, tmp_path, RAY_ADDRESS=address),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stderr
    assert state(output)["books"] | {"ok": 40_000, "failed": 0, "closed": True} == state(output)["books"]
    windows = ds.dataset(sorted((output / "metrics").glob("windows-*.parquet"))).to_table()["rows"].to_pylist()
    assert sorted(windows)[1:] == [512] * (40_000 // 512), "every window but the last is full"
