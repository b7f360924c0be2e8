"""Templates of strangers: the text is that of transformers, and none costs more than it may.

Time is counted in CPU seconds, for the machine may be busy; memory as the kernel counts it.
"""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from actors import jinja_sandbox
from actors.jinja_sandbox import (
    Template,
    TemplateError,
    TemplateRaised,
    TemplateSyntaxError,
    TemplateTooCostly,
    UndefinedVariable,
)

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


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_of_python_is_in_reach(source: str) -> None:
    with pytest.raises(TemplateError):
        ours(source, {"messages": []}, strict=True)


PROBE = """
import json, resource, sys, threading
from datetime import datetime
from actors.jinja_sandbox import Template, TemplateError

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


def test_a_long_document_is_no_costly_row() -> None:
    document = "né " * 5_000_000
    assert ours("{{ a }}.", {"a": document}, strict=True) == document + "."


def test_a_process_that_is_killed_from_outside_costs_no_row() -> None:
    template = Template("{{ a }}", strict=True)
    child = jinja_sandbox._child
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
