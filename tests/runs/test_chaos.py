"""Each fault of `make chaos` once, and what that leaves out: commits cut off at a step that a test names.

After each, and a resume where the driver died: every row once, tokens as in an undisturbed run, no other file among the
data.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.runs import chaos
from tests.support.processes import command, environment, hits, rows, run, start, state, wait_for
from tests.support.trials import Missed, Site, Trial, Verdict, judge

pytestmark = pytest.mark.ray

NUM_ROWS = 320


@dataclass
class Run:
    """One run that is to be hurt."""

    command: list[str]
    output: Path
    folder: Path

    def faults(self, plan: dict[str, Any]) -> dict[str, str]:
        """The environment with this fault plan; forgets the hits of another."""
        for hit in self.folder.glob("faults.json.*.hit"):
            hit.unlink()
        return environment(plan, self.folder)


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i % 53}"}) + "\n" for i in range(NUM_ROWS)))
    return path


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
    """Commit cut off, resume, poison row quarantined; all other rows as the decoder alone makes them."""
    source = write_rows(tmp_path / "in.jsonl")
    fixed = ["sampling.temperature=0.9", "sampling.seed=7", "decode.method=full", "limits.max_row_attempts=1"]
    wanted = command(tiny_checkpoint, source, tmp_path / "run", *fixed)
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu"))
    sampling = Sampling(8, temperature=0.9, seed=7)
    prompts = generator.tokenizer.encode([f"row {i % 53}" for i in range(NUM_ROWS)])
    answers = generator([Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]).answers
    expected = {f"r{i}": answer.tokens for i, answer in enumerate(answers) if isinstance(answer, Completion)}
    hurt = Run(wanted, tmp_path / "run", tmp_path)
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
def site(own_ray: None, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("chaos"), tiny_checkpoint).up() as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", chaos.FAULTS)
def test_every_fault_once(site: Site, fault: str) -> None:
    verdict = chaos.one_trial(site, chaos.FAULTS[fault], fault, 0)
    assert verdict.is_good, verdict


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_judge_sees_what_is_lost_doubled_or_changed(site: Site, tmp_path: Path) -> None:
    expected = {id: frozenset([tokens]) for id, tokens in site.expected("plain").items()}
    shutil.copytree(site.undisturbed("plain"), tmp_path / "run")
    assert judge(tmp_path / "run", expected).is_good
    first, second = sorted(tmp_path.glob("run/data/status=ok/*.parquet"))[:2]
    shutil.copy(second, second.with_name(second.name.replace("part-", "part-0")))
    found = pq.ParquetFile(first).read()
    first.unlink()
    verdict = judge(tmp_path / "run", expected)
    assert (verdict.lost, verdict.doubled, verdict.changed, verdict.verified) == (8, 8, 0, False)
    at = found.schema.get_field_index("generated_tokens")
    others = pa.array([tokens[::-1] for tokens in found.column(at).to_pylist()], found.schema.field(at).type)
    pq.write_table(found.set_column(at, found.schema.field(at), others), first)
    assert judge(tmp_path / "run", expected).changed == 8


def test_a_bad_trial_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are in the table and in the JSON, and the exit code is 1."""
    for name in ("save_tokenizer", "save_model"):
        monkeypatch.setattr(chaos, name, lambda folder, *_: folder)
    bad = Verdict(lost=3, closed=True, verified=False, trouble="said why")
    good = Verdict(closed=True, verified=True)
    names = ["driver killed", "node lost"]
    monkeypatch.setattr(chaos, "one_trial", lambda site, fault, name, seed: bad if seed == 8 else good)
    arguments = ["--trials", "4", "--seed", "7", "--output", str(tmp_path / "found.json")]
    assert chaos.main([*arguments, *(word for name in names for word in ("--only", name))]) == 1
    document = json.loads((tmp_path / "found.json").read_text())
    (all_of_it,) = [row for row in document["rows"] if row["fault"] == "all"]
    assert all_of_it == {"fault": "all", "trials": 4, "good": 3, "lost": 3, "doubled": 0, "changed": 0,
                         "closed": 4, "verified": 3}  # fmt: skip
    assert [(one["seed"], one["trouble"]) for one in document["bad"]] == [(8, "said why")]
    said = capsys.readouterr()
    assert "| all | 4 | 3 | 0 | 0 | 3 of 4 |" in said.out
    assert said.err.count("(--seed") == 4
    monkeypatch.setattr(chaos, "one_trial", lambda *_: good)
    assert chaos.main(arguments) == 0


def test_trials_are_each_fault_once_and_then_any() -> None:
    names = list(chaos.FAULTS)
    made = list(chaos.deck(names, 300, 5))
    assert sorted(made[: len(names)]) == sorted(names)
    assert made.count(chaos.ONCE) == 1
    assert set(made[len(names) :]) == set(names) - {chaos.ONCE}
    assert made == list(chaos.deck(names, 300, 5)) != list(chaos.deck(names, 300, 6))


def test_a_run_that_is_over_before_its_fault_is_tried_again(tmp_path: Path) -> None:
    tried: list[Trial] = []

    def too_late(trial: Trial) -> None:
        tried.append(trial)
        raise Missed

    verdict = chaos.one_trial(Site(tmp_path, tmp_path), too_late, "x", 3)
    assert not verdict.is_good
    assert len({trial.rng.random() for trial in tried}) == len(tried) == chaos.MOST_MISSES
