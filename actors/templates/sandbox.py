"""Jinja templates of checkpoints and users, rendered in Jinja's sandbox as `apply_chat_template` of transformers does.

The sandbox keeps a template away from Python's internals, and limits the length of a rendered text and the results of
`*` and `**`. Time and memory as such are not limited: a hostile template can burn both, as in transformers and vLLM.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.templates.row_environment import NULL, RowEnvironment, constant_key, null_to_json

ROW = "row"  # the name under which a row template finds all columns
MAX_TEXT_CHARS = 32 * 2**20
MAX_INTEGER_BITS = 2**14  # more than 4300 digits, the longest integer that Python prints
MAX_MESSAGE_CHARS = 300
PLAIN = (str, int, float, bool, bytes, datetime, date, timedelta, time_of_day, Decimal)


class TemplateError(ValueError):
    """A template that cannot be compiled or rendered; the message says why."""


class TemplateRaised(TemplateError):
    """The template called `raise_exception`, and the message is its own."""


class Template:
    """A compiled template. Picklable. Raises TemplateError where the source does not compile.

    A chat template (`strict=False`) behaves as in transformers. A strict one reads the columns of a row by the rules of
    `RowEnvironment`: an undefined variable is an error, for example.
    """

    def __init__(self, source: str, *, strict: bool) -> None:
        self.source, self.strict = source, strict
        try:
            compiled = _compiled(source, strict)
            tree = compiled.environment.parse(source)
        except Exception as error:
            raise _as_template_error(error) from error
        names = meta.find_undeclared_variables(tree)
        called = {id(call.node) for call in tree.find_all(jinja2.nodes.Call)}
        for name in tree.find_all(jinja2.nodes.Name):
            if name.ctx == "load" and name.name in compiled.globals and id(name) not in called:
                names.add(name.name)  # a global of Jinja's that is not called may be a column
        self.names = frozenset(names)
        """The names that it reads and does not define itself: columns of a row, or a chat's `messages`."""
        keys = {id(item.node): constant_key(item) for item in tree.find_all(jinja2.nodes.Getitem)}
        uses = {keys.get(id(n)) for n in tree.find_all(jinja2.nodes.Name) if n.name == ROW and ROW in names}
        self.row_keys = None if None in uses else frozenset(key for key in uses if key is not None)
        """The keys that it reads as `row['...']`; None if they cannot be told from the source."""

    def render(self, values: Mapping[str, object], *, now: datetime) -> str:
        """The text, or raises TemplateError. `now` is the time that `strftime_now` formats."""
        made = self._rendered(values, now, binds_row=False)
        if isinstance(made, TemplateError):
            raise made
        return made

    def render_rows(
        self, rows: Sequence[Mapping[str, object]], *, now: datetime, binds_row: bool = False
    ) -> list[str | TemplateError]:
        """One text or error per row. `binds_row` offers all columns of a row as `row`, too."""
        return [self._rendered(row, now, binds_row) for row in rows]

    def _rendered(self, values: Mapping[str, object], now: datetime, binds_row: bool) -> str | TemplateError:
        try:
            plain: dict[str, Any] = {key: _plain(value, self.strict) for key, value in values.items()}
        except RecursionError:
            return TemplateError("the values are nested too deeply")
        except Exception as error:  # from objects that the rows of a Ray Dataset may hold
            return TemplateError(f"the values cannot be read: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS])
        if binds_row and ROW not in plain:
            plain[ROW] = dict(plain)
        token = _current.set(_Rendering(now, plain))
        try:
            parts, length = [], 0
            for part in _compiled(self.source, self.strict).generate(plain):
                parts.append(part)
                length += len(part)
                if length > MAX_TEXT_CHARS:
                    return TemplateError(f"makes a text of more than {MAX_TEXT_CHARS} characters")
            text = "".join(parts)
            text.encode()  # fails on a lone surrogate
            return text
        except Exception as error:
            return _as_template_error(error)
        finally:
            _current.reset(token)


@dataclass(frozen=True)
class _Rendering:
    now: datetime
    values: Mapping[str, object]


_current: ContextVar[_Rendering] = ContextVar("rendering")
"""What is being rendered in this thread, for the functions that a template calls."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model has written, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Without attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may call its attribute `self`
        own, given = args[0], dict(*args[1:], **values)
        for name in given:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute with an underscore first: {name!r}")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRaised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        default=null_to_json,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_environment
def _random(environment: jinja2.Environment, values: Any) -> Any:
    """A choice that is the same whenever the same row is rendered, so that a resumed run has the same prompts."""
    values = list(values)
    if not values:
        return environment.undefined("No random item, sequence was empty.")
    return random.Random(repr(_current.get().values)).choice(values)


def _multiply(left: Any, right: Any) -> Any:
    for repeated, times in ((left, right), (right, left)):
        if not isinstance(times, int):
            continue
        if isinstance(repeated, str | bytes | list | tuple) and len(repeated) * times > MAX_TEXT_CHARS:
            raise TemplateError(f"repeats something to a length of more than {MAX_TEXT_CHARS}")
        if isinstance(repeated, int):
            _check_bits(repeated.bit_length() + times.bit_length())
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits((left.bit_length() - 1) * right)
    return left**right


def _check_bits(at_least: int) -> None:
    if at_least > MAX_INTEGER_BITS:
        raise TemplateError(f"computes an integer of more than {MAX_INTEGER_BITS} bits")


def _environment(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    environment = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # nothing is computed before it is rendered
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table |= {"*": _multiply, "**": _power}
    environment.filters |= {"tojson": _tojson, "random": _random}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: _current.get().now.strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]  # random text
    return environment


_CHATS, _ROWS = _environment(ImmutableSandboxedEnvironment), _environment(RowEnvironment)


@lru_cache(maxsize=256)
def _compiled(source: str, strict: bool) -> jinja2.Template:
    return (_ROWS if strict else _CHATS).from_string(source)


def _as_template_error(error: Exception) -> TemplateError:
    if isinstance(error, TemplateError):
        return type(error)(str(error)[:MAX_MESSAGE_CHARS])
    if isinstance(error, jinja2.TemplateSyntaxError):
        reason = f"line {error.lineno}: {error.message}"
    elif isinstance(error, UnicodeEncodeError):
        reason = "makes a text that is no valid Unicode"
    elif isinstance(error, MemoryError):
        reason = "needs too much memory"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply, or calls itself too often"
    else:
        reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return TemplateError(reason[:MAX_MESSAGE_CHARS].encode(errors="replace").decode())


def _plain(value: object, strict: bool) -> object:
    """A copy made of types whose methods are harmless: the sandbox does not know those of arrays and other objects.

    To a strict template each null in it is NULL.
    """
    if value is None:
        return NULL if strict else None
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_plain(key, strict): _plain(part, strict) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, strict) for part in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if callable(to_list := getattr(value, "tolist", None)):  # arrays and scalars of numpy
        return _plain(to_list(), strict)
    return str(value)
