"""Faults of runs on stores: an upload that comes late, two drivers on a store without links, a store that is slow or
whose lists lag, objects seen while they are written. S3 is a server on loopback, in this process."""

import html
import io
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote
from wsgiref.types import StartResponse, WSGIEnvironment

import pyarrow.fs as pafs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from pipeline.store.run_folder import RunFolder
from tests.support.faults import (
    OTHER_ROWS,
    OWN_SEED,
    QUICK_LEASE_S,
    STORE_STEPS,
    Fault,
    ends_well,
    must_have_hit,
    overwrite_and_kill,
)
from tests.support.trials import LOOPBACK_KEYS, RUN_TIMEOUT_S, Trial, verified

BUCKET = "trials"


class Delay:
    """A WSGI application in front of another: a request of a kind, once so many of them have passed, waits until it
    may go on. All requests may be slow, some may be refused, and lists may lag behind."""

    def __init__(self, app: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._matches: Callable[[WSGIEnvironment], bool] = _shows_data
        self._num_left: int | None = None
        self.held, self.may_go, self.is_done = threading.Event(), threading.Event(), threading.Event()
        self.rng = random.Random(0)
        self.slow_s = 0.0
        """The most that a request takes longer."""
        self.refused = 0.0
        """The share of requests that are answered with 503, which clients repeat."""
        self.lag_s = 0.0
        """For so long an object is in no list."""
        self._appeared_at: dict[str, float] = {}
        """When each object came, by its path."""

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
            wait_s, is_refused = self.rng.random() * self.slow_s, self.rng.random() < self.refused
        if not is_delayed:
            time.sleep(wait_s)
            return _refuse(environ, start_response) if is_refused else self._answer(environ, start_response)
        environ["wsgi.input"] = io.BytesIO(_body(environ))  # its sender may be gone later
        held.set()
        may_go.wait()
        try:
            return list(self._answer(environ, start_response))
        finally:
            is_done.set()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        keys = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and "uploads" not in keys and "partNumber" not in keys:
            self._appeared_at.setdefault(_path(environ), time.monotonic())
        if not self.lag_s or environ["REQUEST_METHOD"] != "GET" or "list-type" not in keys:
            return self._app(environ, start_response)
        started: list[Any] = []
        text = b"".join(self._app(environ, lambda *answer: started.append(answer))).decode()  # type: ignore[arg-type]
        late_s = time.monotonic() - self.lag_s
        found = re.sub(
            "<Contents>.*?<Key>(.*?)</Key>.*?</Contents>",
            lambda entry: "" if self._appeared_at.get(_key(entry.group(1)), 0.0) > late_s else entry.group(),
            text,
            flags=re.DOTALL,
        ).encode()
        status, headers = started[0][:2]
        start_response(status, [(k, str(len(found)) if k.lower() == "content-length" else v) for k, v in headers])
        return [found]


def _body(environ: WSGIEnvironment) -> bytes:
    return bytes(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))


def _path(environ: WSGIEnvironment) -> str:
    """The bucket and the key of a request."""
    return unquote(environ["PATH_INFO"]).strip("/")


def _key(listed: str) -> str:
    return f"{BUCKET}/{unquote(html.unescape(listed))}"


def _refuse(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """As a store does that wants fewer requests."""
    _body(environ)
    found = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"
    start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(found)))])
    return [found]


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


def delayed_put_of_another_run(trial: Trial) -> None:
    """One upload of a driver that is killed comes when `--overwrite` has begun, or is done: no row of it stays."""
    with on_object_store(trial) as store:
        store.arm()
        driver = trial.start(OTHER_ROWS)
        trial.wait(driver, store.held.is_set)
        trial.kill(driver)
        store.slow_s = 0.2 * trial.rng.random()
        successor = trial.start("--overwrite")
        if trial.rng.random() < 0.7:
            folder = RunFolder.open(str(trial.output))
            trial.wait(successor, lambda: _seed_of(folder) == OWN_SEED)
            time.sleep(trial.rng.random() * trial.rng.choice((0.1, 3.0)))
        else:
            ends_well(trial, successor)
        store.may_go.set()
        assert store.is_done.wait(RUN_TIMEOUT_S)
        if successor.poll() is None:
            ends_well(trial, successor)
        trial.resume()


def _seed_of(folder: RunFolder) -> object:
    state = folder.read_state()
    return None if state is None else state["fingerprint"]["sampling.seed"]


def overwritten_on_store(trial: Trial) -> None:
    """A run is killed, its overwriting one too, and a third one goes on or begins anew."""
    with on_object_store(trial) as store:
        overwrite_and_kill(trial, STORE_STEPS)
        store.slow_s = 0.0


def slow_store(trial: Trial) -> None:
    """Each request takes a while, and some are refused; the driver dies."""
    with on_object_store(trial) as store:
        store.slow_s, store.refused = trial.rng.choice(((0.2, 0.0), (0.0, 0.03), (0.1, 0.02)))
        driver = trial.start()
        trial.wait_for_files(driver)
        trial.kill(driver)
        trial.resume()
        store.slow_s = store.refused = 0.0


def lagging_store(trial: Trial) -> None:
    """New objects are in no list for a while: a session ends without its books, or the next does it."""
    with on_object_store(trial) as store:
        store.lag_s = trial.rng.choice((0.3, 1.0, 3.0))
        driver = trial.start()
        trial.wait_for_files(driver)
        trial.kill(driver)
        for _ in range(3):
            code, err = trial.end(trial.start("--resume"))
            if code == 0:
                break
            assert code == 1, err[-1500:]
            time.sleep(store.lag_s)
        store.lag_s = 0.0
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
    "late PUT of an overwritten run": delayed_put_of_another_run,
    "overwriting run killed, object store": overwritten_on_store,
    "slow object store": slow_store,
    "object store whose lists lag": lagging_store,
    "driver killed, object store": driver_killed_on_store,
    "driver stopped, object store": driver_stopped_on_store,
    "two drivers at once, object store": two_drivers_on_store,
    "killed in a write, Azure-like store": early_store,
}
