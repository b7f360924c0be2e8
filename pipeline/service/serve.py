"""Starts the application of a Serve file with Ray's public API, and stops it without dropping an answer."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pipeline.cluster.pool import start_ray
from pipeline.cluster.ray_logging import SERVE_END, SERVE_NOTES, without_log_records, without_printed_lines
from pipeline.config.job import ConfigError, read_tree, set_key
from pipeline.config.tree import read_override
from pipeline.formatting import Json, Log
from pipeline.service.app import bind_application, make_spec
from pipeline.service.auth import configured_keys, is_loopback, make_key
from pipeline.service.config import DEPLOYMENT, ServeFile, load_serve_file

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
    is_keyless = not configured_keys(file.args.auth)
    key = make_key() if is_keyless and not file.args.auth.open_on_loopback else None
    signals = StopSignals()
    began, left = time.time(), 0
    try:
        with running(file, key, signals.install, log) as url:
            began = time.time()
            with suppress(KeyboardInterrupt):  # the signal came before `wait` was reached
                for line in describe(file, url, key):
                    log(line)
                signals.wait()
            log("stopping: new requests get 503, requests in progress are answered")
            left = drain(file.name, file.drain_s)
    except StoppedInStart as error:
        log("stopped before the server was ready")
        began, left = time.time(), error.unanswered
    if left:
        log(f"{left} requests were not answered in time")
    return {"served_s": round(time.time() - began, 1), "unanswered": left}


def describe(file: ServeFile, url: str, key: str | None) -> list[str]:
    """What is said once the server answers."""
    page = url if key is None else f"{url}#key={key}"
    places = f"{page} (page), {url}v1 (API), {url}health"
    lines = [f"serving {file.args.served_name} at {places}; stop with Ctrl-C or SIGTERM"]
    if key is not None:
        lines.append(f"API key made for this start, since {file.args.auth.api_keys_env} is not set: {key}")
    return lines


class StopSignals:
    """SIGTERM and SIGINT. The first one interrupts the start of the server, or ends its serving; later ones do nothing,
    so that it comes down in order."""

    def __init__(self) -> None:
        self._has_come, self._is_starting = False, True
        self._arrived: SimpleQueue[None] = SimpleQueue()  # a handler may call `put` at any moment, unlike Event.set

    def install(self) -> None:
        """To be called after Ray has started, since it installs handlers of its own."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._receive)

    def wait(self) -> None:
        """Returns when a signal has come."""
        self._is_starting = False
        self._arrived.get()

    def _receive(self, *_: object) -> None:
        if not self._has_come:
            self._has_come = True
            if self._is_starting:
                raise KeyboardInterrupt
            self._arrived.put(None)


class StoppedInStart(Exception):
    """A signal came after the HTTP port had been opened, and before the application was ready."""

    def __init__(self, unanswered: int) -> None:
        super().__init__("stopped before the server was ready")
        self.unanswered = unanswered


@contextmanager
def running(
    file: ServeFile,
    made_key: str | None = None,
    on_ray_started: Callable[[], None] = lambda: None,
    log: Log = lambda _: None,
) -> Iterator[str]:
    """Starts the application and yields its URL; ConfigError. Leaving stops it, and also Serve and Ray if they did not
    run before. KeyboardInterrupt in the start, once the port is open, becomes `StoppedInStart`.
    """
    host, port = file.http.host, file.http.port
    if made_key is None and not configured_keys(file.args.auth) and not is_loopback(host):
        raise ConfigError(
            "http_options.host",
            f"{host} is not loopback, and auth.open_on_loopback lets callers in without a key; set "
            f"{file.args.auth.api_keys_env}=KEY (or auth.api_keys_file), or bind to 127.0.0.1",
        )
    if not os.environ.get("RAY_ADDRESS"):
        _check_free(host, port)
    with without_printed_lines(SERVE_END), _ray_running(log), ExitStack() as stack:
        on_ray_started()
        application = _application(file, made_key)  # before Serve: a bad configuration starts nothing of it
        before = serve.status()
        if file.name in before.applications:
            raise ConfigError(
                "applications.0.name", f"an application {file.name} already runs on this cluster; give another name"
            )
        is_shared = bool(before.proxies or before.applications)
        try:
            try:
                serve.start(proxy_location=file.proxy_location, http_options=file.http.model_dump())
                stack.enter_context(without_log_records(logging.getLogger("ray.serve"), SERVE_NOTES))
                serve.run(application, name=file.name, route_prefix=file.route_prefix)
            except KeyboardInterrupt:  # requests may have been let in already
                raise StoppedInStart(drain(file.name, file.drain_s)) from None
            shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            yield f"http://{shown}:{port}{file.route_prefix.rstrip('/')}/"
        finally:
            if is_shared:
                serve.delete(file.name)  # a shutdown would stop other applications too
            else:
                serve.shutdown()


@contextmanager
def _ray_running(log: Log) -> Iterator[None]:
    """Starts Ray, and stops it on leaving unless it ran before."""
    was_running = ray.is_initialized()
    start_ray(log)
    try:
        yield
    finally:
        if not was_running:
            ray.shutdown()


def drain(name: str, timeout_s: float) -> int:
    """Refuses new requests and waits for those in progress; returns how many were left after `timeout_s`.

    Only running replicas are waited for, so one that starts or dies meanwhile does not hold this up; nor does an
    application that has not been deployed yet.
    """
    handle, deadline = None, time.monotonic() + timeout_s
    while True:
        application = serve.status().applications.get(name)
        try:
            handle = handle or serve.get_app_handle(name)
        except RayServeException:
            application = None
        if application is None or handle is None:  # it has not been deployed yet
            return 0
        left = _num_responses(handle)
        deployment = application.deployments.get(DEPLOYMENT)
        num_replicas = deployment.replica_states.get("RUNNING", 0) if deployment else 0
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


def _application(file: ServeFile, made_key: str | None) -> serve.Application:
    spec = make_spec(file.args, made_key)
    try:
        return bind_application(spec, file.deployment)
    except (TypeError, ValueError) as error:  # raised by Ray
        raise ConfigError("applications.0.deployments.0", f"{error}") from error


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
