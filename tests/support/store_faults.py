"""Faults of runs on stores: an upload that comes late, two drivers on a store without links, objects seen while they
are written. S3 is a server on loopback, in this process."""

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

import pyarrow.fs as pafs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from pipeline.store.run_folder import RunFolder
from tests.support.faults import QUICK_LEASE_S, Fault, ends_well, must_have_hit
from tests.support.trials import LOOPBACK_KEYS, RUN_TIMEOUT_S, Trial, verified

BUCKET = "trials"


class Delay:
    """A WSGI application in front of another: a request of a kind, once so many of them have passed, waits until it
    may go on."""

    def __init__(self, app: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._matches: Callable[[WSGIEnvironment], bool] = _shows_data
        self._num_left: int | None = None
        self.held, self.may_go, self.is_done = threading.Event(), threading.Event(), threading.Event()

    def arm(self, matches: Callable[[WSGIEnvironment], bool] | None = None, after: int = 0) -> None:
        """By itself, the first request that makes a data file seen."""
        with self._lock:
            self._matches, self._num_left = matches or _shows_data, after
            self.held, self.may_go, self.is_done = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._lock:
            is_counted = self._num_left is not None and self._matches(environ)
            is_delayed = is_counted and self._num_left == 0
            if self._num_left is not None and is_counted:
                self._num_left = None if is_delayed else self._num_left - 1
            held, may_go, is_done = self.held, self.may_go, self.is_done
        if not is_delayed:
            return self._app(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # its sender may be gone later
        environ["wsgi.input"] = io.BytesIO(body)
        held.set()
        may_go.wait()
        try:
            return list(self._app(environ, start_response))
        finally:
            is_done.set()


def _shows_data(environ: WSGIEnvironment) -> bool:
    """Whether an object among the data appears with this request."""
    keys = parse_qs(environ.get("QUERY_STRING", ""))
    is_last = environ["REQUEST_METHOD"] == "PUT" and "partNumber" not in keys
    is_last = is_last or (environ["REQUEST_METHOD"] == "POST" and "uploadId" in keys)
    return is_last and "/data/status=ok/" in environ["PATH_INFO"].replace("%3D", "=")


def begins_upload(environ: WSGIEnvironment) -> bool:
    """Whether an object is opened with this request: nothing of it has been sent yet."""
    keys = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    return environ["REQUEST_METHOD"] == "POST" and "uploads" in keys


@contextmanager
def object_store() -> Iterator[tuple[Callable[[str], str], Delay]]:
    """`uri("run")`: `s3://.../run?...` on a server of our own; and what delays an upload there."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    delay = Delay(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, delay, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert os.environ.get("AWS_ACCESS_KEY_ID") == LOOPBACK_KEYS["AWS_ACCESS_KEY_ID"], "of `Site.up`"

    def uri(path: str) -> str:
        place = f"127.0.0.1:{server.server_port}"
        return f"s3://{BUCKET}/{path}?endpoint_override={place}&scheme=http&region=us-east-1"

    try:
        filesystem, _ = pafs.FileSystem.from_uri(uri("") + "&allow_bucket_creation=true")
        filesystem.create_dir(BUCKET)
        yield uri, delay
    finally:
        delay.may_go.set()
        server.shutdown()
        thread.join()


@contextmanager
def on_object_store(trial: Trial) -> Iterator[Delay]:
    """The trial's run folder lies there; it is judged before the store goes. Servers of one process share what they
    hold, so each trial has a folder of its own."""
    with object_store() as (uri, delay):
        trial.output = uri(f"{trial.folder.name}/run")
        yield delay
        trial.verdict = trial.judge()


def delayed_put(trial: Trial) -> None:
    """One upload of a driver that is killed comes while its successor works, or after that one has closed its books."""
    with on_object_store(trial) as delay:
        delay.arm()
        driver = trial.start()
        trial.wait(driver, delay.held.is_set)
        trial.kill(driver)
        if trial.rng.random() < 0.3:
            successor = trial.start("--resume")
            trial.pause()
            delay.may_go.set()
            ends_well(trial, successor)
        else:
            trial.resume()
            delay.may_go.set()
            assert delay.is_done.wait(RUN_TIMEOUT_S)
            assert not verified(trial.output)[0], "the file that came late is not named"
        trial.resume()


def driver_killed_on_store(trial: Trial) -> None:
    with on_object_store(trial):
        driver = trial.start()
        trial.wait_for_files(driver)
        trial.kill(driver)
        trial.resume()


def driver_stopped_on_store(trial: Trial) -> None:
    """By Ctrl-C or SIGTERM, while it or one of its writers has begun an upload: no object is half or empty."""
    with on_object_store(trial) as delay:
        delay.arm(begins_upload, after=trial.rng.randrange(30))
        driver = trial.start()
        trial.wait(driver, delay.held.is_set)
        driver.send_signal(trial.rng.choice((signal.SIGINT, signal.SIGTERM)))
        trial.pause()
        delay.may_go.set()
        code, err = trial.end(driver)
        assert code in (0, 1), err[-1500:]
        folder = RunFolder.open(str(trial.output))
        assert folder.remove_empty(lambda: None) == []
        folder.read_state()
        trial.resume()


def two_drivers_on_store(trial: Trial) -> None:
    """Both may be let in for a moment; one ends at its next look."""
    with on_object_store(trial):
        both = [trial.start("--resume", SKIPDECODE_LEASE_S=QUICK_LEASE_S) for _ in range(2)]
        ends = [trial.end(driver) for driver in both]
        codes = sorted(code for code, _ in ends)
        assert codes[0] == 0, ends
        assert set(codes) <= {0, 1, 2}, ends


def early_store(trial: Trial) -> None:
    """Whoever is the first to have made so many steps dies: the driver, a writer, the collector of the figures."""
    plain = trial.output
    trial.output, trial.prefix = f"early://{plain}", [sys.executable, "-m", "tests.support.early_run"]
    plan: dict[str, Any] = {"store step": {"signal": "SIGKILL", "after": trial.rng.randrange(30)}}
    driver = trial.start(plan=plan)
    code, err = trial.end(driver)
    must_have_hit(trial, driver, plan)
    if code != 0:
        assert code < 0 or code == 1, err
        trial.resume()
    trial.output, trial.prefix = plain, []


STORE_FAULTS: dict[str, Fault] = {
    "late PUT": delayed_put,
    "driver killed, object store": driver_killed_on_store,
    "driver stopped, object store": driver_stopped_on_store,
    "two drivers at once, object store": two_drivers_on_store,
    "killed in a write, Azure-like store": early_store,
}
