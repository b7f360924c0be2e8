"""Templates of strangers: none costs more than it may, and whatever ends their process costs no row.

Time is counted in CPU seconds, for the machine may be busy; memory as the kernel counts it.
"""

import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from actors.templates import jinja_process
from actors.templates.jinja_errors import RendererEnded, TemplateError, TemplateTooCostly
from actors.templates.jinja_sandbox import Template
from tests.support.rendered_templates import NOW, ours

pytestmark = pytest.mark.process
HOSTILE = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ [1] * 10**9 }}",
    "{{ range(99999) | map('string') | map('center', 100000) | join }}",
    "{{ (10 ** 1000000) ** 1000000 }}",
    "{{ 'ab' | replace('', 'c' * 10000000) | replace('c', 'd' * 1000) }}",
    "{% set n = namespace(s='aaaa') %}{% for i in range(100) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(100) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [0] recursive %}{{ loop([i]) }}{% endfor %}",
    "{{ lipsum(n=10000000) }}",
    "{{ range(99999) | map('string') | join('a' * 9999) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9, 0) | list }}",
    "{% for i in range(99999) %}{{ range(99999) | sort | first }}{% endfor %}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{{ " + "-" * 200000 + "1 }}",
    "{{ 1" + " + 1" * 100000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
]  # fmt: skip


PROBE = """
import json, resource, sys, threading
from datetime import datetime
from actors.templates.jinja_errors import TemplateError
from actors.templates.jinja_sandbox import Template

def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def probe(source):
    began = cpu()
    try:
        Template(source, strict=True).render({}, now=datetime(2026, 7, 26))
        error = ""
    except TemplateError as e:
        error = type(e).__name__
    found.append([error, cpu() - began])

found = []
sources = json.load(sys.stdin)
for source in sources:
    thread = threading.Thread(target=probe, args=(source,))
    thread.start()
    thread.join()
peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([found, peak_bytes, threading.active_count()]))
"""


def test_no_template_costs_more_than_two_seconds_and_200_mib() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found, peak_bytes, num_threads = json.loads(done.stdout)
    assert [error for error, _ in found] == ["TemplateTooCostly"] * len(HOSTILE), found
    assert max(seconds for _, seconds in found) < 2
    assert peak_bytes < 200 * 2**20
    assert num_threads == 1


def test_a_costly_row_fails_alone() -> None:
    template = Template("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}", strict=True)
    sizes = [*range(300), 99_999, 7, 99_999, *range(20)]
    made = template.render_rows([{"n": n} for n in sizes], now=NOW)
    for n, text in zip(sizes, made, strict=True):
        assert isinstance(text, TemplateTooCostly) if n == 99_999 else text == str(n)


def test_what_rows_before_it_held_costs_no_row() -> None:
    size, cycle = 2**20, "{% set o = namespace(l=0) %}{% set o.l = [o, 'a' * 20 * n] %}{{ n }}"
    template = Template("{{ (('a' * n) ~ 'b') | length }}", strict=False)
    made = template.render_rows([{"n": n * size} for n in (40, 16, 16)], now=NOW)
    assert isinstance(made[0], TemplateTooCostly)
    assert made[1:] == [str(16 * size + 1)] * 2
    rows = [{"n": size}] * 6
    assert Template(cycle, strict=False).render_rows(rows, now=NOW) == [str(size)] * 6


def test_a_long_document_is_no_costly_row() -> None:
    document = "né " * 5_000_000
    assert ours("{{ a }}.", {"a": document}, strict=True) == document + "."


def cpu_s(run: Callable[[], object]) -> float:
    """Of what `run` has rendered, in this process and in those that render and have ended."""

    def spent() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in usage)

    jinja_process._drop()
    began = spent()
    run()
    jinja_process._drop()
    return spent() - began


LOOP = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
IN_C = "{% set x = (10 ** (100000 * n)) ** (1000 * n) %}{{ n }}"  # cannot be stopped, but by the end of the process


@pytest.mark.slow
@pytest.mark.parametrize(("source", "most_s"), [(LOOP, 15), (IN_C, 18)])
def test_a_template_that_is_too_slow_for_all_rows_soon_costs_little(source: str, most_s: float) -> None:
    """4 s of its own, and 6 ms a row: not 0.37 s a row, which were 148 s."""
    template = Template(source, strict=True)
    made: list[str | TemplateError] = []
    took_s = cpu_s(lambda: made.extend(template.render_rows([{"n": 99_999}] * 400, now=NOW)))
    assert len(made) == 400
    assert all(isinstance(text, TemplateTooCostly) for text in made)
    assert took_s < most_s


def test_a_good_row_after_slow_ones_is_made() -> None:
    template = Template(LOOP, strict=True)
    rows = [{"n": 99_999 if n < 40 or n % 2 else n} for n in range(80)]
    made: list[str | TemplateError] = []
    took_s = cpu_s(lambda: [made.extend(template.render_rows(part, now=NOW)) for part in (rows[:50], rows[50:])])
    assert took_s < 10, "60 rows are slow, and would take 0.37 s each"
    for row, text in zip(rows, made, strict=True):
        assert isinstance(text, TemplateTooCostly) if row["n"] == 99_999 else text == str(row["n"])
    assert "rows before it took too much" in str(made[39])
    assert "rows before it" not in str(made[0])
    fresh = pickle.loads(pickle.dumps(template))
    assert "rows before it" not in str(fresh.render_rows(rows[:1], now=NOW)[0]), "each task begins anew"
    with pytest.raises(TemplateTooCostly, match=r"needs too much time$"):
        template.render(rows[0], now=NOW)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_others_end_again_and_again_is_not_the_fault_of_a_template(how: signal.Signals) -> None:
    template, is_done = Template("{{ a }}", strict=True), threading.Event()

    def end_all() -> None:
        while not is_done.wait(0.001):
            if (child := jinja_process._child) is not None:
                child._process.send_signal(how)

    jinja_process._drop()
    killer = threading.Thread(target=end_all)
    killer.start()
    made = template.render_rows([{"a": 1}, {"a": 2}], now=NOW)
    is_done.set()
    killer.join()
    assert [type(text) for text in made] == [RendererEnded] * 2
    assert how.name in str(made[0])
    assert template.render_rows([{"a": 1}, {"a": 2}], now=NOW) == ["1", "2"]


def test_a_process_that_is_killed_from_outside_costs_no_row() -> None:
    template = Template("{{ a }}", strict=True)
    child = jinja_process._child
    assert child is not None
    os.kill(child._process.pid, signal.SIGKILL)
    assert template.render({"a": 1}, now=NOW) == "1"


def test_threads_and_forks_get_their_own_answers() -> None:
    template = pickle.loads(pickle.dumps(Template("{{ a }}", strict=True)))
    found: list[list[Any]] = []

    def render(start: int) -> None:
        found.append(template.render_rows([{"a": start + n} for n in range(500)], now=NOW))

    threads = [threading.Thread(target=render, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(made[0]) for made in found) == [0, 1000, 2000, 3000]
    assert all([int(text) for text in made] == list(range(int(made[0]), int(made[0]) + 500)) for made in found)
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    process = fork.Process(target=lambda: queue.put(template.render({"a": "fork"}, now=NOW)))
    process.start()
    assert queue.get() == "fork"
    process.join()
    assert template.render({"a": "parent"}, now=NOW) == "parent"


def test_a_random_choice_is_the_same_for_the_same_row() -> None:
    template = Template("{{ range(1000) | random }}", strict=True)
    rows = [{"id": n} for n in range(5)]
    first, second = (template.render_rows(rows, now=NOW) for _ in range(2))
    assert first == second
    assert len(set(map(str, first))) > 1
