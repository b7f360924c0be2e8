"""Ray's harmless line is left out, and nothing else; that a real run is quiet is in `test_pipeline`."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from pipeline.generate.quiet_start import STDERR, quietly, start_actors_quietly

HARMLESS = (
    "[2026-11-23 16:18:49,373 E 24557 24557] core_worker.cc:2465: Actor with class name: 'MapWorker(MapBatches(X))' "
    "and ID: 'e27f' has constructor arguments in the object store and max_restarts > 0. If the arguments in the "
    "object store go out of scope or are lost, the actor restart will fail. See https://example.com for more details.\n"
)
OTHER = "[2026-11-23 16:18:49,373 E 1 1] core_worker.cc:99: the raylet died\n"


def say(*texts: str) -> int:
    for text in texts:
        os.write(STDERR, text.encode())
    return len(texts)


def test_one_line_is_left_out_and_all_else_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert quietly(say)("before\n", HARMLESS, OTHER, "no end") == 4
    say(HARMLESS)
    assert capfd.readouterr().err == f"before\n{OTHER}no end{HARMLESS}"


def test_stderr_is_put_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        say(HARMLESS, "why\n")
        raise ValueError

    with pytest.raises(ValueError):
        quietly(die)()
    say("after\n")
    assert capfd.readouterr().err == "why\nafter\n"


def test_threads_do_not_put_back_each_others_file(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: quietly(say)(HARMLESS, f"{number}\n"), range(64)))
    say("after\n")
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "after"
    assert sorted(map(int, lines[:-1])) == list(range(64))


def test_a_process_without_stderr() -> None:
    code = "import os; os.close(2); from pipeline.generate.quiet_start import quietly; print(quietly(len)('abc'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n"


def test_ray_data_starts_its_actors_where_it_did() -> None:
    start_actors_quietly()
    first = ActorPoolMapOperator._start_actor
    start_actors_quietly()
    assert ActorPoolMapOperator._start_actor is first
    assert first.__wrapped__.__name__ == "_start_actor"
