"""A trial: a run that is hurt on purpose, what is made of it afterwards, and the judge of its rows.

`Site` is what trials share: a Ray of two nodes on this machine, a tiny model, the corpora, and the tokens that runs
make of them when nothing disturbs them. The faults themselves are in `faults` and `store_faults`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from jobs import verify
from pipeline.store.run_folder import RunFolder
from tests.support.processes import alive, command, descendants, environment, hits, run, start, wait_for, workers

MIB = 1 << 20
NUM_ROWS, WINDOW_ROWS = 160, 8
SAMPLED = ["sampling.temperature=0.9", "sampling.seed=7"]
NODE = {"num_cpus": 4, "object_store_memory": 300 * MIB}
RUN_TIMEOUT_S, START_TIMEOUT_S = 150, 90
QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",  # a process per CPU that a node says it has, before anybody needs one
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "1",
}
LOOPBACK_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}

Tokens: TypeAlias = tuple[tuple[int, ...], str]
"""Of a row: its generated tokens and its error code."""
Found: TypeAlias = list[tuple[str, Tokens]]
"""Rows with their ids, in the order of the files."""
Driver: TypeAlias = "subprocess.Popen[str]"


class Missed(Exception):
    """The run was over before the fault: nothing was tried."""


@dataclass(frozen=True)
class Corpus:
    """How to write it, and what a run of it needs."""

    name: str
    write: Callable[[Path], None]
    keys: tuple[str, ...] = ()


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prompt(number: int, every: int | None) -> str:
    """Each `every`-th does not fit the model."""
    return "word " * 500 if every and number % every == 3 else f"row {number % 53}"


def _write_plain(path: Path, every: int | None = None) -> None:
    _write_lines(path, [{"id": f"r{n}", "prompt": _prompt(n, every)} for n in range(NUM_ROWS)])


def _write_batch(path: Path) -> None:
    bodies = [{"prompt": _prompt(n, 9), "max_tokens": 8} for n in range(64)]
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions"} for n in range(64)]
    _write_lines(path, [line | {"body": body} for line, body in zip(lines, bodies, strict=True)])


def _write_large(path: Path) -> None:
    """Windows of 16 MiB, of text that is another in each row."""
    numbers = range(6 * WINDOW_ROWS)
    notes = [f"{n:08d}" * (MIB // 4) for n in numbers]
    table = pa.table({"id": [f"r{n}" for n in numbers], "prompt": [f"row {n}" for n in numbers], "log": notes})
    pq.write_table(table, path)


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("plain", _write_plain, ("input.format=jsonl",)),
        Corpus("mixed", lambda path: _write_plain(path, 4), ("input.format=jsonl", "limits.max_failed_rows=40")),
        Corpus("batch", _write_batch, ("input.format=openai_batch", "limits.max_failed_rows=8")),
        Corpus("large", _write_large, ("input.format=parquet",)),
    )
}


def read_rows(output: str | Path) -> Found:
    """Of every data file, from whatever store."""
    folder = RunFolder.open(str(output))
    paths = folder.all_data_files()
    found: Found = []
    for path in paths:
        with folder.filesystem.open_input_file(path) as file:
            table = pq.ParquetFile(file).read(columns=["id", "generated_tokens", "error_code"])
        found += [(r["id"], (tuple(r["generated_tokens"] or ()), r["error_code"])) for r in table.to_pylist()]
    return found


@dataclass
class Verdict:
    """Of a run folder after a trial; `is_good`: nothing is wrong with it."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    """Rows with other tokens than an undisturbed run makes."""
    closed: bool = False
    verified: bool = False
    trouble: str = ""

    @property
    def is_good(self) -> bool:
        return self.closed and self.verified and not (self.lost or self.doubled or self.changed or self.trouble)


def judge(output: str | Path, expected: Mapping[str, frozenset[Tokens]]) -> Verdict:
    """`expected`: what each row may have come to."""
    found, folder = read_rows(output), RunFolder.open(str(output))
    counts, state = Counter(id for id, _ in found), folder.read_state()
    verdict = Verdict(lost=len(expected.keys() - counts.keys()), doubled=sum(counts.values()) - len(counts))
    verdict.changed = sum(tokens not in expected.get(id, ()) for id, tokens in found)
    verdict.closed = state is not None and state["state"] == "finished" and bool(state["books"]["closed"])
    verdict.verified, said = verified(output)
    verdict.trouble = "" if verdict.verified else said
    if strays := [name for name in folder.unexpected_files() if name.startswith("data/")]:
        verdict.trouble += f"in data/: {strays}"
    return verdict


def verified(output: str | Path) -> tuple[bool, str]:
    """Whether `skipdecode verify` finds nothing, and the end of what it says."""
    said = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(said):
        is_proven = verify.main([str(output)]) == 0
    return is_proven, said.getvalue()[-2000:]


class Site:
    """What the trials of one session share."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.plan_folder = root / "plan"
        self._cluster: Cluster | None = None
        self._tokens: dict[str, dict[str, Tokens]] = {}

    @contextmanager
    def up(self) -> "Iterator[Site]":
        """With a Ray that is ended on leaving; the environment of this process is that of its nodes meanwhile."""
        self.plan_folder.mkdir(parents=True)
        names = environment({}, self.plan_folder)
        own = {name: names[name] for name in ("PYTHONPATH", "SKIPDECODE_FAULTS")}
        own |= QUIET_RAY | LOOPBACK_KEYS
        before = {name: os.environ.get(name) for name in (*own, "RAY_ADDRESS")}
        os.environ |= own
        os.environ.pop("RAY_ADDRESS", None)
        try:
            yield self
        finally:
            self.down()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    @property
    def cluster(self) -> Cluster:
        """A head and a node, which faults may take away and give back."""
        if self._cluster is None:
            self._cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
            self._cluster.add_node(**NODE)
            os.environ["RAY_ADDRESS"] = self._cluster.address
        return self._cluster

    def down(self) -> None:
        """The next trial gets a Ray of its own."""
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
            os.environ.pop("RAY_ADDRESS", None)

    def source(self, corpus: str) -> Path:
        path = self.root / f"{corpus}.in"
        if not path.exists():
            CORPORA[corpus].write(path)
        return path

    def command(self, corpus: str, output: str | Path, *more: str) -> list[str]:
        keys = [*CORPORA[corpus].keys, *SAMPLED, "actors.num_actors=1", "actors.num_cpus=1", *more]
        return command(self.model, self.source(corpus), output, *keys)

    def undisturbed(self, corpus: str) -> Path:
        """A run folder of that corpus in which nothing has happened; do not change it."""
        output = self.root / f"{corpus}.run"
        if not output.exists():
            env = environment({}, self.plan_folder, RAY_ADDRESS=self.cluster.address)
            done = run(self.command(corpus, output), env, RUN_TIMEOUT_S)
            assert done.returncode == 0, done.stderr
        return output

    def expected(self, corpus: str, retried: bool = False) -> dict[str, Tokens]:
        """What each row comes to; `retried`: in a run whose failed rows were tried again, cut to fit."""
        name = f"{corpus} retried" if retried else corpus
        if name not in self._tokens:
            output = self.undisturbed(corpus)
            if retried:
                output = Path(shutil.copytree(output, self.root / f"{corpus}.retried"))
                env = environment({}, self.plan_folder, RAY_ADDRESS=self.cluster.address)
                done = run(retry_command(output), env, RUN_TIMEOUT_S)
                assert done.returncode == 0, done.stderr
            self._tokens[name] = dict(read_rows(output))
        return self._tokens[name]


def retry_command(output: str | Path) -> list[str]:
    return [sys.executable, "-m", "jobs.retry", str(output), "input.too_long=truncate_right", "actors.num_actors=1"]


@dataclass
class Trial:
    """One run that a fault hurts. What is random about it comes from `rng` alone."""

    site: Site
    rng: random.Random
    folder: Path
    corpus: str = "plain"
    output: str | Path = ""
    is_embedded: bool = False
    """The driver starts a Ray of its own."""
    retried: bool = False
    """Failed rows may have been tried again."""
    prefix: list[str] = field(default_factory=list)
    """In place of `python -m jobs.generate`."""
    verdict: Verdict | None = None
    """Of a fault that judges by itself."""
    drivers: list[Driver] = field(default_factory=list)
    _others: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.output = self.output or self.folder / "run"

    def command(self, *more: str) -> list[str]:
        made = self.site.command(self.corpus, self.output, *more)
        return [*self.prefix, *made[3:]] if self.prefix else made

    def env(self, plan: Mapping[str, Any] | None = None, **more: str) -> dict[str, str]:
        """With this fault plan; forgets the hits of another."""
        for hit in self.site.plan_folder.glob("faults.json.*.hit"):
            hit.unlink()
        address = {} if self.is_embedded else {"RAY_ADDRESS": self.site.cluster.address}
        env = environment(dict(plan or {}), self.site.plan_folder, **address, **more)
        if self.is_embedded:
            env.pop("RAY_ADDRESS", None)
        return env

    def start(self, *more: str, plan: Mapping[str, Any] | None = None, **env: str) -> Driver:
        return self.launch(self.command(*more), self.env(plan, **env))

    def launch(self, command: list[str], env: dict[str, str]) -> Driver:
        self.drivers.append(start(command, env))
        return self.drivers[-1]

    def hits(self) -> list[str]:
        return hits(self.site.plan_folder)

    def wait(self, driver: Driver, what: Callable[[], Any]) -> Any:
        """The first truthy answer. Missed: the driver ended before."""
        try:
            return wait_for(what, driver, START_TIMEOUT_S)
        except AssertionError as error:
            if driver.poll() == 0:
                raise Missed from error
            raise

    def wait_for_files(self, driver: Driver, most: int = 10) -> None:
        """Until a random number of data files is there, one at least, and a moment longer."""
        wanted = self.rng.randrange(1, most + 1)
        folder = RunFolder.open(str(self.output))
        self.wait(driver, lambda: len(folder.data_files("ok")) >= wanted)
        self.pause()
        if driver.poll() is not None:
            raise Missed

    def pause(self) -> None:
        """Up to half a second."""
        time.sleep(self.rng.random() / 2)

    def end(self, driver: Driver, timeout_s: float = RUN_TIMEOUT_S) -> tuple[int, str]:
        """Exit code and stderr of a driver that comes to its end."""
        if not driver.stdout or driver.stdout.closed:
            return driver.wait(timeout_s), ""
        _, err = driver.communicate(timeout=timeout_s)
        return driver.returncode, err

    def note_processes(self, driver: Driver) -> None:
        """What the driver has started by now ends with the trial, be its parent gone or not."""
        self._others |= descendants(driver.pid)

    def kill(self, driver: Driver) -> None:
        self.note_processes(driver)
        driver.kill()
        driver.communicate(timeout=60)

    def resume(self, *more: str, **env: str) -> None:
        code, err = self.end(self.start("--resume", *more, **env))
        assert code == 0, f"--resume ends with {code}: {err[-1500:]}"

    def processes(self, name: str) -> set[int]:
        """Of the shared Ray's, those whose titles begin with `name`."""
        return workers(descendants(os.getpid()), name)

    def judge(self) -> Verdict:
        one = self.site.expected(self.corpus)
        expected = {id: frozenset([tokens]) for id, tokens in one.items()}
        if self.retried:
            expected = {id: expected[id] | {tokens} for id, tokens in self.site.expected(self.corpus, True).items()}
        self.site.cluster  # noqa: B018 - verify asks it
        return judge(self.output, expected)

    def clean_up(self) -> None:
        """Ends whatever the trial has started."""
        for driver in self.drivers:
            if driver.poll() is None:
                self.note_processes(driver)
                os.killpg(driver.pid, signal.SIGKILL)
                driver.communicate(timeout=60)
        for pid in alive(self._others):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
