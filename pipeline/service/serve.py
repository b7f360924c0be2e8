"""Starts the application of a Serve file with Ray's public API, and stops it without dropping an answer."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pipeline.cluster.pool import start_ray
from pipeline.cluster.ray_logging import SERVE_END, without_printed_lines
from pipeline.config.job import ConfigError, read_tree, set_key
from pipeline.config.tree import read_override
from pipeline.formatting import Json, Log
from pipeline.service.app import Completions, make_spec
from pipeline.service.auth import is_loopback, read_keys
from pipeline.service.config import ServeFile, load_serve_file

DRAIN_POLL_S = 0.2
ASK_S = 5.0  # for all replicas to answer
LINGER_S = 0.5  # for Ray's proxy to send the last bytes of a replica


def load(path: str | None, overrides: Sequence[str], host: str | None, port: int | None) -> ServeFile:
    """Reads and checks a Serve file; ConfigError."""
    pairs = [read_override(override) for override in overrides]
    tree = read_tree(path)
    for name, value in (("host", host), ("port", port)):
        if value is not None:
            set_key(tree, f"http_options.{name}", value)
    return load_serve_file(tree, pairs)


def serve_until_stopped(
    path: str | None, overrides: Sequence[str], *, host: str | None, port: int | None, log: Log
) -> dict[str, Json]:
    """Serves until SIGTERM or SIGINT, then drains; returns the JSON document."""
    file = load(path, overrides, host, port)
    stop = threading.Event()
    with running(file) as url:
        for name in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own by now
            signal.signal(name, lambda *_: stop.set())
        began = time.time()
        log(f"serving {file.args.served_name} at {url} (page), {url}v1 (API), {url}health; stop with Ctrl-C or SIGTERM")
        stop.wait()
        log("stopping: new requests get 503, requests in progress are answered")
        left = drain(file.name, file.drain_s)
        if left:
            log(f"{left} requests were not answered in time")
    return {"served_s": round(time.time() - began, 1), "unanswered": left}


@contextmanager
def running(file: ServeFile) -> Iterator[str]:
    """Starts the application and yields its URL; ConfigError. Leaving stops it, and also Serve and Ray if they did not
    run before."""
    host, port = file.http.host, file.http.port
    if not read_keys(file.args.auth) and not is_loopback(host):
        raise ConfigError(
            "http_options.host",
            f"{host} is not loopback, and no API keys are configured; set "
            f"{file.args.auth.api_keys_env}=KEY (or auth.api_keys_file), or bind to 127.0.0.1",
        )
    if not os.environ.get("RAY_ADDRESS"):
        _check_free(host, port)
    with without_printed_lines(SERVE_END), _ray_running():
        application = _application(file)  # before Serve: a bad configuration starts nothing of it
        before = serve.status()
        if file.name in before.applications:
            raise ConfigError(
                "applications.0.name", f"an application {file.name} already runs on this cluster; give another name"
            )
        is_shared = bool(before.proxies or before.applications)
        try:
            serve.start(proxy_location=file.proxy_location, http_options=file.http.model_dump())
            serve.run(application, name=file.name, route_prefix=file.route_prefix)
            shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            yield f"http://{shown}:{port}{file.route_prefix.rstrip('/')}/"
        finally:
            if is_shared:
                serve.delete(file.name)  # a shutdown would stop other applications too
            else:
                serve.shutdown()


@contextmanager
def _ray_running() -> Iterator[None]:
    """Starts Ray, and stops it on leaving unless it ran before."""
    was_running = ray.is_initialized()
    start_ray()
    try:
        yield
    finally:
        if not was_running:
            ray.shutdown()


def drain(name: str, timeout_s: float) -> int:
    """Refuses new requests and waits for those in progress; returns how many were left after `timeout_s`.

    Only running replicas are waited for, so one that starts or dies meanwhile does not hold this up.
    """
    handle = serve.get_app_handle(name)
    deadline = time.monotonic() + timeout_s
    while True:
        left = _num_responses(handle)
        deployments = serve.status().applications[name].deployments.values()
        num_replicas = sum(deployment.replica_states.get("RUNNING", 0) for deployment in deployments)
        if len(left) >= num_replicas and not any(left):
            time.sleep(LINGER_S)
            return 0
        if time.monotonic() > deadline:
            return sum(left)
        time.sleep(DRAIN_POLL_S)


def _num_responses(handle: DeploymentHandle) -> list[int]:
    """The open requests of each replica that answers, after telling it to take no new ones."""
    try:
        answers = handle.broadcast("drain").results(timeout_s=ASK_S, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError):  # no replica is running at this moment
        return []
    return [answer for answer in answers if isinstance(answer, int)]


def _application(file: ServeFile) -> serve.Application:
    try:
        deployment = Completions.options(**file.deployment)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:  # raised by Ray
        raise ConfigError("applications.0.deployments.0", f"{error}") from error
    return deployment.bind(make_spec(file.args))


def _check_free(host: str, port: int) -> None:
    """ConfigError if the port is taken; Serve itself would start without an error."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "http_options.port", f"{host}:{port} is not available: {error.strerror}; set --port"
            ) from error
