"""Processes killed with SIGKILL at random moments and at each step of a commit, on a Ray of several nodes.

After each trial, and a resume where the driver died: every row once, tokens as in an undisturbed run, no other file
among the data. The short version runs on an embedded Ray; the long one is marked slow.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from actors.generator import Generator, GeneratorConfig
from skipdecode.generate import Completion, Request
from skipdecode.sampling import Sampling
from tests.support.processes import command, descendants, environment, hits, rows, run, start, state, wait_for, workers

pytestmark = pytest.mark.ray

NUM_ROWS = 320
SAMPLINGS = {"greedy": ["sampling.temperature=0"], "sampled": ["sampling.temperature=0.9", "sampling.seed=7"]}
COMMIT_STEPS = ("begun", "staged", "synced", "renamed")


@dataclass
class Run:
    """One run that is to be hurt: how to start it, what it must give in the end."""

    command: list[str]
    output: Path
    folder: Path
    expected: dict[str, list[int]]
    env: dict[str, str]

    def faults(self, plan: dict[str, Any]) -> dict[str, str]:
        """The environment with this fault plan; forgets the hits of another."""
        for hit in self.folder.glob("faults.json.*.hit"):
            hit.unlink()
        return self.env | environment(plan, self.folder)

    def resume(self) -> None:
        done = run([*self.command, "--resume"], self.faults({}))
        assert done.returncode == 0, done.stderr

    def judge(self) -> None:
        """Books closed, every row once, tokens as undisturbed, no stray file; and `jobs.verify` says so too."""
        assert state(self.output)["state"] == "finished"
        assert state(self.output)["books"] == {"input": NUM_ROWS, "ok": NUM_ROWS, "failed": 0, "closed": True}
        assert {row: found["generated_tokens"] for row, found in rows(self.output).items()} == self.expected
        strays = [path for path in (self.output / "data").rglob("*") if path.is_file() and path.suffix != ".parquet"]
        assert not strays
        verified = run([sys.executable, "-m", "jobs.verify", str(self.output)], self.env)
        assert verified.returncode == 0, verified.stderr


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i % 53}"}) + "\n" for i in range(NUM_ROWS)))
    return path


def tokens(command: list[str], output: Path, env: dict[str, str]) -> dict[str, list[int]]:
    """Of an undisturbed run."""
    done = run(command, env)
    assert done.returncode == 0, done.stderr
    return {row: found["generated_tokens"] for row, found in rows(output).items()}


def kill_at(process: Any, fault: str, env_of: Run) -> None:
    """Kills the driver when a writer has stopped itself at `fault`; the writer then goes on, too late."""
    wait_for(lambda: fault in hits(env_of.folder), process)
    hit = next(env_of.folder.glob(f"faults.json.{fault}.*.hit"))
    process.kill()
    process.communicate(timeout=120)
    with suppress(ProcessLookupError):  # Ray was faster
        os.kill(int(hit.read_text()), signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_killed_in_a_commit_then_a_row_that_kills_its_worker(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Commit cut off, resume, poison row parked; all other rows as the decoder alone makes them."""
    source, env = write_rows(tmp_path / "in.jsonl"), environment(None, tmp_path)
    fixed = [*SAMPLINGS["sampled"], "decode.method=full", "limits.max_row_attempts=1"]
    wanted = command(tiny_checkpoint, source, tmp_path / "run", *fixed)
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu"))
    sampling = Sampling(8, temperature=0.9, seed=7)
    prompts = generator.tokenizer.encode([f"row {i % 53}" for i in range(NUM_ROWS)])
    answers = generator([Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]).answers
    expected = {f"r{i}": answer.tokens for i, answer in enumerate(answers) if isinstance(answer, Completion)}
    hurt = Run(wanted, tmp_path / "run", tmp_path, expected, env)
    driver = start(wanted, hurt.faults({"data staged": {"signal": "SIGSTOP", "after": 1}}))
    kill_at(driver, "data staged", hurt)
    assert 0 < len(rows(hurt.output)) < NUM_ROWS
    done = run([*wanted, "--resume"], hurt.faults({"decode r319": {"signal": "SIGSEGV", "times": 100}}))
    assert done.returncode == 0, done.stderr
    assert {row: found["error_code"] for row, found in rows(hurt.output, "failed").items()} == {"r319": "poison_row"}
    assert len(rows(hurt.output, "ok")) == NUM_ROWS - 1
    assert len(hits(tmp_path)) <= 3 + 1, "log2(window) + max_row_attempts deaths"
    made = {row: found["generated_tokens"] for row, found in rows(hurt.output, "ok").items()}
    assert made == {row: wanted for row, wanted in expected.items() if row != "r319"}
    assert state(hurt.output)["books"] == {"input": NUM_ROWS, "ok": NUM_ROWS - 1, "failed": 1, "closed": True}


@pytest.fixture(scope="module")
def with_failures(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `in.jsonl` and a finished `run/` of 40 good rows and 6 that were too long."""
    root = tmp_path_factory.mktemp("failures")
    lines = [{"id": f"r{i}", "prompt": "word " * (500 if i % 8 == 0 else 5) + str(i)} for i in range(46)]
    (root / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run([*command(tiny_checkpoint, root / "in.jsonl", root / "run"), "limits.max_failed_rows=6"], {**os.environ})
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("last", ["retry", "resume"])
@pytest.mark.parametrize(
    ("point", "after"),
    [("run.json staged", 2), ("run.json renamed", 2), ("commit moved", 0), ("commit moved", 1), ("commit removed", 0)],
)
def test_a_retry_killed_in_its_exchange(
    with_failures: Path, tiny_checkpoint: Path, tmp_path: Path, point: str, after: int, last: str
) -> None:
    output = tmp_path / "run"
    shutil.copytree(with_failures / "run", output)
    good = {row: found["generated_tokens"] for row, found in rows(output, "ok").items()}
    retry = [sys.executable, "-m", "jobs.retry", str(output), "input.too_long=truncate_right"]
    done = run(retry, environment({point: {"signal": "SIGKILL", "after": after}}, tmp_path))
    assert (done.returncode, hits(tmp_path)) == (-signal.SIGKILL, [point]), done.stderr
    resume = [*command(tiny_checkpoint, with_failures / "in.jsonl", output, "limits.max_failed_rows=6"), "--resume"]
    done = run(retry if last == "retry" else resume, environment({}, tmp_path))
    assert done.returncode == 0, done.stderr
    verified = run([sys.executable, "-m", "jobs.verify", str(output)], {**os.environ})
    assert verified.returncode == 0, verified.stderr
    found = rows(output, "ok")
    assert {row: found[row]["generated_tokens"] for row in good} == good
    if last == "retry" or "commit" in point:
        assert len(found) == 46


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A head and two nodes on this machine, whose workers read the fault plan of the folder."""
    folder = tmp_path_factory.mktemp("chaos")
    os.environ.update({key: environment({}, folder)[key] for key in ("PYTHONPATH", "SKIPDECODE_FAULTS")})
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"num_cpus": 3, "object_store_memory": 150 << 20}
    made = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(**small)
        yield made, folder
    finally:
        made.shutdown()
        del os.environ["SKIPDECODE_FAULTS"], os.environ["PYTHONPATH"]


@pytest.fixture(scope="module")
def undisturbed(cluster: tuple[Cluster, Path], tiny_checkpoint: Path) -> dict[str, dict[str, list[int]]]:
    """Tokens of every row, by sampling."""
    made, folder = cluster
    source, env = write_rows(folder / "in.jsonl"), environment({}, folder, RAY_ADDRESS=made.address)
    return {
        name: tokens(command(tiny_checkpoint, source, folder / name, *sampling), folder / name, env)
        for name, sampling in SAMPLINGS.items()
    }


TRIALS = [
    *(("actor", "") for _ in range(4)),
    *(("writer", "") for _ in range(3)),
    *(("node", "") for _ in range(4)),
    *(("driver", "") for _ in range(3)),
    *(("commit", step) for step in COMMIT_STEPS),
    *(("books", f"run.json {step}") for step in ("staged", "renamed")),
    *(("books at the end", f"run.json {step}") for step in ("staged", "renamed")),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trial", range(len(TRIALS)), ids=lambda i: f"{i}-{' '.join(TRIALS[i]).strip()}")
def test_chaos(
    cluster: tuple[Cluster, Path],
    undisturbed: dict[str, dict[str, list[int]]],
    tiny_checkpoint: Path,
    tmp_path: Path,
    trial: int,
) -> None:
    made, folder = cluster
    rng = random.Random(trial)
    kind, step = TRIALS[trial]
    sampling = list(SAMPLINGS)[trial % 2]
    wanted = command(
        tiny_checkpoint, folder / "in.jsonl", tmp_path / "run", *SAMPLINGS[sampling], "actors.num_actors=2",
        "actors.num_cpus=1",
    )  # fmt: skip
    env = environment({}, folder, RAY_ADDRESS=made.address)
    hurt = Run(wanted, tmp_path / "run", folder, undisturbed[sampling], env)
    plan: dict[str, Any] = {}
    if kind == "writer":
        plan = {f"data {rng.choice(COMMIT_STEPS)}": {"signal": "SIGKILL", "after": rng.randrange(2)}}
    elif kind == "commit":
        plan = {f"data {step}": {"signal": "SIGSTOP", "after": rng.randrange(2)}}
    elif kind.startswith("books"):
        plan = {step: {"signal": "SIGKILL", "after": 0 if kind == "books" else rng.randrange(1, 3)}}
    driver = start(wanted, hurt.faults(plan))
    try:
        if kind == "commit":
            kill_at(driver, f"data {step}", hurt)
        elif not plan:
            moment = rng.randrange(12)
            wait_for(lambda: len(list(tmp_path.glob("run/data/status=ok/*.parquet"))) >= moment, driver)
            time.sleep(rng.random() / 2)
            hurt_one(kind, driver, made, rng)
        _, err = driver.communicate(timeout=900)
    finally:
        if driver.poll() is None:
            driver.kill()
    assert hits(folder) == list(plan), "the fault must have happened"
    if kind in ("actor", "writer", "node"):
        assert driver.returncode == 0, err
    else:
        assert driver.returncode == -signal.SIGKILL, err
        hurt.resume()
    hurt.judge()


def hurt_one(kind: str, driver: Any, cluster: Cluster, rng: random.Random) -> None:
    """Kills one process of that kind, which must be at work."""
    if kind == "driver":
        driver.kill()
    elif kind == "node":
        node = rng.choice(cluster.list_all_nodes()[1:])
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=3, object_store_memory=150 << 20)
    else:
        found = wait_for(lambda: workers(descendants(os.getpid())), driver)
        os.kill(rng.choice(sorted(found)), signal.SIGKILL)
    assert driver.poll() is None or kind == "driver", "the run was over before the fault"
