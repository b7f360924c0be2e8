"""Jinja as `transformers.apply_chat_template` has it: its extensions, globals and filters, compiled and rendered.

What strict templates have otherwise: `jinja_sandbox`. It runs in the process of `jinja_child`, which bounds time and
memory; nothing here does. Values come pickled, from our own side of the pipe.
"""

import json
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2 import meta
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.templates.jinja_rows import RowEnvironment, constant_key, null_to_json, with_nulls

ROW = "row"  # all columns, to a strict template
MAX_TEMPLATES = 32  # compiled and kept


class Raised(TemplateError):
    """By the template itself: `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model has written, for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """Without attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be a name of the template's
        own, given = args[0], dict(*args[1:], **values)
        for name in given:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute that begins with an underscore: {name!r}")


def _raise(message: Any) -> NoReturn:
    raise Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    keys = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, default=null_to_json, **keys)  # type: ignore[arg-type]


class Renderer:
    """Compiles and renders; keeps what it has compiled."""

    def __init__(self) -> None:
        self._environments = {is_strict: self._environment(is_strict) for is_strict in (False, True)}
        self._compiled: OrderedDict[tuple[str, bool], jinja2.Template] = OrderedDict()
        self._now = datetime.min

    def _environment(self, is_strict: bool) -> ImmutableSandboxedEnvironment:
        environment = (RowEnvironment if is_strict else ImmutableSandboxedEnvironment)(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: self._now.strftime(format),
            "dict": Dict(),
            "namespace": Namespace,
        }
        return environment

    def template(self, source: str, is_strict: bool) -> jinja2.Template:
        """Compiled, or as it was last time. What Jinja raises."""
        key = (source, is_strict)
        if key not in self._compiled:
            self._compiled[key] = self._environments[is_strict].from_string(source)
            if len(self._compiled) > MAX_TEMPLATES:
                self._compiled.popitem(last=False)
        return self._compiled[key]

    def names(self, source: str, is_strict: bool) -> str:
        """What the template reads and does not make, and the keys of `row` that it reads (null: any); a global of
        Jinja's that it does not call may be a column too."""
        self.template(source, is_strict)
        environment = self._environments[is_strict]
        tree = environment.parse(source)
        called = {id(call.node) for call in tree.find_all(jinja2.nodes.Call)}
        found = meta.find_undeclared_variables(tree)
        for name in tree.find_all(jinja2.nodes.Name):
            if name.ctx == "load" and name.name in environment.globals and id(name) not in called:
                found.add(name.name)
        keys = {id(item.node): constant_key(item) for item in tree.find_all(jinja2.nodes.Getitem)}
        rows = [name for name in tree.find_all(jinja2.nodes.Name) if name.name == ROW and ROW in found]
        uses = {keys.get(id(name)) for name in rows}
        return json.dumps([sorted(found), None if None in uses else sorted(key for key in uses if key is not None)])

    def render(self, source: str, is_strict: bool, now: datetime, binds_row: bool, row: memoryview) -> str:
        """`row`: a pickled mapping; `now`: what `strftime_now` tells. What Jinja raises, and what Python does."""
        self._now, values = now, pickle.loads(row)
        if "random" in source or "lipsum" in source:  # the same row is the same text
            random.seed(repr(values))
        if is_strict:
            values = with_nulls(values)
        if binds_row and ROW not in values:
            values[ROW] = dict(values)
        return self.template(source, is_strict).render(values)
