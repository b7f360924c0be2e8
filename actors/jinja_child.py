"""The process that renders Jinja templates of strangers: a script, started by `jinja_sandbox`, with nothing of ours.

It reads frames from standard input and answers on standard output, one answer per row, until its input ends. A row that
takes more than its share of CPU time ends the process (the default of SIGPROF, so that no operator of C is beyond it);
one that wants more memory fails, for the process may not have more. It may write no file and start no process.

frame:  two uint32 (length of the head, length of the body), the head, the body. The head is a pickled
        `(source, is_strict, now, sizes, is_careful)`; the body is as many pickled mappings, of `sizes` bytes each.
        `sizes` None asks for the names that the template reads, as a JSON list. Careful: each answer is sent at once.
answer: a uint8 (`OK` or what went wrong), a uint32 (length of the text), the text in UTF-8.

The dialect is that of `transformers.apply_chat_template`; what strict templates have otherwise: `jinja_sandbox`.
"""

import json
import pickle
import random
import resource
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2 import meta
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

OK, FAILED, SYNTAX, UNDEFINED, RAISED, COSTLY = range(6)
ROW_S, COMPILE_S = 0.25, 0.5  # of CPU time
SPARE_BYTES = 64 * 2**20  # beyond what the process has when it begins, and what it is given
MAX_TEXT_BYTES = 8 * 2**20  # of a rendered text, or four times what it is made of
MAX_TEMPLATES = 32  # compiled and kept
MAX_MESSAGE_CHARS = 300
FRAME, ANSWER = struct.Struct("<II"), struct.Struct("<BI")


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


def _not_null(value: Any) -> Any:
    """A column without a value must not become the word None of a prompt."""
    if value is None:
        raise UndefinedError("a value that it prints is null")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """Compiles and renders; keeps what it has compiled."""

    def __init__(self) -> None:
        self._environments = {is_strict: self._environment(is_strict) for is_strict in (False, True)}
        self._compiled: OrderedDict[tuple[str, bool], jinja2.Template] = OrderedDict()
        self._now = datetime.min

    def _environment(self, is_strict: bool) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
            undefined=jinja2.StrictUndefined if is_strict else jinja2.Undefined,
            finalize=_not_null if is_strict else None,
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
        key = (source, is_strict)
        if key not in self._compiled:
            self._compiled[key] = self._environments[is_strict].from_string(source)
            if len(self._compiled) > MAX_TEMPLATES:
                self._compiled.popitem(last=False)
        return self._compiled[key]

    def names(self, source: str, is_strict: bool) -> str:
        """What the template reads and does not make; a global of Jinja's that it does not call may be a column too."""
        self.template(source, is_strict)
        environment = self._environments[is_strict]
        tree = environment.parse(source)
        called = {id(call.node) for call in tree.find_all(jinja2.nodes.Call)}
        found = meta.find_undeclared_variables(tree)
        for name in tree.find_all(jinja2.nodes.Name):
            if name.ctx == "load" and name.name in environment.globals and id(name) not in called:
                found.add(name.name)
        return json.dumps(sorted(found))

    def render(self, source: str, is_strict: bool, now: datetime, row: memoryview) -> str:
        self._now, values = now, pickle.loads(row)
        if "random" in source or "lipsum" in source:  # the same row is the same text
            random.seed(repr(values))
        return self.template(source, is_strict).render(values)


def answer(make: Callable[[], str], limit: int) -> tuple[int, bytes]:
    """What `make` gives, or what went wrong, and the text of it."""
    try:
        text = make().encode()
        return (OK, text) if len(text) <= limit else (COSTLY, f"makes a text of {len(text)} bytes".encode())
    except MemoryError:
        return COSTLY, b"needs too much memory"
    except RecursionError:
        return COSTLY, b"calls itself too deeply"
    except Exception as error:
        kind, reason = _reason(error)
        return kind, reason[:MAX_MESSAGE_CHARS].encode(errors="replace")


def _reason(error: Exception) -> tuple[int, str]:
    if isinstance(error, TemplateSyntaxError):
        return SYNTAX, f"line {error.lineno}: {error.message}"
    if isinstance(error, Raised):
        return RAISED, str(error.message)
    if isinstance(error, UnicodeEncodeError):
        return FAILED, "makes a text that is no valid Unicode"
    kind = UNDEFINED if isinstance(error, UndefinedError) else FAILED
    return kind, str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _confine() -> int:
    """Takes from this process what rendering does not need; gives the bytes of addresses that it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the end of the input ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for kind, most in (("CORE", 0), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", 16)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def serve(frames: BinaryIO, answers: BinaryIO) -> None:
    own_bytes, renderer = _confine(), Renderer()

    def reply(seconds: float, make: Callable[[], str], limit: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, text = answer(make, limit)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(ANSWER.pack(kind, len(text)) + text)

    while len(lengths := frames.read(FRAME.size)) == FRAME.size:
        num_head, num_body = FRAME.unpack(lengths)
        most = own_bytes + SPARE_BYTES + 8 * (num_head + num_body)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        head, body = frames.read(num_head), memoryview(frames.read(num_body))
        source, is_strict, now, sizes, is_careful = pickle.loads(head)
        if sizes is None:
            reply(COMPILE_S, partial(renderer.names, source, is_strict), MAX_TEXT_BYTES)
        at = 0
        for size in sizes or ():
            make = partial(renderer.render, source, is_strict, now, body[at : at + size])
            reply(ROW_S, make, max(MAX_TEXT_BYTES, 4 * size))
            at += size
            if is_careful:  # so that whoever waits knows which row ended this process
                answers.flush()
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
