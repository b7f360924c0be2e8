"""Ray's private parts that we rely on, all of them, behind functions and classes of our own.

A new Ray may change any of these without a word: `tests/pipeline/cluster/test_ray_internals.py` says which. Nothing
else in the packages names them. Left out: what they are used for.
"""

import json
import os
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import ClassVar, Protocol

import ray
from ray._private import ray_constants, worker
from ray.data import DataContext, Dataset
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.interfaces.task_context import TaskContext
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.metrics import Metric

from pipeline.cluster.ray_logging import RESTART, without_stderr_lines
from pipeline.formatting import Json

NOISY_LOGGERS = ("ray.data._internal.progress", "ray._private.authentication.authentication_token_setup")
"""Each warns about what this project sets on purpose: our own progress line, and Ray's default authentication."""

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable of a submitted job's driver that has its `metadata` (ray/_private/runtime_env/constants.py), as JSON."""
JOB_RECORD = "_ray_internal_job_info_{}"
"""The key of a job's record (JobInfoStorageClient.JOB_DATA_KEY in ray/dashboard/modules/job/common.py)."""
JOB_NAMESPACE = b"job"
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A request of the head node's service (ray/core/generated/gcs_service_pb2_grpc.py) that may be empty."""


class Task(Protocol):
    """A task or an actor's call that Ray Data waits for."""

    def get_waitable(self) -> ray.ObjectRef: ...


class Operator(Protocol):
    """A stage of a running pipeline."""

    name: str
    output_dependencies: "Sequence[Operator]"

    def get_active_tasks(self) -> Sequence[Task]: ...

    def get_max_concurrency_limit(self) -> int | None: ...


class OutputQueue(Protocol):
    num_blocks: int


class OperatorState(Protocol):
    """Ray Data's state of a stage."""

    output_queue: OutputQueue


class Executor(Protocol):
    """Ray Data's loop over the stages of one pipeline."""

    _topology: dict[Operator, OperatorState]


class StepCallback(ExecutionCallback):  # type: ignore[misc]
    """Hears of every step of Ray Data's loop, in the driver; Ray Data makes one per execution, without arguments."""

    def on_step(self, operators: Sequence[Operator]) -> None:
        """The loop has done what there was to do."""

    def on_end(self) -> None:
        """The pipeline has ended, well or not."""

    def on_execution_step(self, executor: Executor) -> None:
        self.on_step(list(executor._topology))

    def after_execution_succeeds(self, executor: Executor) -> None:
        self.on_end()

    def after_execution_fails(self, executor: Executor, error: Exception) -> None:
        self.on_end()


class InputPolicy(BackpressurePolicy):  # type: ignore[misc]
    """Decides whether a stage may take more input; Ray Data makes one per execution."""

    NAME: ClassVar[str]

    @property
    def name(self) -> str:
        """For Ray Data's logs."""
        return self.NAME

    def may_take_input(self, operator: Operator, num_waiting: int) -> bool:
        """`num_waiting`: output blocks of the stage that wait to be consumed."""
        raise NotImplementedError

    def can_add_input(self, op: Operator) -> bool:
        states: dict[Operator, OperatorState] = self._topology
        return self.may_take_input(op, states[op].output_queue.num_blocks)


def use_callbacks(context: DataContext, callbacks: Sequence[type[StepCallback]]) -> None:
    """These and no others, in pipelines that run under `context`."""
    context.custom_execution_callback_classes = list(callbacks)


def use_policies(context: DataContext, policies: Sequence[type[InputPolicy]]) -> None:
    """These beside Ray Data's own."""
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, *policies])


def actors_to_hold(operator: Operator) -> set[object]:
    """Handles of the running actors of a stage that is not to grow any more; empty of any other stage.

    Of a pool of a fixed size all, always; of one that may shrink only once its input has ended. Who holds a handle
    keeps the actor alive.
    """
    if not isinstance(operator, ActorPoolMapOperator):
        return set()
    pool = operator._actor_pool
    is_static = pool.min_size() == pool.max_size() or operator._inputs_complete
    return set(pool._running_actors) if is_static else set()


def limit_last_stage(dataset: Dataset, num_cpus: float, max_tasks: int) -> None:
    """CPUs that each task of the last stage so far asks for, and its tasks at a time, where its method has no arguments
    for them."""
    stage = dataset._logical_plan.dag
    stage.ray_remote_args["num_cpus"] = num_cpus
    stage.compute.size = max_tasks


def with_own_context(dataset: Dataset) -> Dataset:
    """A copy of the dataset with settings of its own, which do not affect the original."""
    return Dataset.copy(dataset, _deep_copy=True)


def run_to_end(dataset: Dataset) -> None:
    """Runs a pipeline and drops its rows; `materialize` would keep what writers return for each block."""
    for _ in dataset.iter_internal_ref_bundles():
        pass


def number_of_task() -> tuple[int, int, str]:
    """(task, call, attempt): the number of this task of Ray Data in its stage, how often this was asked in it before,
    and a name of this attempt at the task.

    In a task only: the functions of an actor run in another thread. When Ray repeats a task, the numbers are the same
    in the same order, and the attempt is another.
    """
    context = TaskContext.get_current()
    assert context is not None, "only tasks of Ray Data have a number"
    earlier: int = context.kwargs.get("numbers_taken", 0)
    context.kwargs["numbers_taken"] = earlier + 1
    attempt: str = context.kwargs.setdefault("attempt", uuid.uuid4().hex[:8])
    return context.task_idx, earlier, attempt


def job_env_vars() -> dict[str, str]:
    """The environment that a submitted job has from its submission; Ray refuses to be given one of these again."""
    config = json.loads(os.environ.get(JOB_CONFIG, "{}"))
    return (config.get("runtime_env") or {}).get("env_vars") or {}


def update_job_record(job: str, update: Callable[[dict[str, Json]], bool]) -> None:
    """Changes the record of a submitted job in Ray's own store; needs a Ray that is up.

    `update` changes the record (empty where there is none), and says whether it is to be written.
    """
    key = JOB_RECORD.format(job).encode()
    raw = _internal_kv_get(key, namespace=JOB_NAMESPACE)
    record: dict[str, Json] = json.loads(raw) if raw else {}
    if update(record):
        _internal_kv_put(key, json.dumps(record).encode(), overwrite=True, namespace=JOB_NAMESPACE)


def needs_token(address: str, timeout_s: float) -> bool | None:
    """Whether the cluster whose head is at `address` (host:port) refuses whoever comes without a token.

    None under TLS, where certificates decide. ConnectionError if no cluster answers within `timeout_s`.
    """
    import grpc  # here: worker processes do without
    from ray._private.grpc_utils import init_grpc_channel

    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    with init_grpc_channel(address) if has_tls else grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectionError(f"no answer within {timeout_s:g} s") from error
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise ConnectionError(error.details()) from error
            return True if not has_tls else None
    return False if not has_tls else None


def ignore_uv_run() -> None:
    """Lets workers run in the environment of this process though `uv run` started it, unless the user has decided.

    Ray would start each by `uv run` in a copy of the working directory, which has no `.venv`.
    """
    if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False


def is_run_by_uv() -> bool:
    """Whether Ray starts workers by `uv run`."""
    from ray._private.runtime_env import uv_runtime_env_hook

    return ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV and uv_runtime_env_hook._get_uv_run_cmdline() is not None


def session_logs() -> Path:
    """The folder of Ray's logs on this node."""
    return Path(worker._global_node.get_logs_dir_path())


def record_zero(metric: Metric, tags: dict[str, str] | None) -> None:
    """Tells Ray a metric's first figure, 0, which a counter's `inc` refuses."""
    metric._record(0, tags)


def hide_restart_warnings() -> None:
    """Hides the line `ray_logging.RESTART` for workers that Ray Data starts in this process from now on."""
    loud = ActorPoolMapOperator._start_actor
    if hasattr(loud, "__wrapped__"):
        return

    @wraps(loud)
    def start_actor(*arguments: object, **keys: object) -> object:
        with without_stderr_lines(RESTART):
            return loud(*arguments, **keys)

    ActorPoolMapOperator._start_actor = start_actor
