"""The attempt tracker: who is suspected, how suspects are tried, who is quarantined, and when the worker is to blame.

The worker here is a simulation in this process (it dies when it is told to decode a poison row); real deaths are in
test_poison.py.
"""

import math
import random
from collections.abc import Callable
from typing import NoReturn

import pytest

from actors.generator import Answer
from pipeline.stages import attempt_tracker
from pipeline.stages.attempt_tracker import MAX_START_FAILURES, AttemptTracker, WindowPlan, WorkerProcess
from pipeline.store.quarantine import Quarantine
from skipdecode.engine.results import Completion


def process(number: int, node: str = "node-a") -> WorkerProcess:
    return WorkerProcess(node, "host", number)


def answer(row: str) -> Answer:
    return Completion([len(row)], "stop", int(row[1:]), 0)


class Simulation:
    """One worker that takes a window again and again, as Ray repeats its task, until it comes through."""

    def __init__(
        self,
        attempts: AttemptTracker,
        poison: set[str],
        is_broken: bool = False,
        prompt_of: Callable[[str], str] = lambda row: row,
    ) -> None:
        """`prompt_of`: the key of a row's prompt."""
        self.attempts, self.poison, self.is_broken, self.prompt_of = attempts, poison, is_broken, prompt_of
        self.deaths = self.decoded = 0
        self.stop = attempts.worker_starting("w", process(0))
        attempts.worker_ready("w")

    def window(self, ids: list[str]) -> tuple[dict[str, Answer], dict[str, str]]:
        while self.stop is None:
            plan = self.attempts.plan_window("w", ids, [self.prompt_of(row) for row in ids])
            assert isinstance(plan, WindowPlan)
            answers = self.attempt(plan)
            if answers is not None:
                self.attempts.window_finished("w", ids[0], ids, len(plan.quarantined))
                return answers, plan.quarantined
            self.deaths += 1
            self.stop = self.attempts.worker_starting("w", process(self.deaths))
            self.attempts.worker_ready("w")
        return {}, {}

    def attempt(self, plan: WindowPlan) -> dict[str, Answer] | None:
        answers = dict(plan.answers)
        for number, part in enumerate(plan.parts):
            if number:
                self.attempts.part_started("w", part)
            if self.is_broken or self.poison & set(part):
                return None
            made = {row: answer(row) for row in part}
            self.decoded += len(made)
            self.attempts.part_decoded("w", made if len(plan.parts) > 1 else None)
            answers |= made
        return answers


def ids(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 3, 32, 1000])
@pytest.mark.parametrize("attempts", [1, 3])
def test_one_poison_row_is_quarantined_and_costs_few_deaths(rows: int, attempts: int) -> None:
    for at in {0, rows // 2, rows - 1}:
        worker = Simulation(AttemptTracker(attempts, rows, 1.0), {f"r{at}"})
        answers, quarantined = worker.window(ids(rows))
        assert quarantined.keys() == {f"r{at}"}
        assert answers.keys() == set(ids(rows)) - quarantined.keys()
        assert worker.deaths <= math.ceil(math.log2(rows)) + attempts
        assert worker.decoded <= rows + worker.deaths, "good rows are decoded once, and now and then as a control"
        assert f"died {attempts} times while decoding this row alone: host pid" in quarantined[f"r{at}"]


@pytest.mark.parametrize("seed", range(10))
def test_many_poison_rows_in_one_window(seed: int) -> None:
    rng = random.Random(seed)
    rows = ids(rng.randrange(2, 200))
    poison = set(rng.sample(rows, rng.randrange(1, min(6, len(rows) + 1))))
    worker = Simulation(AttemptTracker(3, len(rows), 100.0), poison)
    answers, quarantined = worker.window(rows)
    assert quarantined.keys() == poison
    assert answers == {row: answer(row) for row in rows if row not in poison}
    assert worker.deaths <= len(poison) * (math.ceil(math.log2(len(rows))) + 3)
    again = worker.window(rows)  # Ray repeats a finished window when its output was lost
    assert again == (answers, quarantined)


def test_poison_rows_in_a_cluster_at_the_front_do_not_blame_the_worker() -> None:
    for count in (4, 8, 16):
        worker = Simulation(AttemptTracker(3, 32, 100.0), set(ids(count)))
        answers, quarantined = worker.window(ids(32))
        assert quarantined.keys() == set(ids(count))
        assert len(answers) == 32 - count


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_broken_machine_quarantines_no_row_of_small_windows(rows: int) -> None:
    worker = Simulation(AttemptTracker(3, rows, 100.0), set(), is_broken=True)
    for first in range(0, 30, rows):
        assert worker.window([f"r{row}" for row in range(first, first + rows)]) == ({}, {})
    assert worker.stop is not None
    assert "the worker or its node is at fault, not a row" in worker.stop


def test_one_death_quarantines_no_row() -> None:
    worker = Simulation(AttemptTracker(3, 8, 1.0), {"r3"})
    plan = worker.attempts.plan_window("w", ids(8))
    assert isinstance(plan, WindowPlan)
    assert worker.attempt(plan) is None
    worker.attempts.worker_starting("w", process(1))
    worker.attempts.worker_ready("w")
    worker.poison = set()  # it was chance
    answers, quarantined = worker.window(ids(8))
    assert answers.keys() == set(ids(8))
    assert not quarantined
    plan = worker.attempts.plan_window("w", ids(8))
    assert isinstance(plan, WindowPlan)
    assert plan.parts == [tuple(ids(8))], "cleared rows go together again"


def test_deaths_with_the_node_do_not_count() -> None:
    gone: set[str] = set()
    attempts = AttemptTracker(3, 1, 1.0, node_is_gone=gone.__contains__)
    attempts.worker_starting("w", process(0, "n0"))
    for number in range(1, 40):
        attempts.worker_ready("w")
        plan = attempts.plan_window("w", ["r0"])
        assert isinstance(plan, WindowPlan)
        assert not plan.quarantined
        gone.add(f"n{number - 1}")
        assert attempts.worker_starting("w", process(number, f"n{number}")) is None


def test_a_node_that_is_lost_later_takes_its_deaths_with_it() -> None:
    gone: set[str] = set()
    attempts = AttemptTracker(2, 1, 1.0, node_is_gone=gone.__contains__)
    attempts.worker_starting("w", process(0, "n0"))
    for number in (1, 2):
        attempts.plan_window("w", ["r0"])
        attempts.part_started("w", ("r0",))  # the second time after a control
        attempts.worker_starting("w", process(number, "n1"))
        attempts.worker_ready("w")
    found = attempts.plan_window("w", ["r0"])
    assert isinstance(found, WindowPlan)
    assert found.quarantined
    gone.add("n0")
    plan = attempts.plan_window("w", ["r0"])
    assert isinstance(plan, WindowPlan)
    assert not plan.quarantined


def test_a_worker_that_dies_of_everything_is_to_blame_and_no_row() -> None:
    worker = Simulation(AttemptTracker(3, 32, 100.0), set())
    good, _ = worker.window(ids(32))
    assert len(good) == 32
    worker.is_broken = True
    assert worker.window(ids(32)) == ({}, {})
    assert worker.stop is not None
    assert "the worker or its node is at fault, not a row" in worker.stop
    assert worker.deaths < 30
    assert worker.attempts.verdict() == {"kind": "workers", "reason": worker.stop}


def test_a_good_row_under_suspicion_is_not_quarantined_by_broken_processes() -> None:
    """Suspects are tried after a good row: a process that is broken shows it there."""
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        worker = Simulation(AttemptTracker(3, 16, 100.0), set())

        def flaky(plan: WindowPlan, worker: Simulation = worker, rng: random.Random = rng) -> dict[str, Answer] | None:
            worker.is_broken = rng.random() < 0.3
            return Simulation.attempt(worker, plan)

        worker.attempt = flaky  # type: ignore[method-assign]
        _, quarantined = worker.window(ids(16))
        found += len(quarantined)
    assert found == 0


def test_a_control_whose_worker_dies_is_no_suspect() -> None:
    """It was decoded fine before; the machine is at fault."""
    worker = Simulation(AttemptTracker(1, 4, 100.0), {"r3"})
    attempts = worker.attempts
    while ("r3",) not in (plan := attempts.plan_window("w", ids(4))).parts:  # type: ignore[union-attr]
        assert worker.attempt(plan) is None  # type: ignore[arg-type]
        attempts.worker_starting("w", process(1))
        attempts.worker_ready("w")
    assert isinstance(plan, WindowPlan)
    (control,) = plan.parts[plan.parts.index(("r3",)) - 1]
    assert control in plan.answers
    for part in plan.parts[: plan.parts.index(("r3",)) - 1]:
        attempts.part_started("w", part)
        attempts.part_decoded("w", {row: answer(row) for row in part})
    attempts.part_started("w", (control,))
    attempts.worker_starting("w", process(2))
    attempts.worker_ready("w")
    plan = attempts.plan_window("w", ids(4))
    assert isinstance(plan, WindowPlan)
    assert control in plan.answers
    assert plan.quarantined == {}


def test_a_worker_that_never_gets_ready_ends_the_run() -> None:
    attempts = AttemptTracker(3, 8, 1.0)
    assert attempts.worker_starting("w", process(0)) is None
    for number in range(1, MAX_START_FAILURES):
        assert attempts.worker_starting("w", process(number)) is None
    stop = attempts.worker_starting("w", process(MAX_START_FAILURES))
    assert stop is not None
    assert f"died {MAX_START_FAILURES} times while it loaded the model" in stop
    assert attempts.plan_window("other", ids(2)) == stop, "the others stop at their next window"


SICK = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def pool(count: int, ready: int, **keys: bool) -> AttemptTracker:
    """A tracker of `count` workers, w0, w1, ..., of which the first `ready` have loaded the model."""
    attempts = AttemptTracker(3, 8, 1.0, num_workers=count, may_sit_out=keys.get("may_sit_out", True))
    for number in range(count):
        attempts.worker_starting(f"w{number}", process(number))
        assert attempts.start_order(f"w{number}") == "load"
    for number in range(ready):
        attempts.worker_ready(f"w{number}")
    return attempts


def fail_to_load(attempts: AttemptTracker, name: str, times: int) -> None:
    """The worker fails to load so many times, each in a new process."""
    for number in range(times):
        if number:
            attempts.worker_starting(name, process(100 + number))
        attempts.worker_cannot_load(name, SICK)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_tracker, "RETRY_AFTER_S", (0.0,))


def test_one_sick_device_ends_no_run_while_others_are_well(at_once: None) -> None:
    attempts = pool(3, ready=3)
    attempts.worker_starting("w1", process(9))  # its process died, and its successor cannot load
    fail_to_load(attempts, "w1", MAX_START_FAILURES - 1)
    assert attempts.start_order("w1") == "load", "what a dying process holds may have come back"
    fail_to_load(attempts, "w1", 1)
    assert attempts.start_order("w1") == "sit out"
    assert attempts.verdict() is None
    assert attempts.sitting_out() == [f"w1 on host cannot start: {SICK}"]
    plan = attempts.plan_window("w1", ["r0"])
    assert isinstance(plan, WindowPlan)
    attempts.window_finished("w1", "window", ["r0"], 0)
    attempts.worker_starting("w1", process(10))
    assert attempts.start_order("w1") == "sit out", "for the whole session, and its rows are no suspects"
    assert attempts.plan_window("w0", ["r0"]) == WindowPlan([("r0",)])


def test_the_last_sick_worker_ends_the_run(at_once: None) -> None:
    attempts = pool(2, ready=2)
    fail_to_load(attempts, "w0", MAX_START_FAILURES)
    assert attempts.start_order("w0") == "sit out"
    fail_to_load(attempts, "w1", MAX_START_FAILURES - 1)
    assert attempts.start_order("w1") == "load"
    fail_to_load(attempts, "w1", 1)
    assert attempts.start_order("w1") == attempts.start_order("w0") == "stop"
    assert attempts.verdict() == {"kind": "workers", "reason": f"worker w1 cannot start: {SICK}"}


def test_a_single_worker_that_has_worked_is_started_again(at_once: None) -> None:
    attempts = pool(1, ready=1)
    fail_to_load(attempts, "w0", 1)
    assert attempts.start_order("w0") == "load"
    attempts.worker_starting("w0", process(2))
    attempts.worker_ready("w0")
    fail_to_load(attempts, "w0", MAX_START_FAILURES)
    assert attempts.start_order("w0") == "stop"


def test_a_model_that_nobody_can_load_ends_the_run_once_all_have_tried(at_once: None) -> None:
    attempts = pool(2, ready=0)
    attempts.worker_cannot_load("w0", SICK)
    assert attempts.start_order("w0") == "wait", "perhaps the other one can"
    attempts.worker_cannot_load("w1", SICK)
    assert attempts.start_order("w0") == attempts.start_order("w1") == "stop"
    alone = AttemptTracker(3, 8, 1.0)
    alone.worker_starting("w0", process(0))
    alone.worker_cannot_load("w0", SICK)
    assert alone.start_order("w0") == "stop"


def test_a_worker_that_failed_first_waits_for_those_that_have_not_started_yet(at_once: None) -> None:
    attempts = AttemptTracker(3, 8, 1.0, num_workers=2, may_sit_out=True)
    attempts.worker_starting("w0", process(0))
    attempts.worker_cannot_load("w0", SICK)
    assert attempts.start_order("w0") == "wait"
    attempts.worker_starting("w1", process(1))
    attempts.worker_ready("w1")
    assert attempts.start_order("w0") == "load", "the model is fine"


def test_a_failed_load_is_not_repeated_at_once() -> None:
    attempts = pool(2, ready=2)
    attempts.worker_cannot_load("w0", SICK)
    assert attempts.start_order("w0") == "wait"


def test_a_worker_that_dies_of_everything_sits_out_while_others_are_well() -> None:
    attempts = pool(2, ready=2)
    for number in range(100):
        if attempts.start_order("w0") != "load":
            break
        attempts.worker_ready("w0")
        plan = attempts.plan_window("w0", ids(8))
        assert isinstance(plan, WindowPlan)
        assert not plan.quarantined
        attempts.worker_starting("w0", process(200 + number))
    assert attempts.start_order("w0") == "sit out"
    assert attempts.verdict() is None
    assert "times without decoding anything in between" in attempts.sitting_out()[0]


def test_without_others_that_take_its_rows_a_sick_worker_ends_the_run(at_once: None) -> None:
    attempts = pool(2, ready=2, may_sit_out=False)
    fail_to_load(attempts, "w0", MAX_START_FAILURES)
    assert attempts.start_order("w0") == "stop"


def test_the_budget_counts_a_repeated_window_once() -> None:
    attempts = AttemptTracker(3, 8, max_failures=3, failed=1)
    attempts.worker_starting("w", process(0))
    for _ in range(5):
        attempts.window_finished("w", "window 1", ["a"], 2)
    assert attempts.verdict() is None
    attempts.window_finished("w", "window 2", ["b"], 1)
    assert attempts.verdict() == {
        "kind": "budget",
        "reason": "4 rows have failed, more than limits.max_failed_rows allows",
    }
    assert attempts.plan_window("w", ["c"]) == "4 rows have failed, more than limits.max_failed_rows allows"


def test_exit_reasons_are_kept_and_workers_described() -> None:
    attempts = AttemptTracker(1, 1, 1.0)
    attempts.worker_starting("w", process(7))
    assert "loading for 0 s, started 1 times" in attempts.describe()[0]
    attempts.worker_ready("w")
    attempts.plan_window("w", ["r0"])
    assert "w: host, node node-a, pid 7, decoding 1 rows (first id 'r0') for 0 s" in attempts.describe()[0]
    attempts.worker_dying("w", "AcceleratorError: device-side assert")
    attempts.worker_starting("w", process(8))
    attempts.worker_ready("w")
    plan = attempts.plan_window("w", ["r0"])
    assert isinstance(plan, WindowPlan)
    assert "host pid 7 (AcceleratorError: device-side assert)" in plan.quarantined["r0"]
    assert "pid 8, waiting for 0 s, started 2 times" in attempts.describe()[0]


def samples(first: int, count: int) -> Callable[[str], str]:
    """Rows from `first` on are `count` samples of one prompt; each other row has a prompt of its own."""
    return lambda row: "the prompt" if first <= int(row[1:]) < first + count else row


@pytest.mark.parametrize("count", [1, 4, 16, 64, 512])
def test_a_poison_prompt_costs_few_deaths_however_many_samples_it_has(count: int) -> None:
    first = min(300, 512 - count)
    twins = {f"r{row}" for row in range(first, first + count)}
    worker = Simulation(AttemptTracker(3, 512, 1000.0), twins, prompt_of=samples(first, count))
    answers, quarantined = worker.window(ids(512))
    assert quarantined.keys() == twins
    assert answers.keys() == set(ids(512)) - twins
    assert worker.deaths <= math.log2(512) + 3 + 2
    reasons = set(quarantined.values())
    assert sum("with the same prompt and sampling" in reason for reason in reasons) == (count > 1)
    later = [f"r{row}" for row in range(first, first + count)]
    before = worker.deaths
    assert worker.window(later)[1].keys() == twins
    assert worker.deaths == before, "samples in other windows fail without another death"


def test_a_prompt_of_which_a_sample_is_decoded_is_not_to_blame() -> None:
    """Some bugs need a certain answer: the other samples are generated."""
    for poison in ({"r0"}, {"r5"}, {"r0", "r1"}, {"r2", "r5"}):
        worker = Simulation(AttemptTracker(3, 16, 1000.0), poison, prompt_of=samples(0, 16))
        answers, quarantined = worker.window(ids(16))
        if poison != {"r0", "r1"}:  # the first two that are tried alone, with nothing decoded yet
            assert quarantined.keys() == poison
            assert answers.keys() == set(ids(16)) - poison


def test_another_session_does_not_look_for_what_was_found() -> None:
    saved: list[Quarantine] = []
    tracker = AttemptTracker(3, 64, 1000.0, save=saved.append)
    first = Simulation(tracker, set(ids(8)) | {"r20"}, prompt_of=samples(0, 8))
    _, quarantined = first.window(ids(64))
    assert quarantined.keys() == set(ids(8)) | {"r20"}
    assert saved[-1].prompts.keys() == {"the prompt"}
    assert "r20" in saved[-1].rows
    second = Simulation(AttemptTracker(3, 64, 1000.0, earlier=saved[-1]), first.poison, prompt_of=first.prompt_of)
    answers, quarantined = second.window(ids(64))
    assert quarantined.keys() == set(ids(8)) | {"r20"}
    assert len(answers) == 64 - 9
    assert second.deaths == 0


def test_a_row_that_was_decoded_before_is_never_a_suspect() -> None:
    """As the control it may see its worker die more often than a row may."""
    worker = Simulation(AttemptTracker(2, 4, 1000.0), {"r3"})
    window = ids(4)
    while True:
        plan = worker.attempts.plan_window("w", window)
        assert isinstance(plan, WindowPlan)
        if plan.answers and len(plan.parts[0]) == 1 and plan.parts[0][0] in plan.answers:
            break
        assert worker.attempt(plan) is None
        worker.attempts.worker_starting("w", process(1))
        worker.attempts.worker_ready("w")
    (control,) = plan.parts[0]
    for number in range(4):  # of something else, while it decodes the control
        worker.attempts.worker_starting("w", process(number))
        worker.attempts.worker_ready("w")
        plan = worker.attempts.plan_window("w", window)
        assert isinstance(plan, WindowPlan)
        assert control not in plan.quarantined
        assert control in plan.answers
        assert plan.parts[0] == (control,)


def test_the_budget_is_looked_at_without_a_look_at_all_windows() -> None:
    """Everyone waits for the tracker, and a run may have millions of them."""

    class Looked(dict[str, int]):
        def __iter__(self) -> NoReturn:
            pytest.fail("it goes through all windows")

        keys = values = items = __iter__  # type: ignore[assignment]

    attempts = AttemptTracker(1, 1, math.inf, failed=3)
    attempts._failed = Looked()
    attempts.worker_starting("w", process(0))
    for failed in (1, 2, 2):
        for number in range(5):
            attempts.window_finished("w", f"window {number}", (), failed)
    assert attempts._num_failed == 3 + 5 * 2
