"""Writes docs/configuration.md from the configuration classes: every key of every verb, its type, default and meaning.

`python docs/generate_configuration.py` writes the page; `--check` fails where it is not current. Classes are found by
name, whatever module they live in; meanings are the docstrings under their fields. Left out: Ray Serve's own keys.
"""

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
OPENING = """<!-- Made by `python docs/generate_configuration.py`; do not edit. -->
# Configuration

```
$ skipdecode generate --config configs/generate.yaml -i prompts.jsonl decode.spedup=3
error: decode.spedup: unknown key; did you mean 'speedup'?
exit code 2: bad configuration or input, nothing was started
```

A configuration is a YAML file (`--config FILE`) with `key=value` overrides after it. Both are optional. Overrides are
dotted keys whose values are YAML: `sampling.stop='["\\n", "END"]'`; the last one wins. `-i`, `-o`, `--resume` and
`--overwrite` are short for keys. An unknown key or a wrong value ends the command with exit code 2, before anything
starts. [Configuration files](configs.md) lists the files in `configs/`.

This page lists every key. Keys of lists are written `runs[].label`.
"""
CONSTRAINTS = {"Ge": (">=", "ge"), "Gt": (">", "gt"), "Le": ("<=", "le"), "Lt": ("<", "lt")}


@dataclass(frozen=True)
class Verb:
    """One part of the page: the verbs that take a configuration, and its class."""

    heading: str
    cls: str
    about: str


VERBS = (
    Verb("generate", "JobConfig", "Also of `doctor`, `verify`, `report`, `retry` and `demo`."),
    Verb("serve", "ServeConfig", "These are `applications[].args` of a Ray Serve file; overrides name them alone."),
    Verb(
        "Ray Serve file", "ServeTree", "As much of Ray Serve's schema as `serve` applies; `serve deploy` has the rest."
    ),
    Verb("finetune and distill", "FinetuneConfig", "`distill` has other defaults, listed below."),
    Verb(
        "calibrate",
        "CalibrateConfig",
        "Which feed-forward blocks a model can do without, or which layers draft best for it.",
    ),
    Verb("evaluate", "EvaluateConfig", "A run against references. `generated` is the first argument."),
    Verb("evaluate --sweep", "SweepConfig", "Models and schedules side by side."),
    Verb(
        "evaluate --tasks", "TasksConfig", "Tasks of the LM Evaluation Harness. `tasks` is the argument of `--tasks`."
    ),
    Verb("bench", "BenchConfig", "The decoder alone."),
    Verb("bench --serve", "ServeBenchConfig", "Servers under load, side by side."),
)


@cache
def find(name: str) -> type[BaseModel]:
    """The configuration class of that name, from the one module of `pipeline` that defines it."""
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^class {name}\b", text, re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found: type[BaseModel] = getattr(importlib.import_module(module), name)
            return found
    raise LookupError(f"no class {name} under pipeline/")


def distill_defaults() -> dict[str, Any]:
    """The defaults of `distill` that differ, as nested mappings."""
    (path,) = (ROOT / "pipeline").rglob("distill.py")
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    defaults: dict[str, Any] = module.DEFAULTS
    return defaults


def type_words(annotation: Any, metadata: list[Any]) -> str:
    """A type in words: `int >= 1 or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [part for item in arguments[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return type_words(arguments[0], inner)
    limits = constraint_words(metadata)
    if origin is Literal:
        return " or ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_words(part, []) for part in sorted(arguments, key=lambda part: part is NoneType))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {type_words(arguments[0], [])}{limits}"
    if origin is tuple:
        return f"[{', '.join(type_words(part, []) for part in arguments)}]{limits}"
    if origin is dict:
        return f"mapping{limits}"
    return {NoneType: "null", str: "text", bool: "true or false"}.get(annotation, annotation.__name__) + limits


def constraint_words(metadata: list[Any]) -> str:
    found = []
    for item in metadata:
        name = type(item).__name__
        if name in CONSTRAINTS:
            sign, attribute = CONSTRAINTS[name]
            found.append(f" {sign} {power_words(getattr(item, attribute))}")
        elif name == "MinLen" and item.min_length:
            found.append(", not empty")
    return "".join(found).replace(" <", ", <") if len(found) > 1 else "".join(found)


def power_words(value: float) -> str:
    return {2**63: "2^63", -(2**63): "-2^63"}.get(int(value), f"{value:g}")


def section(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """The section that a field is, and whether the field is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        if inner := section(part):
            return inner[0], get_origin(annotation) is tuple or inner[1]
    return None


def value_words(value: Any) -> str:
    """A default as it is written in YAML; long lists are cut into several lines of a cell."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, BaseModel):
        return (
            "`{" + ", ".join(f"{key}: {item}" for key, item in value.model_dump(exclude_defaults=True).items()) + "}`"
        )
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], dict):
            return "<br>".join(value_words(item) for item in value)
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}`"
    return f"`{value}`"


def default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return value_words(field.get_default(call_default_factory=True))


def rows(cls: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Every key with its field; a section comes before its own keys, with its class."""
    for name, field in cls.model_fields.items():
        inner = section(field.annotation)
        key = f"{prefix}{name}" + ("[]" if inner and inner[1] else "")
        yield key, field, inner[0] if inner else None


@cache
def meanings(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings under the fields of a class and of those it comes from, each on one line.

    Read from the source here: pydantic would do so in every process that imports the configuration.
    """
    found: dict[str, str] = {}
    for owner in reversed([base for base in cls.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


class Writer:
    """The page as it grows; remembers where the keys of a class were listed first."""

    def __init__(self) -> None:
        self.lines = OPENING.split("\n")
        self.roots: dict[type[BaseModel], str] = {}
        self.seen: dict[tuple[type[BaseModel], str], str] = {}

    def verb(self, verb: Verb) -> None:
        self.lines += [f"## {verb.heading}", "", verb.about, ""]
        cls = find(verb.cls)
        self.roots[cls] = verb.heading
        self.table(cls, "", verb.heading)

    def table(self, cls: type[BaseModel], prefix: str, heading: str) -> None:
        """The plain keys of a section in a table, then its sections, one after the other."""
        about = meanings(cls)
        plain = [(key, field) for key, field, inner in rows(cls, prefix) if inner is None]
        if plain:
            self.lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
            for key, field in plain:
                kind = type_words(field.annotation, field.metadata)
                meaning = about.get(key.removeprefix(prefix), "").replace("|", "\\|")
                self.lines.append(f"| `{key}` | {kind} | {default_words(field)} | {meaning} |")
            self.lines.append("")
        for key, field, inner in rows(cls, prefix):
            if inner is not None:
                self.section(key, field, inner, heading, about.get(key.removeprefix(prefix).removesuffix("[]"), ""))

    def section(self, key: str, field: FieldInfo, cls: type[BaseModel], heading: str, about: str) -> None:
        before = self.roots.get(cls) or self.seen.setdefault((cls, key), heading)
        self.lines += [f"### {key}", ""] if "." not in key else []
        if before != heading:
            self.lines += [f"`{key}`: the keys of [{before}](#{slug(before)}). {about}".rstrip(), ""]
            default = default_words(field)
            if default not in ("null", "required", "`{}`"):
                self.lines += [f"Default: {default}.", ""]
            return
        if about:
            self.lines += [f"`{key}`: {about}", ""]
        self.table(cls, f"{key}.", heading)


def slug(heading: str) -> str:
    """The anchor that the page's builder gives a heading."""
    return "-".join(re.findall(r"[a-z0-9]+", heading.lower()))


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_page() -> str:
    writer = Writer()
    for verb in VERBS:
        writer.verb(verb)
        if verb.cls == "FinetuneConfig":
            writer.lines += ["### Other defaults of distill", "", "| key | default |", "|---|---|"]
            writer.lines += [f"| `{key}` | {value_words(value)} |" for key, value in flat(distill_defaults())] + [""]
    return "\n".join(writer.lines).rstrip("\n") + "\n"


def main() -> int:
    page = make_page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
