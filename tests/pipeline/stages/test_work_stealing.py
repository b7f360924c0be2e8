"""StealQueue of the last windows: who counts as idle, who gets which part, what is lost with a worker.

The actor is used as the plain class it is, with a clock of its own; `slow`: a real run on a skewed corpus, and runs
whose helper, owner or queue are killed.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.window_decoder import longest_first
from pipeline.stages.work_stealing import FIRST_WINDOW_S, FORGOTTEN_AFTER_S, IDLE_AFTER_S, StealQueue, cost, split_parts
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.processes import command, descendants, environment, hits, rows, run, start, wait_for, workers

MODEL = Path(__file__).parents[3] / "models/opt-e2e"  # a tiny model's windows end before anybody is idle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def part(*names: str) -> list[Request]:
    return [Request(name, [2]) for name in names]


def answer(name: str) -> dict[str, Completion]:
    return {name: Completion([5], "stop", 1, 1)}


@pytest.fixture
def board() -> tuple[StealQueue, Clock]:
    clock = Clock()
    return StealQueue(clock), clock


def test_idle_is_who_has_asked_for_a_while_and_still_asks(board: tuple[StealQueue, Clock]) -> None:
    queue, clock = board
    queue.window_begun("b")
    assert queue.steal("b") is None
    assert queue.num_idle() == 0, "between two windows there is always a moment"
    clock.now += IDLE_AFTER_S
    assert queue.steal("b") is None
    assert queue.num_idle() == 1
    queue.window_begun("b")
    assert queue.num_idle() == 0
    queue.steal("b")
    clock.now += IDLE_AFTER_S
    queue.steal("b")
    clock.now += FORGOTTEN_AFTER_S
    assert queue.num_idle() == 0, "it does not ask any more"


def test_who_waits_for_a_first_window_is_not_idle_for_a_while(board: tuple[StealQueue, Clock]) -> None:
    """At the start of a run first windows come one by one: none must be cut up for that."""
    queue, clock = board
    queue.window_begun("a")
    for _ in range(10):
        queue.steal("a")
        queue.steal("new")
        clock.now += FIRST_WINDOW_S / 10
    assert queue.num_idle() == 1, "only who has had a window"
    queue.steal("new")
    assert queue.num_idle() == 2, "there is none for it: it came late"


def test_what_comes_between_collect_and_close_is_not_lost(board: tuple[StealQueue, Clock]) -> None:
    queue, _ = board
    queue.share("k", "a", [part("r0"), part("r1")])
    loans = [queue.steal(name) for name in "bc"]
    assert queue.collect("k").num_stolen == 2
    queue.complete(loans[0], answer("r0"))
    queue.worker_started("c")
    assert queue.close("k").keys() == {"r0"}, "r1 has no answer: the owner makes it"


def test_every_part_is_begun_once_and_answers_come_back(board: tuple[StealQueue, Clock]) -> None:
    queue, _ = board
    queue.share("k", "a", [part("r0"), part("r1"), part("r2"), part("r3")])
    stolen = queue.steal("b")
    assert stolen is not None
    assert [request.id for request in stolen.requests] == ["r0"], "what takes longest is first, whoever takes it"
    assert queue.take("k") == 1
    other = queue.steal("c")
    assert other is not None
    assert (other.part, queue.take("k"), queue.take("k"), queue.steal("d")) == (2, 3, None, None)
    assert queue.collect("k").num_stolen == 2
    queue.complete(stolen, answer("r0"))
    found = queue.collect("k")
    assert (found.answers.keys(), found.num_stolen) == ({"r0"}, 1)
    assert queue.collect("k").answers == {}, "once"
    assert queue.close("k") == {}, "r2 is still lent: the owner does it"
    queue.complete(other, answer("r2"))  # too late, and no harm


def test_the_largest_offer_is_helped_first(board: tuple[StealQueue, Clock]) -> None:
    queue, _ = board
    queue.share("small", "a", [part("r0")])
    queue.share("large", "c", [part("r1"), part("r2")])
    first, second, third = (queue.steal(name) for name in "xyz")
    assert first is not None
    assert first.key == "large"
    assert second is not None
    assert third is not None


def test_a_part_whose_helper_died_is_lost_and_an_offer_whose_owner_died_is_gone(
    board: tuple[StealQueue, Clock],
) -> None:
    queue, _ = board
    queue.share("k", "a", [part("r0"), part("r1")])
    stolen = queue.steal("b")
    assert stolen is not None
    queue.worker_started("b")
    queue.complete(stolen, answer("r0"))  # of the predecessor: nobody may count it twice
    found = queue.collect("k")
    assert (found.answers, found.num_stolen) == ({}, 0)
    queue.worker_started("a")
    assert queue.steal("b") is None


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=6), workers=st.integers(1, 20), least=st.integers(1, 10)
)
def test_splitting_keeps_rows_and_order(sizes: list[int], workers: int, least: int) -> None:
    names = iter(range(1000))
    parts = [[Request(f"r{next(names)}", [2] * size) for _ in range(size)] for size in sizes]
    cut = split_parts(parts, workers, least)
    assert [request for one in cut for request in one] == [request for one in parts for request in one]
    assert all(len(one) >= min(least, *sizes) for one in cut)
    if workers == 1:
        assert cut == parts
    else:
        total = sum(cost(one) for one in parts)
        assert all(cost(one) <= total / (2 * workers) or len(one) < 2 * least for one in cut)


def test_what_takes_longest_is_decoded_first() -> None:
    """By prompt and answer together, of the longest row of a batch."""
    rows = {"short": (2, 4), "prompt": (30, 4), "answer": (2, 40), "both": (20, 30)}
    made = {name: Request(name, [2] * p, Sampling(max_new_tokens=n)) for name, (p, n) in rows.items()}
    batches = [[made["short"]], [made["prompt"], made["short"]], [made["answer"]], [made["short"], made["both"]]]
    assert [batch[-1].id for batch in longest_first(batches)] == ["both", "answer", "short", "short"]
    assert longest_first(batches)[2] == batches[1]


def skewed(path: Path, count: int) -> Path:
    """The last tenth has far longer prompts."""
    lines = [
        {"id": f"r{i}", "prompt": f"row {i % 53}" + " word" * (120 if i >= 0.9 * count else 0)} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_skewed_corpus_gives_the_same_rows_and_less_idle_time(tmp_path: Path) -> None:
    source, env, reports = skewed(tmp_path / "in.jsonl", 600), environment(None, tmp_path), {}
    for shares in ("false", "true"):
        output = tmp_path / shares
        done = run(
            [*command(MODEL, source, output), f"actors.share_leftovers={shares}", "actors.num_actors=2",
             "actors.batch_size=32", "actors.window_batches=8", "sampling.max_new_tokens=48",
             "sampling.ignore_eos=true"], env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports[shares] = json.loads((output / "report.json").read_text())
    made = [{row: r["generated_tokens"] for row, r in rows(tmp_path / shares).items()} for shares in reports]
    assert len(made[0]) == 600
    assert made[0] == made[1]
    assert reports["true"]["tail"]["idle_s"] < 0.5 * reports["false"]["tail"]["idle_s"], reports


COUNT = 400


def shared_run(folder: Path) -> list[str]:
    """The command of a run in which parts of windows are lent for sure."""
    return [
        *command(MODEL, skewed(folder / "in.jsonl", COUNT), folder / "run"), "actors.num_actors=2",
        "actors.batch_size=32", "actors.window_batches=8", "decode.method=full", "sampling.max_new_tokens=40",
        "sampling.ignore_eos=true",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The tokens of the same rows when nothing is shared and nobody dies."""
    folder = tmp_path_factory.mktemp("calm")
    done = run([*shared_run(folder), "actors.share_leftovers=false"], environment({}, folder))
    assert done.returncode == 0, done.stderr
    return {row: r["generated_tokens"] for row, r in rows(folder / "run").items()}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["help", "sharing"])
def test_a_worker_that_dies_while_parts_are_lent_costs_no_row(
    point: str, calm: dict[str, list[int]], tmp_path: Path
) -> None:
    """A helper that decodes rows of another's window; an owner after the second part of a window that it shares."""
    fault = {"signal": "SIGKILL", "times": 1, "after": int(point == "sharing")}
    done = run(shared_run(tmp_path), environment({point: fault}, tmp_path))
    assert done.returncode == 0, done.stderr
    assert hits(tmp_path) == [point]
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert sum(actor["restarts"] for actor in report["actors"]) == 1
    assert report["books"] == {"input": COUNT, "ok": COUNT, "failed": 0, "closed": True}
    assert {row: r["generated_tokens"] for row, r in rows(tmp_path / "run").items()} == calm


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_without_its_steal_queue(calm: dict[str, list[int]], tmp_path: Path) -> None:
    """Their process is killed in the middle: nothing is shared any more, and no row is lost."""
    driver = start(shared_run(tmp_path), environment(None, tmp_path))
    try:
        wait_for(lambda: list(tmp_path.glob("run/data/status=ok/*.parquet")), driver)
        (queue,) = workers(descendants(driver.pid), "ray::StealQueue")
        os.kill(queue, signal.SIGKILL)
        _, err = driver.communicate(timeout=300)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, err
    assert {row: r["generated_tokens"] for row, r in rows(tmp_path / "run").items()} == calm
