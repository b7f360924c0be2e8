"""Connections that say nothing, little, or never read what they asked for, against a whole `jobs.serve`."""

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import descendants, wait_for, workers
from tests.support.service_helpers import Served, served
from tests.support.sockets import ask, connect, head

MIB = 1 << 20
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def most_connections() -> int:
    """10,000, or as many as this machine lets a process have open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # processes that are started now have it too
    return min(10_000, hard - 1000)


def proxy_and_replica(server: Served) -> set[int]:
    started = descendants(server.process.pid)
    pids = workers(started, "ray::ProxyActor") | workers(started, "ray::ServeReplica")
    assert len(pids) == 2
    return pids


def threads_and_bytes(pids: set[int]) -> tuple[int, int]:
    """Of all of them together."""
    page = os.sysconf("SC_PAGE_SIZE")
    taken = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids)
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids), taken


def answered_in(server: Served) -> float:
    """Seconds; the median of five."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert server.post({"prompt": "name[The Mill]", "max_tokens": 2, "temperature": 0}).status_code == 200
        times.append(time.monotonic() - began)
    return sorted(times)[2]


def test_connections_that_say_nothing_or_little(tmp_path: Path) -> None:
    """1,000, then 10,000 or as many as there may be: half of them silent, half with half a header, some of it slow."""
    most = most_connections()
    print(f"up to {most} connections; a process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open")
    with served(tmp_path) as server, ExitStack() as stack:
        pids = proxy_and_replica(server)
        answered_in(server)
        threads, taken = threads_and_bytes(pids)
        calm_s = answered_in(server)
        made: list[socket.socket] = []
        for count in (1000, most):
            while len(made) < count:
                made.append(stack.enter_context(connect(server.url)))
                if len(made) % 2:
                    made[-1].sendall(head(server.url)[:-4])
            drip = threading.Thread(target=drip_headers, args=(made[1:200:2], 5.0))
            drip.start()
            seconds = answered_in(server)
            drip.join()
            threads_now, taken_now = threads_and_bytes(pids)
            each = (taken_now - taken) / count / 1024
            print(f"{count}: {threads} -> {threads_now} threads, {each:.0f} KiB each, {calm_s:.3f} -> {seconds:.3f} s")
            assert threads_now <= threads + 4
            assert taken_now - taken < 32 * MIB + count * 32 * 1024
            assert seconds < calm_s + 1


def drip_headers(connections: list[socket.socket], seconds: float) -> None:
    """A byte of a header at a time, as slowloris does."""
    ends_at = time.monotonic() + seconds
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nX-A: ")
    while time.monotonic() < ends_at:
        for connection in connections:
            connection.sendall(b"b")
        time.sleep(0.1)


def test_streams_that_nobody_reads(tmp_path: Path) -> None:
    """Others are answered, what the streams hold is bounded, and the endpoint ends when it is told to."""
    with served(tmp_path, "limits.request_timeout_s=20") as server:
        pids = proxy_and_replica(server)
        answered_in(server)
        _, taken = threads_and_bytes(pids)
        with ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(connect(server.url, 4096))
                ask(connection, server.url, prompt=["a"] * 8, max_tokens=200, ignore_eos=True, logprobs=5, stream=True)
            wait_for(lambda: server.get("/health").json()["running"] > 0, timeout_s=60)
            idle = {"running": 0, "waiting": 0}
            wait_for(lambda: idle.items() <= server.get("/health").json().items(), timeout_s=60)
            assert answered_in(server) < 5
            _, taken_now = threads_and_bytes(pids)
            print(f"{(taken_now - taken) >> 20} MiB more")
            assert taken_now - taken < 300 * MIB
            server.process.terminate()
            assert server.process.wait(timeout=100) == 0
