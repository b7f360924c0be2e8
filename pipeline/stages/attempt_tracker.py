"""The attempt tracker: which rows each worker decodes, which it was decoding when it died, and what ends the run.

It counts the failed rows of the whole run against `limits.max_failed_rows`, and holds the verdict that ends a run: too
many failed rows, or a worker that cannot work.

A worker says which rows it takes before it decodes them. When it dies and its successor asks for the same rows, the
tracker gives them back in halves that are decoded separately, so that every death halves the number of suspects. The
answers of parts that went well are kept until the window is done. A row that was alone in `max_row_attempts` deaths is
quarantined. One poison row costs at most log2(window) + `max_row_attempts` deaths.

Rows that have the prompt and the sampling of a quarantined row, but for the seed, are probably poison too: the samples
of one prompt for instance. If another of them kills its worker alone, all of them are quarantined, so that a poison
prompt costs two deaths more than a poison row, however many rows have it. If one of them is decoded, the prompt is not
what kills, and each row is tried for itself. What is found is saved at once, for the next session of the run.

A worker that cannot work ends the run only if no other one can. One that fails to load is started again, and sits out
after MAX_START_FAILURES; so does one that dies again and again without decoding anything. Ray still gives it windows,
whose rows others decode (`delegating_decoder`).

Not every death is the row's fault. Deaths together with their node do not count, and neither do deaths while
repeating a row that already succeeded. Such a row is the control: it is decoded first whenever a suspect is tried
alone, so that a worker that crashes on any input is recognised first. Where no such row is known, the control is a
made-up prompt.

Plain Python; `start_attempt_tracker` makes it an actor on the driver's node. It neither decodes nor writes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

import ray
from ray.actor import ActorHandle

from pipeline.cluster.pool import on_this_node
from pipeline.store.quarantine import Finding, Quarantine

if TYPE_CHECKING:  # the tracker's process needs no torch
    from actors.generator import Answer

MAX_START_FAILURES = 3  # a worker that dies or fails this often before it is ready will not get ready
RETRY_AFTER_S = (2.0, 30.0)  # between a failed load and the next: memory that a dying process holds comes back
MIN_CONSECUTIVE_DEATHS = 20  # consecutive deaths before the worker is blamed, or more where windows are large

CONTROL: tuple[str, ...] = ()
"""A part without rows of the corpus: the worker decodes a prompt that anything can decode."""

TOO_MANY_FAILED = "{} rows have failed, more than limits.max_failed_rows allows"


@dataclass(frozen=True)
class WorkerProcess:
    """The process that runs a worker. A worker that is restarted keeps its name and gets a new process."""

    node_id: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


@dataclass(frozen=True)
class WindowPlan:
    """How a worker is to decode a window."""

    parts: list[tuple[str, ...]]
    """Row ids, to be decoded one part after the other; the first part is taken already."""
    answers: "dict[str, Answer]" = field(default_factory=dict)
    """Answers that an earlier attempt at this window made."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Rows that must not be decoded again, and why."""
    is_clear: bool = True
    """True if no row is a suspect."""


StartOrder = Literal["load", "wait", "sit out", "stop"]
"""What a worker that starts is to do. `load`: in a new process, if it has failed in this one. `wait`: ask again."""


class RunVerdict(TypedDict):
    """Why the tracker has ended the run."""

    kind: str
    """budget (of failed rows) or workers."""
    reason: str


@dataclass(frozen=True)
class Death:
    process: WorkerProcess
    reason: str
    """The process's own reason for ending; empty if it gave none."""

    def __str__(self) -> str:
        return f"{self.process}" + (f" ({self.reason})" if self.reason else "")


@dataclass
class Worker:
    """The state of one worker, over its restarts."""

    process: WorkerProcess
    state: str  # loading | failed | waiting | decoding | sitting out
    since: float
    part: tuple[str, ...] = ()
    """Ids of the rows that are being decoded."""
    exit_reason: str = ""
    starts: int = 1
    consecutive_deaths: int = 0
    start_failures: int = 0
    problem: str = ""
    """Why it could not be loaded, or sits out."""


class StopRun(RuntimeError):
    """Raised in a worker to end the run; the driver asks the tracker for the reason."""


class AttemptTracker:
    def __init__(
        self,
        max_row_attempts: int,
        window_rows: int,
        max_failures: float,
        failed: int = 0,
        node_is_gone: Callable[[str], bool] = lambda node_id: False,
        earlier: Quarantine | None = None,
        save: Callable[[Quarantine], None] = lambda quarantine: None,
        num_workers: int = 1,
        may_sit_out: bool = False,
    ) -> None:
        """`failed`: rows that failed in earlier sessions; `max_failures`: rows that may fail in all. `earlier`: what
        earlier sessions found; `save` gets what this one has found, whenever that changes. `num_workers`: those that
        the run starts with. `may_sit_out`: whether others can decode the windows of a worker that cannot work."""
        self._max_row_attempts = max_row_attempts
        isolation = math.ceil(math.log2(max(window_rows, 1))) + max_row_attempts
        self._max_consecutive_deaths = max(MIN_CONSECUTIVE_DEATHS, 2 * isolation)
        self._max_failures = max_failures
        self._node_is_gone = node_is_gone
        self._num_workers, self._may_sit_out, self._has_worked = num_workers, may_sit_out, False
        self._workers: dict[str, Worker] = {}
        self._suspect_parts: dict[str, tuple[str, ...]] = {}  # suspect -> the rows it is decoded with
        self._deaths: dict[str, list[Death]] = {}  # suspect -> deaths while it was decoded alone
        self._shared_deaths: dict[str, int] = {}  # suspect -> the number of deaths while it was decoded with others
        self._prompts: dict[str, str] = {}  # row that is being decoded -> key of its prompt
        self._killers: dict[str, list[str]] = {}  # prompt -> rows over which a worker died while it decoded them alone
        self._cleared: set[str] = set()  # prompts of suspects of which one was decoded
        self._earlier, self._found, self._save = earlier or Quarantine(), Quarantine(), save
        self._answers: dict[str, Answer] = {}  # answers of rows in windows that contain a suspect
        self._failed: dict[str, int] = {}  # window -> failed rows: a repeated window counts once
        self._num_failed = failed  # including those of earlier sessions
        self._verdict: RunVerdict | None = None

    def worker_starting(self, name: str, process: WorkerProcess) -> str | None:
        """A process begins to load worker `name`. Returns why it should not, or None."""
        worker = self._workers.get(name)
        if worker is None:
            self._workers[name] = Worker(process, "loading", time.time())
            return self._stop_reason()
        self._died(name, worker)
        worker.process, worker.since = process, time.time()
        worker.state = worker.state if worker.state == "sitting out" else "loading"
        worker.part, worker.exit_reason = (), ""
        worker.starts += 1
        return self._stop_reason()

    def start_order(self, name: str) -> StartOrder:
        """What the worker is to do that has just started, or has failed to load."""
        worker = self._workers[name]
        if self._verdict is not None:
            return "stop"
        if worker.state == "sitting out":
            return "sit out"
        if worker.state == "failed":
            is_soon = time.time() < worker.since + RETRY_AFTER_S[min(worker.start_failures, len(RETRY_AFTER_S)) - 1]
            # as long as nobody has loaded the model, perhaps nobody can
            return "wait" if is_soon or not self._has_worked else "load"
        return "load"

    def worker_ready(self, name: str) -> None:
        """The worker has loaded its model."""
        self.worker_idle(name)
        self._workers[name].start_failures = 0
        self._has_worked = True

    def plan_window(self, name: str, ids: Sequence[str], prompts: Sequence[str] = ()) -> WindowPlan | str:
        """How the worker is to decode these rows; or, as a text, why the run is to stop.

        `prompts`: for each row a key of its prompt and sampling, without the seed; none if no two rows share one.
        """
        if self._verdict is not None:
            return self._verdict["reason"]
        self._prompts |= zip(ids, prompts or ids, strict=True)
        quarantined = self._find_quarantined(ids)
        answers = {row: self._answers[row] for row in ids if row in self._answers}
        left = [row for row in ids if row not in quarantined and row not in answers]
        suspects = [row for row in left if row in self._suspect_parts]
        parts = self._parts_to_try(suspects)
        clear = tuple(row for row in left if row not in self._suspect_parts)
        if clear:
            parts.insert(0, clear)
        plan = WindowPlan(self._with_controls(parts, answers), answers, quarantined, is_clear=not suspects)
        if plan.parts:
            self.part_started(name, plan.parts[0])
        return plan

    def part_started(self, name: str, part: tuple[str, ...]) -> None:
        """The worker is about to decode these rows."""
        worker = self._workers[name]
        if worker.state == "sitting out":  # others are
            return
        worker.state, worker.since, worker.part = "decoding", time.time(), part

    def part_decoded(self, name: str, answers: "dict[str, Answer] | None") -> None:
        """The worker's part is decoded; `answers` of a window in several parts are kept until it is finished."""
        worker = self._workers[name]
        worker.consecutive_deaths = 0
        for row in worker.part:
            prompt = self._prompts.get(row, row)
            if row in self._suspect_parts or prompt in self._killers:
                self._cleared.add(prompt)
            for known in (self._suspect_parts, self._deaths, self._shared_deaths):
                known.pop(row, None)
        worker.part = ()
        self._answers |= answers or {}

    def worker_idle(self, name: str) -> None:
        """The worker waits for rows."""
        worker = self._workers[name]
        if worker.state != "sitting out":
            worker.state, worker.since = "waiting", time.time()

    def window_finished(self, name: str, window: str, ids: Sequence[str], failed: int) -> None:
        """The worker has finished the window of that name; `failed` of its rows failed, in this stage or before."""
        self.worker_idle(name)
        for row in ids:
            self._answers.pop(row, None)
            self._prompts.pop(row, None)
        before = self._failed.get(window, 0)
        if failed != before:
            self._num_failed += failed - before
            self._failed[window] = failed
            self._check_budget()

    def worker_dying(self, name: str, reason: str) -> None:
        """A process is about to end itself, for this reason."""
        self._workers[name].exit_reason = reason

    def worker_cannot_load(self, name: str, reason: str) -> None:
        """Loading the model has failed; `start_order` says what follows. Where no worker has ever loaded it and none
        still tries, the run ends at once: another try would not help."""
        worker = self._workers[name]
        worker.state, worker.since, worker.problem = "failed", time.time(), reason
        worker.start_failures += 1
        if self._has_worked or self._others_can_work(name):
            self._give_up_if(worker.start_failures >= MAX_START_FAILURES, name, f"cannot start: {reason}")
        else:
            self._end(f"worker {name} cannot start: {reason}")

    def verdict(self) -> RunVerdict | None:
        """Why the tracker has ended the run, or None."""
        return self._verdict

    def describe(self) -> list[str]:
        """One line per worker: where it runs, and what it has been doing for how long."""
        lines = []
        for name, worker in sorted(self._workers.items()):
            doing = worker.state + (f" {len(worker.part)} rows (first id {worker.part[0]!r})" if worker.part else "")
            doing += f" ({worker.problem})" if worker.state in ("failed", "sitting out") else ""
            seconds = time.time() - worker.since
            lines.append(
                f"{name}: {worker.process.host}, node {worker.process.node_id[:8]}, pid {worker.process.pid}, "
                f"{doing} for {seconds:.0f} s, started {worker.starts} times"
            )
        return lines

    def sitting_out(self) -> list[str]:
        """A line for each worker that cannot work: where it was, and why."""
        found = [(name, worker) for name, worker in sorted(self._workers.items()) if worker.state == "sitting out"]
        return [f"{name} on {worker.process.host} {worker.problem}" for name, worker in found]

    def _died(self, name: str, worker: Worker) -> None:
        """Records that a worker's process is gone, and which rows become suspects for that."""
        if worker.state in ("failed", "sitting out"):
            return
        if self._node_is_gone(worker.process.node_id):
            return
        worker.consecutive_deaths += 1
        fault = (
            f", the last time on {Death(worker.process, worker.exit_reason)}: the worker or its node is at fault, "
            f"not a row; Ray's logs on that node have more (worker-*-{worker.process.pid}.err)"
        )
        if worker.state == "loading":
            worker.start_failures += 1
            what = f"died {worker.start_failures} times while it loaded the model{fault}"
            self._give_up_if(worker.start_failures >= MAX_START_FAILURES, name, what)
            return
        what = f"died {worker.consecutive_deaths} times without decoding anything in between{fault}"
        self._give_up_if(worker.consecutive_deaths >= self._max_consecutive_deaths, name, what)
        part = worker.part
        if len(part) == 1 and part[0] not in self._answers:  # a row decoded fine before is no suspect
            self._suspect_parts[part[0]] = part
            self._deaths.setdefault(part[0], []).append(Death(worker.process, worker.exit_reason))
            killers = self._killers.setdefault(self._prompts.get(part[0], part[0]), [])
            if part[0] not in killers:
                killers.append(part[0])
        elif len(part) > 1:
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]):
                self._suspect_parts |= dict.fromkeys(half, half)
            for row in part:
                self._shared_deaths[row] = self._shared_deaths.get(row, 0) + 1

    def _parts_to_try(self, suspects: Sequence[str]) -> list[tuple[str, ...]]:
        """The parts that hold these rows, smallest first, so that one row is isolated before the next is looked for."""
        wanted = set(suspects)
        parts = dict.fromkeys(self._suspect_parts[row] for row in suspects)
        return sorted((tuple(row for row in part if row in wanted) for part in parts), key=len)

    def _with_controls(self, parts: list[tuple[str, ...]], answers: "dict[str, Answer]") -> list[tuple[str, ...]]:
        """The parts, with a control (a row known to be good, or `CONTROL`) before every row that is tried alone."""
        planned: list[tuple[str, ...]] = []
        for part in parts:
            if len(part) == 1 and part[0] in self._suspect_parts:
                planned.append((next(iter(answers)),) if answers else CONTROL)
            planned.append(part)
        return planned

    def _deaths_that_count(self, row: str) -> list[Death]:
        return [death for death in self._deaths.get(row, ()) if not self._node_is_gone(death.process.node_id)]

    def _find_quarantined(self, ids: Sequence[str]) -> dict[str, str]:
        """Those of the rows that must not be decoded again, and why. Saves what is new."""
        planned, asked = set(ids), {self._prompts[row] for row in ids}
        rows = {row: finding for row in ids if row in self._deaths and (finding := self._finding(row))}
        prompts = {prompt: finding for prompt in asked if (finding := self._finding_of_prompt(prompt))}
        found = Quarantine(
            {row: finding for row, finding in self._found.rows.items() if row not in planned} | rows,
            {prompt: finding for prompt, finding in self._found.prompts.items() if prompt not in asked} | prompts,
        )
        if found != self._found:
            self._found = found
            self._save(found)
        quarantined = {}
        for row in ids:
            for known in (found, self._earlier):
                if finding := known.rows.get(row) or known.prompts.get(self._prompts[row]):
                    quarantined[row] = finding.reason
                    break
        return quarantined

    def _finding_of_prompt(self, prompt: str) -> Finding | None:
        """The reason to quarantine all rows with this prompt: one of them is, and another one has killed a worker, too.

        None if one of them was decoded.
        """
        killers = self._killers.get(prompt, ())
        if len(killers) < 2 or prompt in self._cleared:
            return None
        finding = next(filter(None, map(self._finding, killers)), None)
        if finding is None:
            return None
        reason = f"a row with the same prompt and sampling is quarantined: {finding.reason}"
        return Finding(finding.num_deaths, reason)

    def _finding(self, row: str) -> Finding | None:
        """The reason to quarantine a row for its own deaths; None if there were too few."""
        deaths = self._deaths_that_count(row)
        if len(deaths) < self._max_row_attempts:
            return None
        shared = self._shared_deaths.get(row, 0)
        reason = (
            f"its worker died {len(deaths)} times while decoding this row alone: {', '.join(map(str, deaths))}"
            + (f"; {shared} times before with other rows" if shared else "")
            + "; raise limits.max_row_attempts if the row is not at fault"
        )
        return Finding(len(deaths), reason)

    def _check_budget(self) -> None:
        if self._num_failed > self._max_failures and self._verdict is None:
            self._verdict = {"kind": "budget", "reason": TOO_MANY_FAILED.format(self._num_failed)}

    def _others_can_work(self, name: str) -> bool:
        """True if another worker decodes, or may do so yet."""
        useless = ("sitting out",) if self._has_worked else ("sitting out", "failed")  # a failed one is tried again
        others = [worker.state for other, worker in self._workers.items() if other != name]
        return len(self._workers) < self._num_workers or any(state not in useless for state in others)

    def _give_up_if(self, is_hopeless: bool, name: str, what: str) -> None:
        """A worker that is hopeless sits out; the run ends if no other one can work."""
        if not is_hopeless:
            return
        if self._may_sit_out and self._others_can_work(name):
            worker = self._workers[name]
            worker.state, worker.problem = "sitting out", what
        else:
            self._end(f"worker {name} {what}")

    def _end(self, reason: str) -> None:
        self._verdict = self._verdict or {"kind": "workers", "reason": reason}

    def _stop_reason(self) -> str | None:
        return None if self._verdict is None else self._verdict["reason"]


def node_is_gone(node_id: str) -> bool:
    """True if the cluster has lost the node, so that everything that ran there died with it."""
    return not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def start_attempt_tracker(
    max_row_attempts: int,
    window_rows: int,
    max_failures: float,
    failed: int,
    earlier: Quarantine | None = None,
    save: Callable[[Quarantine], None] = lambda quarantine: None,
    *,
    num_workers: int = 1,
    may_sit_out: bool = False,
) -> ActorHandle:
    """An actor on this node. If it is lost, so is the driver's node, and the run ends."""
    actor = ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(AttemptTracker)
    return actor.remote(
        max_row_attempts, window_rows, max_failures, failed, node_is_gone, earlier, save, num_workers, may_sit_out
    )
