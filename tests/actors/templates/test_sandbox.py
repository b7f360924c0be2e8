"""Templates of strangers: the text is that of transformers; a strict one reads rows; Python is out of reach."""

import pickle
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from actors.templates import sandbox
from actors.templates.sandbox import Template, TemplateError, TemplateRaised

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


def ours(source: str, values: Mapping[str, object], *, strict: bool = False) -> str:
    return Template(source, strict=strict).render(values, now=NOW)


def reference(source: str, **values: Any) -> str:
    (text,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **values)
    return str(text)


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
    with pytest.raises(TemplateError, match="'b' is undefined"):
        ours("{{ a }}{{ b }}", {"a": 1}, strict=True)
    with pytest.raises(TemplateError, match="has no attribute 'c'"):
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
    with pytest.raises(TemplateError, match="no attribute 'shout'"):
        ours("{{ name.shout() }}", row, strict=True)


def test_a_row_whose_values_cannot_be_read_fails_alone() -> None:
    made = Template("{{ a }}", strict=True).render_rows([{"a": {(1, 2): 3}}, {"a": "ok"}], now=NOW)
    assert isinstance(made[0], TemplateError)
    assert made[1] == "ok"


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(TemplateError, match=r"^line 2: Encountered unknown tag 'iff'"):
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
    with pytest.raises(TemplateError, match="too deeply"):
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
    with pytest.raises(TemplateError, match="a value that it prints is null"):
        ours(source.replace("X", read), row, strict=True)


@pytest.mark.parametrize(
    "source",
    ["{{ q.upper }}", "{{ q.upper ~ '' }}", "{{ o.items }}", "{{ o.items | string }}", "{{ range }}",
     "{{ q | map('upper') }}", "{{ [1] | reverse }}", "{{ cycler('a') }}", "{{ [q] | map(attribute='title') | join }}"],
)  # fmt: skip
def test_what_is_no_text_is_an_error(source: str) -> None:
    """It would be printed with its address, another one in each process."""
    with pytest.raises(TemplateError, match=r"is no text|is no key here, but a method"):
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


def test_a_text_that_is_too_long_is_stopped_while_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEXT_CHARS", 1000)
    template = Template("{% for i in range(99999) %}{{ text }}{{ 1 // (last - i) }}{% endfor %}", strict=True)
    made = template.render_rows([{"text": "x" * 100, "last": 20}, {"text": "x" * 100, "last": 5}], now=NOW)
    assert str(made[0]) == "makes a text of more than 1000 characters"
    assert "ZeroDivisionError" in str(made[1])


@pytest.mark.timeout(10)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("'a' * 10**9", "a length of more than 33554432"),
        ("(10**9 * text) | length", "a length of more than 33554432"),
        ("([0, 1] * 10**8) | length", "a length of more than 33554432"),
        ("10 ** (10**9) > 1", "an integer of more than 16384 bits"),
        ("(10**4000 * 10**4000) > 1", "an integer of more than 16384 bits"),
    ],
)
def test_what_would_be_too_large_is_not_computed(expression: str, problem: str, strict: bool) -> None:
    started = time.process_time()
    template = Template(f"{{% set x = {expression} %}}{{{{ x }}}}{{{{ {expression} }}}}", strict=strict)
    with pytest.raises(TemplateError, match=problem):
        template.render({"text": "abc"}, now=NOW)
    assert time.process_time() - started < 1


def test_multiplication_and_powers_are_those_of_python() -> None:
    source = "{{ 2**10 * 3 }} {{ 2**-1 }} {{ 1.5 * 2 }} {{ 'ab' * n }} {{ [n] * 2 }} {{ (-1)**n }} {{ 1 ** (10**9) }}"
    assert ours(source, {"n": 3}) == "3072 0.5 3.0 ababab [3, 3] -1 1"


@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in [0] recursive %}{{ loop([i]) }}{% endfor %}",
     "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "{{ " + "-" * 200000 + "1 }}"],
)  # fmt: skip
def test_a_template_that_is_nested_too_deeply_is_an_error(source: str) -> None:
    with pytest.raises(TemplateError, match="nested too deeply"):
        ours(source, {}, strict=True)


def test_threads_render_with_their_own_time() -> None:
    template = pickle.loads(pickle.dumps(Template("{{ a }} {{ strftime_now('%Y') }}", strict=True)))

    def render(year: int) -> list[Any]:
        return template.render_rows([{"a": n} for n in range(200)], now=datetime(year, 1, 1))

    with ThreadPoolExecutor(4) as pool:
        for year, made in zip(range(2000, 2004), pool.map(render, range(2000, 2004)), strict=True):
            assert made == [f"{n} {year}" for n in range(200)]


def test_a_random_choice_is_the_same_for_the_same_row() -> None:
    template = Template("{{ range(1000) | random }}", strict=True)
    rows = [{"id": n} for n in range(5)]
    first, second = (template.render_rows(rows, now=NOW) for _ in range(2))
    assert first == second
    assert len(set(map(str, first))) > 1
