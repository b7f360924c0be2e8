"""The rules for templates over the columns of a row, beyond those that transformers has for chats.

A null that would become text is an error, and so is printing what has no text. A key of a mapping comes before its
method. The newline that ends a template belongs to the prompt.
"""

import types
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.visitor
from jinja2.exceptions import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

METHODS = types.BuiltinMethodType | types.MethodType | types.FunctionType


class Null:
    """A null in a row: false, equal to None, and never text, so that no prompt reads "None"."""

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    def __hash__(self) -> int:
        return hash(None)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:  # within a list that is printed
        return "None"

    def __str__(self) -> str:
        raise UndefinedError("a value that it prints is null")

    def __format__(self, spec: str) -> str:
        return str(self)


NULL = Null()


def null_to_json(value: object) -> None:
    """The `default` of `json.dumps`."""
    if not isinstance(value, Null):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def constant_key(node: jinja2.nodes.Node) -> str | None:
    """The `key` of `x['key']`; None for any other node."""
    if not isinstance(node, jinja2.nodes.Getitem) or not isinstance(node.arg, jinja2.nodes.Const):
        return None
    return node.arg.value if isinstance(node.arg.value, str) else None


class RowEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of templates over the columns of a row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, undefined=jinja2.StrictUndefined, finalize=_printable, keep_trailing_newline=True)
        self.tests["none"] = _is_none
        self.tests["sameas"] = lambda a, b: a is b or (_is_none(a) and _is_none(b))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = cast("jinja2.nodes.Template", _KeysFirst().visit(super()._parse(source, name, filename)))
        tree.set_environment(self)
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        if isinstance(value, METHODS):
            return self.undefined(f"{argument!r} is no key here, but a method: call it, as in {argument}()")
        return value


class _KeysFirst(jinja2.visitor.NodeTransformer):
    """`order.items` is the key of a mapping, if there is one, as `order['items']` is; `order.items()` is the method."""

    def visit_Getattr(self, node: jinja2.nodes.Getattr) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return jinja2.nodes.Getitem(node.node, jinja2.nodes.Const(node.attr), "load").set_lineno(node.lineno)

    def visit_Call(self, node: jinja2.nodes.Call) -> jinja2.nodes.Node:
        self.generic_visit(node)
        called = node.node
        if isinstance(called, jinja2.nodes.Getitem) and (key := constant_key(called)) is not None:
            node.node = jinja2.nodes.Getattr(called.node, key, "load")
            node.node.set_lineno(node.lineno)
        return node


def _printable(value: Any) -> Any:
    """The value if it may be printed. Not a null, nor an object of which only its address could be printed."""
    kind = type(value)
    if value is None:
        return str(NULL)
    if kind is str or isinstance(value, jinja2.Undefined):
        return value
    has_text = any(getattr(kind, name) is not getattr(object, name) for name in ("__str__", "__repr__"))
    if callable(value) or isinstance(value, types.GeneratorType) or not has_text:
        raise UndefinedError(f"a value that it prints is no text, but a {kind.__name__}")
    return value


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, Null)
