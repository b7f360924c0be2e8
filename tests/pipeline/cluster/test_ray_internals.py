"""The contract with Ray's private parts: each one that we rely on exists in the installed Ray and does what we expect.

When this fails after a new Ray, `pipeline/cluster/ray_internals.py` is the one place to look at.
"""

import inspect
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray._private.runtime_env import constants
from ray.dashboard.modules.job.common import JobInfoStorageClient
from ray.data import ActorPoolStrategy, DataContext
from ray.data._internal.execution.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.interfaces import PhysicalOperator
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.util.metrics import Counter

from pipeline.cluster import ray_internals
from pipeline.cluster.ray_internals import (
    JOB_CONFIG,
    JOB_NAMESPACE,
    JOB_RECORD,
    NOISY_LOGGERS,
    InputPolicy,
    Operator,
    StepCallback,
    actors_to_hold,
    limit_last_stage,
    number_of_task,
    record_zero,
    run_to_end,
    update_job_record,
    use_callbacks,
    use_policies,
)

ROOT = Path(__file__).parents[3]
PACKAGES = ("skipdecode", "actors", "pipeline", "jobs")
PRIVATE = re.compile(r"\b_(internal|private)\b|_internal_kv|\b_logical_plan\b|\b_topology\b|iter_internal_ref_bundles")


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_else_names_a_private_part(package: str) -> None:
    naming = {path for path in (ROOT / package).rglob("*.py") if PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert naming == ({Path(ray_internals.__file__)} if package == "pipeline" else set())


def test_ray_calls_callbacks_as_we_define_them() -> None:
    for name in ("on_execution_step", "after_execution_succeeds", "after_execution_fails"):
        ours, theirs = (list(inspect.signature(getattr(c, name)).parameters) for c in (StepCallback, ExecutionCallback))
        assert ours == theirs, name


def test_ray_asks_policies_as_we_define_them() -> None:
    ours, theirs = (list(inspect.signature(c.can_add_input).parameters) for c in (InputPolicy, BackpressurePolicy))
    assert ours == theirs
    assert isinstance(inspect.getattr_static(BackpressurePolicy, "name"), property)


def test_operators_have_what_we_ask_them_for() -> None:
    for name in ("get_active_tasks", "get_max_concurrency_limit"):
        assert list(inspect.signature(getattr(PhysicalOperator, name)).parameters) == ["self"], name
    assert isinstance(inspect.getattr_static(PhysicalOperator, "output_dependencies"), property)


def test_starting_a_worker_can_be_wrapped() -> None:
    """By a function on the class that is called as a method (`hide_restart_warnings`)."""
    start = inspect.unwrap(inspect.getattr_static(ActorPoolMapOperator, "_start_actor"))
    assert inspect.isfunction(start)
    assert next(iter(inspect.signature(start).parameters)) == "self"


def test_the_loggers_that_are_silenced_are_those_that_warn() -> None:
    for name in NOISY_LOGGERS:
        parts = Path(ray.__file__).parent.joinpath(*name.split(".")[1:])
        sources = [parts.with_suffix(".py"), *parts.glob("*.py")]
        found = [path for path in sources if path.exists() and "logging.getLogger(__name__)" in path.read_text()]
        assert found, f"no module {name} that logs"


def test_where_a_job_and_its_record_are() -> None:
    assert JOB_CONFIG == constants.RAY_JOB_CONFIG_JSON_ENV_VAR
    assert JOB_RECORD.format("x") == JobInfoStorageClient.JOB_DATA_KEY.format(job_id="x")


class Watching(StepCallback):
    """Keeps what it hears, in the driver."""

    stages: set[str]
    waitables: list[object]
    held: set[object]
    num_ends: int

    def on_step(self, operators: list[Operator]) -> None:
        for operator in operators:
            Watching.stages.add(operator.name)
            Watching.waitables += [task.get_waitable() for task in operator.get_active_tasks()]
            Watching.held |= actors_to_hold(operator)

    def on_end(self) -> None:
        Watching.num_ends += 1


class Asked(InputPolicy):
    """Lets everything through."""

    NAME = "Asked"
    waiting: list[int]
    limits: list[int | None]
    following: list[str]

    def may_take_input(self, operator: Operator, num_waiting: int) -> bool:
        Asked.waiting.append(num_waiting)
        Asked.limits.append(operator.get_max_concurrency_limit())
        Asked.following += [following.name for following in operator.output_dependencies]
        return True


def number(table: pa.Table) -> pa.Table:
    (first, at, attempt), (second, then, same) = number_of_task(), number_of_task()
    assert (first, at, then) == (second, 0, 1)
    assert attempt == same
    return table.append_column("task", pa.array([first] * table.num_rows))


class Passing:
    """A pool's actor."""

    def __call__(self, table: pa.Table) -> pa.Table:
        return table


@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
def test_a_pipeline_is_heard_asked_numbered_and_its_actors_held() -> None:
    Watching.stages, Watching.waitables, Watching.held, Watching.num_ends = set(), [], set(), 0
    Asked.waiting, Asked.limits, Asked.following = [], [], []
    context = DataContext.get_current()
    context.enable_progress_bars = False
    before = context.copy()
    use_callbacks(context, [Watching])
    use_policies(context, [Asked])
    try:
        rows = ray.data.range(40, override_num_blocks=4).repartition(target_num_rows_per_block=10, strict=True)
        limit_last_stage(rows, 0.25, 2)
        rows = rows.map_batches(number, batch_size=None, batch_format="pyarrow", num_cpus=0.1)
        rows = rows.map_batches(
            Passing, batch_size=None, batch_format="pyarrow", compute=ActorPoolStrategy(size=1), num_cpus=0.1
        )
        numbers = {row["task"] for row in rows.iter_rows()}
        run_to_end(rows)
    finally:
        DataContext._set_current(before)
    assert numbers == {0, 1, 2, 3}
    assert any("Passing" in name for name in Watching.stages)
    assert Watching.waitables
    assert all(isinstance(ref, ray.ObjectRef | ray.ObjectRefGenerator) for ref in Watching.waitables)
    assert len(Watching.held) == 2, "one actor of each of the two executions"
    assert all(isinstance(actor, ray.actor.ActorHandle) for actor in Watching.held)
    assert Watching.num_ends == 2
    assert min(Asked.waiting) == 0
    assert any(Asked.limits)
    assert any("Passing" in name for name in Asked.following)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
def test_limits_of_a_stage_reach_the_operator_that_runs_it() -> None:
    found: dict[str, set[object]] = {"cpus": set(), "limits": set()}

    class Limits(StepCallback):
        def on_step(self, operators: list[Operator]) -> None:
            (stage,) = (own for own in operators if "StreamingRepartition" in own.name)
            found["limits"].add(stage.get_max_concurrency_limit())
            found["cpus"].add(stage._ray_remote_args["num_cpus"])  # type: ignore[attr-defined]

    context = DataContext.get_current()
    before = context.copy()
    use_callbacks(context, [Limits])
    try:
        rows = ray.data.range(40, override_num_blocks=4).repartition(target_num_rows_per_block=10, strict=True)
        limit_last_stage(rows, 0.25, 2)
        run_to_end(rows)
    finally:
        DataContext._set_current(before)
    assert found == {"cpus": {0.25}, "limits": {2}}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
def test_a_job_record_is_read_changed_and_left_alone() -> None:
    seen: list[dict[str, object]] = []

    def start(record: dict[str, object]) -> bool:
        seen.append(dict(record))
        record["status"] = "RUNNING"
        return True

    def refuse(record: dict[str, object]) -> bool:
        seen.append(dict(record))
        record["status"] = "changed"
        return False

    for update in (start, refuse, refuse):
        update_job_record("contract", update)
    assert seen == [{}, {"status": "RUNNING"}, {"status": "RUNNING"}]
    from ray.experimental.internal_kv import _internal_kv_get

    raw = _internal_kv_get(JOB_RECORD.format("contract").encode(), namespace=JOB_NAMESPACE)
    assert json.loads(raw) == {"status": "RUNNING"}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
def test_a_counter_can_be_told_zero() -> None:
    counter = Counter("skipdecode_contract", "of this test", tag_keys=("status",))
    with pytest.raises(ValueError, match="must be >0"):
        counter.inc(0, {"status": "ok"})
    record_zero(counter, {"status": "ok"})


def test_a_task_has_a_number_only_in_ray_data() -> None:
    with pytest.raises(AssertionError, match="only tasks of Ray Data"):
        number_of_task()
