"""Leftovers of the last windows: who counts as idle, who gets which part, what is lost with a worker.

The actor is used as the plain class it is, with a clock of its own; `slow`: a real run on a skewed corpus, and one
whose helper is killed.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.leftovers import FORGOTTEN_AFTER_S, IDLE_AFTER_S, Leftovers, cost, split_parts
from skipdecode.generate import Completion, Request
from tests.processes import command, environment, hits, rows, run, start, wait_for

MODEL = Path(__file__).parent.parent / "models/opt-e2e"  # a tiny model's windows end before anybody is idle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def part(*names: str) -> list[Request]:
    return [Request(name, [2]) for name in names]


def answer(name: str) -> dict[str, Completion]:
    return {name: Completion([5], "stop", 1, 1)}


@pytest.fixture
def board() -> tuple[Leftovers, Clock]:
    clock = Clock()
    return Leftovers(clock), clock


def test_idle_is_who_has_asked_for_a_while_and_still_asks(board: tuple[Leftovers, Clock]) -> None:
    leftovers, clock = board
    assert leftovers.ask("b") is None
    assert leftovers.num_idle() == 0, "between two windows there is always a moment"
    clock.now += IDLE_AFTER_S
    assert leftovers.ask("b") is None
    assert leftovers.num_idle() == 1
    leftovers.began("b")
    assert leftovers.num_idle() == 0
    leftovers.ask("b")
    clock.now += IDLE_AFTER_S
    leftovers.ask("b")
    clock.now += FORGOTTEN_AFTER_S
    assert leftovers.num_idle() == 0, "it does not ask any more"


def test_every_part_is_begun_once_and_answers_come_back(board: tuple[Leftovers, Clock]) -> None:
    leftovers, _ = board
    leftovers.offer("k", "a", [part("r0"), part("r1"), part("r2"), part("r3")])
    loan = leftovers.ask("b")
    assert loan is not None
    assert [request.id for request in loan.requests] == ["r0"], "what takes longest is first, whoever takes it"
    assert leftovers.take("k") == 1
    other = leftovers.ask("c")
    assert other is not None
    assert (other.part, leftovers.take("k"), leftovers.take("k"), leftovers.ask("d")) == (2, 3, None, None)
    assert leftovers.collect("k").num_lent == 2
    leftovers.give(loan, answer("r0"))
    found = leftovers.collect("k")
    assert (found.answers.keys(), found.lost, found.num_lent) == ({"r0"}, [], 1)
    assert leftovers.collect("k").answers == {}, "once"
    assert leftovers.close("k") == [2], "still lent: the owner does it"
    leftovers.give(other, answer("r2"))  # too late, and no harm


def test_the_largest_offer_is_helped_first(board: tuple[Leftovers, Clock]) -> None:
    leftovers, _ = board
    leftovers.offer("small", "a", [part("r0")])
    leftovers.offer("large", "c", [part("r1"), part("r2")])
    first, second, third = (leftovers.ask(name) for name in "xyz")
    assert first is not None
    assert first.offer == "large"
    assert second is not None
    assert third is not None


def test_a_part_whose_helper_died_is_lost_and_an_offer_whose_owner_died_is_gone(
    board: tuple[Leftovers, Clock],
) -> None:
    leftovers, _ = board
    leftovers.offer("k", "a", [part("r0"), part("r1")])
    loan = leftovers.ask("b")
    assert loan is not None
    leftovers.started("b")
    leftovers.give(loan, answer("r0"))  # of the predecessor: nobody may count it twice
    found = leftovers.collect("k")
    assert (found.answers, found.lost, found.num_lent) == ({}, [0], 0)
    leftovers.started("a")
    assert leftovers.ask("b") is None


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


def skewed(path: Path, count: int) -> Path:
    """The last tenth has far longer prompts."""
    lines = [
        {"id": f"r{i}", "prompt": f"row {i % 53}" + " word" * (120 if i >= 0.9 * count else 0)} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_helper_that_dies_over_a_part_costs_no_row(tmp_path: Path) -> None:
    """Killed with a part of another's window in hand: the owner makes these rows."""
    count = 400
    source = skewed(tmp_path / "in.jsonl", count)
    wanted = [
        *command(MODEL, source, tmp_path / "run"), "actors.num_actors=2", "actors.batch_size=32",
        "actors.window_batches=8", "decode.method=full", "sampling.max_new_tokens=40", "sampling.ignore_eos=true",
    ]  # fmt: skip
    driver = start(wanted, environment({"help": {"signal": "SIGKILL", "times": 1}}, tmp_path))
    try:
        wait_for(lambda: list(tmp_path.glob("faults.json.*.hit")), driver)
        _, err = driver.communicate(timeout=300)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, err
    assert hits(tmp_path) == ["help"]
    assert sum(actor["restarts"] for actor in json.loads((tmp_path / "run/report.json").read_text())["actors"]) == 1
    calm = run([*wanted, "-o", str(tmp_path / "calm"), "actors.share_leftovers=false"], environment({}, tmp_path))
    assert calm.returncode == 0, calm.stderr
    made = [{row: r["generated_tokens"] for row, r in rows(tmp_path / name).items()} for name in ("run", "calm")]
    assert len(made[0]) == count
    assert made[0] == made[1]
