"""What Ray takes from the environment, checked before Ray would wait for minutes or end in an error about its inside.

A fault that a run can do without is worked around; any other is a ConfigError with the variable and a remedy. An
embedded Ray needs a folder with a short path for its sockets and a token; a cluster must answer; and both must be able
to start a worker process.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.cluster.ray_internals import is_run_by_uv, needs_token, session_logs
from pipeline.config.job import ConfigError
from pipeline.formatting import Log

CLUSTER_ANSWERS_S = 20.0  # a head node that is just starting needs some
WORKER_STARTS_S = 50.0
WORKER_LIMIT = "RAY_worker_register_timeout_seconds"
"""Ray's own variable: after so long it ends a worker process that has not reported (60 s)."""
MAX_SOCKET_BYTES = 103  # 107 on Linux, 103 on macOS
LONGEST_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MAX_SHOWN_LINES = 8
SLOW_START = "node timed out during startup"

OPEN_CLUSTER = (
    "warning: the Ray cluster at {} has no authentication: whoever reaches it can run programs on it. "
    "Start it with a token: `ray get-auth-token --generate` and `RAY_AUTH_MODE=token` (docs/cluster.md)"
)


def check_cluster(address: str, log: Log) -> None:
    """Checks that the cluster named by RAY_ADDRESS answers and lets us in; logs a warning if it lets in everybody."""
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            "RAY_ADDRESS",
            f"{address} is a dashboard, which only `ray job submit` takes; name the head node itself, for instance "
            "127.0.0.1:6379, or unset it to run on this machine alone",
        )
    if "://" in address or address == "auto":  # ray.init says itself when these do not answer
        return
    try:
        has_token = needs_token(address, CLUSTER_ANSWERS_S)
    except ConnectionError as error:
        raise unreachable(address, error) from error
    if has_token is False:
        log(OPEN_CLUSTER.format(address))
    elif has_token and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "RAY_AUTH_MODE",
            f"the Ray cluster at {address} asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless the "
            "cluster's token is in ~/.ray/auth_token",
        )


def unreachable(address: str, error: Exception) -> ConfigError:
    """RAY_ADDRESS names a cluster that cannot be joined because of `error`."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        "RAY_ADDRESS",
        f"the Ray cluster at {address} cannot be joined ({reason}); start it with `ray start --head`, correct the "
        "address, or unset RAY_ADDRESS to run on this machine alone",
    )


@contextmanager
def slow_start_is_named() -> Iterator[None]:
    """Turns what `ray.init` says where its node has not come up in time into a ConfigError with a remedy."""
    try:
        yield
    except Exception as error:  # of no special class
        if SLOW_START not in str(error):
            raise
        logs = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray/session_latest/logs")
        raise ConfigError(
            "",
            "Ray has not started on this machine within its 30 s: the machine is too busy, or a process of Ray cannot "
            f"start; try again when less is running, or see raylet.out and gcs_server.out in {logs}",
        ) from error


def provide_token() -> None:
    """Gives an embedded Ray a token of its own where it could not keep one in the home folder."""
    if (
        os.environ.get("RAY_AUTH_MODE", "token") != "token"
        or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    ):
        return
    try:
        token = Path.home() / ".ray" / "auth_token"
        if token.exists():
            token.read_bytes()
        else:
            token.parent.mkdir(parents=True, exist_ok=True)
        is_usable = token.exists() or os.access(token.parent, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        is_usable = False
    if not is_usable:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def provide_temporary_folder(log: Log) -> None:
    """Lets an embedded Ray work in /tmp where TMPDIR is no folder for it; ConfigError if there is none."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    folder = "/tmp" if variable is None else os.environ[variable]
    problem = _problem_of_folder(folder)
    if problem is None:
        return
    if variable == "TMPDIR" and _problem_of_folder("/tmp") is None:
        os.environ["RAY_TMPDIR"] = "/tmp"
        log(f"TMPDIR: {problem}, so Ray works in /tmp; RAY_TMPDIR names another folder")
        return
    raise ConfigError("RAY_TMPDIR", f"{problem}; name a folder for Ray's sockets and logs, as in RAY_TMPDIR=/tmp")


def _problem_of_folder(folder: str) -> str | None:
    """Why Ray cannot work in `folder`; None if it can."""
    longest = MAX_SOCKET_BYTES - len(LONGEST_SOCKET)
    if len(os.fsencode(folder)) > longest:
        return f"{folder} is longer than {longest} bytes, and a socket's path has a limit"
    try:
        os.makedirs(os.path.join(folder, "ray"), exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return None if os.access(os.path.join(folder, "ray"), os.W_OK) else f"{folder}/ray cannot be written"


def check_worker_starts() -> None:
    """Starts a worker process on this node; ConfigError with its own words if it does not report.

    Otherwise Ray would start one after the other for ever. It costs nothing: the first task of the run uses this one.
    """
    limit_s = float(os.environ.get(WORKER_LIMIT) or WORKER_STARTS_S)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        ray.get(ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(_report).remote(), timeout=limit_s)
    except GetTimeoutError:
        reason = f"none has reported for {limit_s:.0f} s ({WORKER_LIMIT} is the limit)"
    except RayError as error:
        reason = str(error)
    else:
        return
    if is_run_by_uv():
        reason += "; Ray starts workers by `uv run` as well, unless RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 is set"
    logs = session_logs()
    said = last_words(logs)
    raise ConfigError("", f"Ray cannot start worker processes: {reason}; the logs are in {logs}{said and ':'}{said}")


def _report() -> None:
    """The task that a worker process runs to show that it is there."""


def last_words(logs: Path) -> str:
    """The last lines that processes wrote to the session's logs before they failed, each after a line break."""
    found: list[Path] = []
    for pattern in ("worker-*.err", "worker-*.out", "runtime_env_setup-*.log", "raylet.err"):
        found = [path for path in logs.glob(pattern) if path.stat().st_size]
        if found:
            break
    if not found:
        return ""
    newest = max(found, key=lambda path: path.stat().st_mtime)
    lines = newest.read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(f"\n  {line}" for line in [line for line in lines if line.strip()][-MAX_SHOWN_LINES:])
