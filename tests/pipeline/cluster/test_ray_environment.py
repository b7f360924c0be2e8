"""What Ray takes from the environment: faults are worked around, or end in a ConfigError with variable and remedy.

The head node here is a gRPC server of this process; real clusters are in tests/runs/test_job.py. One real Ray starts in
the worst environment that it can start in, one cannot start workers.
"""

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from ray._private import node

from pipeline.cluster import ray_environment
from pipeline.cluster.ray_environment import (
    LONGEST_SOCKET,
    MAX_SOCKET_BYTES,
    check_cluster,
    last_words,
    provide_temporary_folder,
    provide_token,
    slow_start_is_named,
)
from pipeline.cluster.ray_internals import ALIVE
from pipeline.config.job import ConfigError

ROOT = Path(__file__).parents[3]
VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR", "TMPDIR")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray_environment, "CLUSTER_ANSWERS_S", 2.0)


class Head(grpc.GenericRpcHandler):
    """A head node that is alive, for those with a token or for everybody."""

    def __init__(self, needs_token: bool) -> None:
        self.needs_token = needs_token

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.needs_token:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: who are you?")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if details.method == ALIVE else None


@pytest.fixture
def head() -> Iterator[Callable[[bool], str]]:
    """`head(needs_token)`: the address of a new one."""
    servers = []

    def start(needs_token: bool) -> str:
        server = grpc.server(ThreadPoolExecutor(1), handlers=[Head(needs_token)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def test_a_cluster_that_lets_in_everybody_is_warned_about(head: Callable[[bool], str]) -> None:
    said: list[str] = []
    address = head(False)
    check_cluster(address, said.append)
    (line,) = said
    assert line.startswith(f"warning: the Ray cluster at {address} has no authentication")


def test_a_cluster_that_asks_for_a_token(head: Callable[[bool], str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = head(True)
    with pytest.raises(ConfigError, match=rf"^RAY_AUTH_MODE: the Ray cluster at {address} asks for a token; set "):
        check_cluster(address, pytest.fail)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_cluster(address, pytest.fail)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:6379"])
def test_a_dead_cluster_is_named_soon(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: ") as caught:
        check_cluster(address, pytest.fail)
    assert time.monotonic() - began < 60, "within a minute"
    assert f"the Ray cluster at {address} cannot be joined (" in str(caught.value)
    assert "unset RAY_ADDRESS to run on this machine alone" in str(caught.value)


def test_the_address_of_a_dashboard_is_none_of_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: http://127.0.0.1:8265 is a dashboard"):
        check_cluster("http://127.0.0.1:8265", pytest.fail)


def test_a_machine_that_is_too_busy_to_start_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives its node 30 s, and then says in the middle of a traceback that it may be overloaded."""
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    found = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
    match = r"^Ray has not started .* within its 30 s: the machine is too busy, .* in /scratch/ray/session_latest/logs$"
    with pytest.raises(ConfigError, match=match), slow_start_is_named():
        raise Exception(found)
    assert found.partition(".")[0] in inspect.getsource(node)
    with pytest.raises(ZeroDivisionError), slow_start_is_named():
        _ = 1 / 0


def test_a_token_is_kept_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    provide_token()
    assert "RAY_AUTH_TOKEN" not in os.environ, "Ray makes the file"
    (tmp_path / ".ray/auth_token").write_text("made before")
    provide_token()
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_without_a_home_folder_the_token_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nohome")
    provide_token()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert len(first) >= 32
    provide_token()
    assert os.environ["RAY_AUTH_TOKEN"] == first


def test_a_token_that_is_not_wanted_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nohome")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    provide_token()
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize("folder", ["/tmp/" + "x" * 80, "/proc/nowhere"])
def test_a_temporary_folder_that_ray_cannot_use(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("TMPDIR", folder)
    provide_temporary_folder(said.append)
    assert os.environ["RAY_TMPDIR"] == "/tmp"
    (line,) = said
    assert line.startswith(f"TMPDIR: {folder} ")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    with pytest.raises(ConfigError, match=rf"^RAY_TMPDIR: {folder} .*; name a folder .*, as in RAY_TMPDIR=/tmp$"):
        provide_temporary_folder(pytest.fail)


def test_a_folder_that_ray_can_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide_temporary_folder(pytest.fail)
    longest = MAX_SOCKET_BYTES - len(LONGEST_SOCKET)
    folder = Path("/tmp") / f"{os.getpid():0{longest - 5}d}"
    monkeypatch.setenv("TMPDIR", str(folder))
    provide_temporary_folder(pytest.fail)
    assert "RAY_TMPDIR" not in os.environ
    (folder / "ray").rmdir()
    folder.rmdir()


def test_the_last_words_of_a_worker(tmp_path: Path) -> None:
    assert last_words(tmp_path) == ""
    (tmp_path / "raylet.err").write_text("of the node\n")
    (tmp_path / "worker-1.err").touch()
    assert last_words(tmp_path) == "\n  of the node"
    (tmp_path / "worker-1.err").write_text("".join(f"line {number}\n\n" for number in range(20)))
    assert last_words(tmp_path).splitlines()[1:] == [f"  line {number}" for number in range(12, 20)]


def program(folder: Path, code: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Runs `code` behind a process that looks like `uv run`."""
    (folder / "run").write_text(
        f"import subprocess, sys\nsys.exit(subprocess.run([{sys.executable!r}, '-c', {code!r}]).returncode)\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES} | more
    path = ":".join([*([more["PYTHONPATH"]] if "PYTHONPATH" in more else []), str(ROOT)])
    return subprocess.run(
        ["uv", "run"], executable=sys.executable, cwd=folder, env=env | {"PYTHONPATH": path}, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.mark.ray
def test_ray_starts_under_uv_without_a_home_and_with_a_long_temporary_folder(tmp_path: Path) -> None:
    code = "from pipeline.cluster.pool import start_ray; print(start_ray(print).is_embedded)"
    done = program(tmp_path, code, HOME="/proc/nohome", TMPDIR=str(tmp_path / ("x" * 80)))
    assert done.returncode == 0, done.stderr
    said, started = done.stdout.splitlines()
    assert said.endswith("so Ray works in /tmp; RAY_TMPDIR names another folder")
    assert started == "True"


@pytest.mark.ray
@pytest.mark.slow
def test_workers_that_cannot_start_end_the_run_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif any(word.endswith('default_worker.py') for word in sys.orig_argv):\n"
        "    sys.exit('no library for this worker')\n"
    )
    code = "from pipeline.cluster.pool import start_ray; start_ray(print)"
    limits = {"RAY_worker_register_timeout_seconds": "5", "PYTHONPATH": str(tmp_path)}
    done = program(tmp_path, code, **limits)
    last = done.stderr[done.stderr.index("ConfigError: ") :]
    assert last.startswith("ConfigError: Ray cannot start worker processes: none has reported for 5 s (")
    assert "no library for this worker\n" in last
