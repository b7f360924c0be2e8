"""How large a function and a module may be, how much of `pipeline/` is typed by `Any`, how far special cases spread.

Sizes are those of all packages and of `benchmarks/`; not those of tests, nor of the C++.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("jobs", "pipeline", "actors", "skipdecode", "benchmarks")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MAX_FUNCTION_LINES, MAX_MODULE_LINES = 60, 300
MAX_ANY = 106  # a fifth of the 531 of 2026-11-23


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_sizes(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{name(path)}: {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= MAX_FUNCTION_LINES, f"{name(path)}: {node.name} has {size} lines"


def count_any(tree: ast.Module) -> int:
    """Uses of `Any` in code and in text annotations; of an alias made from it each use counts, too."""
    aliases = {"Any"} | set(imported_as(tree))
    while more := set(made_of(tree, aliases)) - aliases:
        aliases |= more
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "Any"]
    texts = [found for text in text_annotations(tree) for found in ast.walk(text) if isinstance(found, ast.Name)]
    used = sum(found in aliases for found in [*names, *(text.id for text in texts)]) + len(attributes)
    return used + sum(is_open_mapping(node) for node in ast.walk(tree))


def imported_as(tree: ast.Module) -> Iterator[str]:
    """Other names that `Any` is imported by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            yield from (alias.asname for alias in node.names if alias.name == "Any" and alias.asname)


def made_of(tree: ast.Module, aliases: set[str]) -> Iterator[str]:
    """Names at the top of the module that stand for a type with one of `aliases` in it: `Tree = dict[str, Any]`."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name | ast.Subscript | ast.BinOp) and any(
            isinstance(found, ast.Name) and found.id in aliases for found in ast.walk(value)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def text_annotations(tree: ast.Module) -> Iterator[ast.Expression]:
    """Annotations within quotes, parsed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            annotation = node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = node.returns
        else:
            continue
        for found in ast.walk(annotation) if annotation is not None else ():
            if isinstance(found, ast.Constant) and isinstance(found.value, str) and found.value.isprintable():
                try:
                    yield ast.parse(found.value, mode="eval")
                except SyntaxError:  # a text of Literal
                    continue


def is_open_mapping(node: ast.AST) -> bool:
    """`dict[str, object]` or `Mapping[str, object]`: `Any` by another name."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2):
        return False
    kind = node.value.id if isinstance(node.value, ast.Name) else ""
    value = node.slice.elts[1]
    return kind in ("dict", "Mapping", "MutableMapping") and isinstance(value, ast.Name) and value.id == "object"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("from typing import Any", 0),
        ("import typing\nx: typing.Any = 1", 1),
        ("from typing import Any as A\ndef f(x: A, y: list[A]) -> A: ...", 3),
        ("from typing import Any\nTree = dict[str, Any]\ndef f(x: Tree) -> Tree: ...", 3),
        ("from typing import Any\nx: 'Any' = 1\ny: Literal['any other'] = 1", 1),
        ("def f(x: Mapping[str, object], y: dict[str, int]) -> object: ...", 1),
        ("from typing import Any\nx = f(Any)\ny = x", 1),
    ],
)
def test_any_is_counted_by_whatever_name(code: str, count: int) -> None:
    assert count_any(ast.parse(code)) == count


def test_little_of_the_pipeline_is_any() -> None:
    counts = {name(path): count_any(tree_of(path)) for path in sorted((ROOT / "pipeline").rglob("*.py"))}
    most = sorted(counts.items(), key=lambda item: -item[1])[:10]
    assert sum(counts.values()) <= MAX_ANY, f"{sum(counts.values())}, most in {most}"


SPECIAL_CASES = {
    "swiftkv": (r"swift", 6),
    "int8": (r"(?<!amx[_-])(?<!u)int8", 5),  # not the CPU's flag, not numpy's type
    "feed-forward blocks by row": (r"by_?row|row_?rule|row_?ffns|ffn_?rows|random_?rows|at_?random|saturat|to_rows", 4),
}
"""What names it in code, and how many Python files of `skipdecode/` and `actors/` may."""


@pytest.mark.parametrize("case", SPECIAL_CASES)
def test_special_cases_stay_in_few_files(case: str) -> None:
    """Names and values count, those of imports too; docstrings and comments do not."""
    pattern, most = SPECIAL_CASES[case]
    paths = [path for room in ("skipdecode", "actors") for path in sorted((ROOT / room).rglob("*.py"))]
    named = [name(path) for path in paths if re.search(pattern, code_of(path).lower())]
    assert 0 < len(named) <= most, named


def code_of(path: Path) -> str:
    """Without comments and docstrings, those of attributes too."""

    class Bare(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            return ast.Pass() if isinstance(node.value, ast.Constant) else node

    return ast.unparse(Bare().visit(tree_of(path)))
