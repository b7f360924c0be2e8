"""Templates of strangers: the text is that of transformers, and none costs more than it may.

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
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from actors import jinja_process
from actors.jinja_errors import (
    RendererEnded,
    TemplateError,
    TemplateRaised,
    TemplateSyntaxError,
    TemplateTooCostly,
    UndefinedVariable,
)
from actors.jinja_sandbox import Template

pytestmark = pytest.mark.process
NOW = datetime(2026, 7, 26, 12, 30)
MESSAGES = [{"role": "user", "content": 'a "b" <c> é\n'}, {"role": "assistant", "content": "  d "}]
DIALECT = [
    "{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}: {{ m.content | trim }}\n  {% endif %}\n{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}{{ ns.found }}",
    "{{ dict(a=1).a }}{{ dict.fromkeys(['a', 'b']) }}{{ nothing }}[{{ nothing is defined }}]{{ tools is none }}",
    "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in [1] %}{% continue %}{% endfor %}{{ say(messages[1]) }}",
    "{{ messages[0].content.split('b')[1].upper().strip() }}{{ messages[::-1][0].role }}{{ 'x' * 3 ~ (1 + 1) }}",
    "{{ '%s %d' % ('a', 3) }}{{ '{:>5}'.format('a') }}{{ messages | map(attribute='role') | join(', ') }}",
    "{%- for role, group in messages | groupby('role') %}{{ role }}={{ group | length }};{% endfor -%}  \n\n end \n",
    "{{ add_generation_prompt }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]
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
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__subclasses__']() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ namespace(__init__=1) }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
]


def reference(source: str, **values: Any) -> str:
    (text,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **values)
    return str(text)


def ours(source: str, values: Mapping[str, object], *, strict: bool = False) -> str:
    return Template(source, strict=strict).render(values, now=NOW)


@pytest.mark.parametrize("source", DIALECT)
def test_the_dialect_is_that_of_transformers(source: str) -> None:
    values = {"messages": MESSAGES, "tools": None, "documents": None, "add_generation_prompt": True}
    assert ours(source, values) == reference(source)


@pytest.mark.parametrize(
    "source",
    [
        *(source for source in DIALECT if "nothing" not in source),
        "{% for m in messages %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.previtem is defined }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
        "{% macro f(x) %}{{ caller() }}{{ varargs }}{% endmacro %}{% call f(1, 2) %}z{% endcall %}{{ f.arguments }}",
        "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
        "{% block b %}x{% endblock %}{{ self.b() }}{{ messages.0.role }}{{ messages[0].items() | list }}",
    ],
)
def test_a_strict_template_has_the_same_dialect(source: str) -> None:
    values = {"messages": MESSAGES, "tools": None, "documents": None, "add_generation_prompt": True}
    newline = "\n" if source.endswith("\n") else ""
    assert ours(source, values, strict=True) == ours(source, values) + newline


def test_the_time_is_the_one_that_is_given() -> None:
    assert ours("{{ strftime_now('%d %B %Y, %H:%M') }}", {}) == "26 July 2026, 12:30"


def test_a_strict_template_reads_only_what_is_there() -> None:
    with pytest.raises(UndefinedVariable, match="'b' is undefined"):
        ours("{{ a }}{{ b }}", {"a": 1}, strict=True)
    with pytest.raises(UndefinedVariable, match="has no attribute 'c'"):
        ours("{{ a.c }}", {"a": {"b": 1}}, strict=True)
    assert ours("{{ b | default('none') }}{% if b is defined %}!{% endif %}", {}, strict=True) == "none"


def test_the_text_of_a_row_is_never_a_template() -> None:
    nasty = "{{ 7 * 7 }}{% for i in range(3) %}{# x #}<|im_end|>&lt;"
    assert ours("[{{ a }}]", {"a": nasty}, strict=True) == f"[{nasty}]"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ a }}{% if b.c %}{% endif %}{% for d in e %}{{ d }}{{ loop.index }}{% endfor %}", {"a", "b", "e"}),
        ("{% set a = 1 %}{{ a }}{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{{ f(range(3)) }}", {"y"}),
        ("{{ range }}: {{ range(3) }}{{ dict(a=b) }}", {"range", "b"}),
        ("no variable at all", set()),
    ],
)
def test_the_names_that_a_template_reads(source: str, names: set[str]) -> None:
    assert Template(source, strict=True).names == names


def test_values_are_plain_data() -> None:
    row = {
        "day": date(2026, 7, 26), "price": Decimal("1.50"), "vector": np.arange(3), "number": np.int64(7),
        "pair": ("a", None), "name": type("Name", (str,), {"shout": lambda own: "!"})("x"), "path": Path("a/b"),
    }  # fmt: skip
    source = "{{ day.year }} {{ price }} {{ vector[2] }} {{ number + 1 }} {{ pair }} {{ name }} {{ path }}"
    assert ours(source, row, strict=True) == "2026 1.50 2 8 ['a', None] x a/b"
    with pytest.raises(UndefinedVariable):
        ours("{{ name.shout() }}", row, strict=True)


def test_a_row_whose_values_cannot_be_read_fails_alone() -> None:
    made = Template("{{ a }}", strict=True).render_rows([{"a": {(1, 2): 3}}, {"a": "ok"}], now=NOW)
    assert isinstance(made[0], TemplateError)
    assert made[1] == "ok"


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(TemplateSyntaxError, match=r"^line 2: Encountered unknown tag 'iff'"):
        Template("a\n{% iff %}", strict=True)
    with pytest.raises(TemplateRaised, match=r"^roles must alternate$"):
        ours("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="ZeroDivisionError"):
        ours("{{ 1 / n }}", {"n": 0})
    with pytest.raises(TemplateError, match="no valid Unicode"):
        ours(r"{{ '\ud800' }}", {})
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateTooCostly, match="too deeply"):
        ours("{{ v }}", {"v": value})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ o.items }}{{ o['keys'] }}{{ o.n.values }}", "[1, 2]kv"),
        ("{% for key, value in o.n.items() %}{{ key }}={{ value }};{% endfor %}{{ 'x'.upper() }}", "values=v;X"),
        ("{{ o['items'] | join('+') }}{{ [o, o] | map(attribute='keys') | join }}", "1+2kk"),
        ("{{ o.get('keys') }}{{ o['get']('keys') }}{{ o.update | default('-') }}{{ o.copy is defined }}", "kk-False"),
        ("{{ q is none }}{{ q == none }}{{ q is sameas none }}{{ q is defined }}{{ q in [none] }}", "True" * 5),
        ("{{ q or 'y' }}{{ q | default('z', true) }}{% if not q %}!{% endif %}{{ q is not none }}", "yz!False"),
        ("{{ q | tojson }}{{ {'a': [q, o.q]} | tojson }}", 'null{"a": [null, null]}'),
        ("{{ l }}{{ l | tojson }}", "[1, None][1, null]"),
        ("{{ l | reject('none') | list }}{{ l | select | join }}{{ q | int }}", "[1]10"),
        ("A: {{ o.keys }}\n", "A: k\n"),
        ("{% if o %}\n  {% if o %}\nx\n{% endif %}\n{% endif %}\n\n", "x\n\n"),
    ],
)  # fmt: skip
def test_a_row_is_read_by_its_keys_and_its_nulls_are_no_text(source: str, text: str) -> None:
    row = {"o": {"items": [1, 2], "keys": "k", "n": {"values": "v"}, "q": None}, "q": None, "l": [1, None]}
    assert ours(source, row, strict=True) == text


@pytest.mark.parametrize("read", ["q", "o.q", "l[1]"])
@pytest.mark.parametrize(
    "source",
    ["{{ X }}", "{{ X | trim }}", "{{ X | upper }}", "{{ X | string }}", "{{ 'City: ' ~ X }}", "{{ [X] | join }}",
     "{{ '%s' % X }}", "{{ '{}'.format(X) }}", "{{ X | replace('a', 'b') }}", "{{ X | e }}",
     "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(X) }}", "{% filter upper %}{{ X }}{% endfilter %}"],
)  # fmt: skip
def test_a_null_that_becomes_text_is_an_error(source: str, read: str) -> None:
    row = {"o": {"q": None}, "q": None, "l": [1, None]}
    with pytest.raises(UndefinedVariable, match="a value that it prints is null"):
        ours(source.replace("X", read), row, strict=True)


@pytest.mark.parametrize(
    "source",
    ["{{ q.upper }}", "{{ q.upper ~ '' }}", "{{ o.items }}", "{{ o.items | string }}", "{{ range }}",
     "{{ q | map('upper') }}", "{{ [1] | reverse }}", "{{ cycler('a') }}", "{{ [q] | map(attribute='title') | join }}"],
)  # fmt: skip
def test_what_is_no_text_is_an_error(source: str) -> None:
    """It would be printed with its address, another one in each process."""
    with pytest.raises(UndefinedVariable, match=r"is no text|is no key here, but a method"):
        ours(source, {"q": "x", "o": {}}, strict=True)


def test_a_row_is_there_as_a_whole() -> None:
    template = Template("{{ row['Best Answer'] }}{{ row['a-b'] }}{{ row.c }}{{ d }}", strict=True)
    assert (template.names, template.row_keys) == ({"row", "d"}, {"Best Answer", "a-b", "c"})
    row = {"Best Answer": "x", "a-b": 1, "c": 2, "d": 3}
    assert template.render_rows([row], now=NOW, binds_row=True) == ["x123"]
    own = Template("{{ row }}", strict=True).render_rows([{"row": 5}], now=NOW, binds_row=True)
    assert own == ["5"], "a column of that name stays what it is"
    (error,) = template.render_rows([{"d": 3}], now=NOW, binds_row=True)
    assert "no attribute 'Best Answer'" in str(error)
    for source in ("{{ row[c] }}", "{% for k in row %}{{ k }}{% endfor %}", "{{ row['a'] }}{{ row.get('b') }}"):
        assert Template(source, strict=True).row_keys is None
    for source in ("{% for row in rows %}{{ row[0] }}{% endfor %}", "{{ rows['row'] }}", "row"):
        assert Template(source, strict=True).row_keys == set()


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_of_python_is_in_reach(source: str) -> None:
    with pytest.raises(TemplateError):
        ours(source, {"messages": []}, strict=True)


PROBE = """
import json, resource, sys, threading
from datetime import datetime
from actors.jinja_errors import TemplateError
from actors.jinja_sandbox import Template

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
