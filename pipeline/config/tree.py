"""Reads configurations: YAML and `key=value` overrides become a nested dict, and that a frozen, checked tree.

An unknown key, a wrong type or an impossible combination is a `ConfigError` that names the dotted key. The keys
themselves are declared elsewhere: those of a run in `pipeline.config.job`, those of other verbs beside the verb.
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from pipeline.formatting import Json

TEXT_KEYS = frozenset({"input.template", "input.system"})
"""Keys whose text may look like a YAML mapping (`{{ name }}`); on the command line it needs no YAML quotes."""


class ConfigError(ValueError):
    """Bad configuration or input, found before anything was started: exit code 2.

    `key` is the dotted key at fault, or empty; `message` says what is wrong with it and names the remedy. `problems`
    are pairs of both. If there are several, `key` is empty and `message` has a line for each.
    """

    exit_code = 2

    def __init__(self, key: str, message: str, problems: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(_line(key, message))
        self.key, self.message = key, message
        self.problems = tuple(problems) or ((key, message),)

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, tuple[tuple[str, str], ...]]]:
        return type(self), (self.key, self.message, self.problems)

    @classmethod
    def of(cls, problems: Iterable[tuple[str, str]]) -> Self:
        """One error for one or several problems (key, message); repeated ones count once."""
        found = tuple(dict.fromkeys(problems))
        return cls(*found[0]) if len(found) == 1 else cls("", "\n".join(_line(*each) for each in found), found)

    @classmethod
    def parse(cls, text: object) -> Self:
        """The error for a ValueError from a package below, whose text is `key: message` or just the message."""
        key, colon, message = str(text).partition(": ")
        is_key = colon and "\n" not in message and re.fullmatch(r"[a-z_][\w.\-]*", key)
        return cls(key, message) if is_key else cls("", str(text))

    def renamed(self, old: str, new: str) -> Self:
        """The same error for a verb in which the key `old`, or the section, is called `new`."""
        return self.of((_renamed(key, old, new), message) for key, message in self.problems)


def _line(key: str, message: str) -> str:
    return f"{key}: {message}" if key else message


def _renamed(key: str, old: str, new: str) -> str:
    return new + key[len(old) :] if key == old or key.startswith(f"{old}.") else key


class Section(BaseModel):
    """Base class of every section: unknown keys are errors, and values never change after loading.

    Validators are built at first use, since Ray tasks import the classes without validating anything.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuses what pydantic would take for 0 or 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _value_types(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any, object}:
                raise ValueError("expected a number, not true or false")
        return value


def _value_types(annotation: object) -> set[object]:
    """The types that a value with this annotation may have, unions taken apart."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ()
    return {annotation} if not parts else set[object]().union(*map(_value_types, parts))


SectionT = TypeVar("SectionT", bound=Section)


def read_tree(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Json]:
    """The nested dict that a YAML file and dotted overrides make, not yet validated."""
    tree = read_file(path) if path is not None else {}
    apply_overrides(tree, [read_override(override) for override in overrides])
    return tree


def read_file(path: str | Path) -> dict[str, Json]:
    """The mapping in a YAML file; empty for an empty file."""
    try:
        tree = yaml.safe_load(Path(path).read_bytes())  # as bytes: a byte order mark says what they are
    except OSError as error:
        raise ConfigError("", f"--config {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError("", f"--config {path}: not valid YAML in UTF-8: {error}") from error
    if not isinstance(tree := tree or {}, dict):
        raise ConfigError("", f"--config {path}: expected a mapping of sections, got {type(tree).__name__}")
    return tree


def read_override(override: str) -> tuple[str, Json]:
    """The dotted key and the value of `key=value`; the value is YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        hint = "; a file is given by an option, e.g. -i FILE" if os.path.exists(override) else ""
        raise ConfigError("", f"override {override!r}: expected key=value, e.g. decode.speedup=3{hint}")
    is_text = key in TEXT_KEYS or key.startswith("input.templates.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if is_text:
            return key, text
        raise ConfigError(key, f"not a YAML value: {text!r}") from error
    return key, text if is_text and not isinstance(value, str | None) else value


def schedule_keys() -> frozenset[str]:
    """The keys of `decode` that belong to its `method`, and are dropped if the command line gives another method."""
    from skipdecode.schedules.from_config import METHODS  # here: tasks that read rows need no schedules

    return frozenset(key for method in METHODS.values() for key in method.keys)


def apply_overrides(tree: dict[str, Json], overrides: Sequence[tuple[str, Json]]) -> None:
    """Sets dotted keys of `tree`, in order.

    An override of `decode.method` first removes the keys of the method that the file named, so that
    `decode.method=full` is enough. Keys given as overrides stay, whatever their order.
    """
    decode = tree.get("decode")
    if isinstance(decode, dict) and any(key == "decode.method" for key, _ in overrides):
        own = schedule_keys()
        tree["decode"] = {key: value for key, value in decode.items() if key not in own}
    for key, value in overrides:
        set_key(tree, key, value)


def set_key(tree: dict[str, Json], dotted: str, value: Json) -> None:
    """Sets a dotted key of a nested dict and creates sections that are missing on the way."""
    *parents, last = dotted.split(".")
    for name in parents:
        if tree.get(name) is None:
            tree[name] = {}
        section = tree[name]
        if not isinstance(section, dict):
            raise ConfigError(dotted, f"{name} is a value, not a section")
        tree = section
    tree[last] = value


def section_of(tree: dict[str, Json], name: str) -> dict[str, Json]:
    """The section `name` of a tree that is not validated yet; empty if it is missing."""
    section = tree.get(name)
    if not isinstance(section, dict | None):
        raise ConfigError(name, f"expected a section, got {section!r}")
    return section or {}


def build_config(cls: type[SectionT], tree: dict[str, Json]) -> SectionT:
    """Validates `tree` as a `cls`; raises ConfigError with one line per problem, each with its dotted key."""
    tree = {name: {} if value is None and _is_section(cls, name) else value for name, value in tree.items()}
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        raise ConfigError.of(_describe(cls, problem) for problem in error.errors()) from error


def _describe(cls: type[Section], problem: ErrorDetails) -> tuple[str, str]:
    """The dotted key at fault and what is wrong with it."""
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return ".".join(location), f"unknown key; {_suggestion(cls, location)}"
    # A union reports every branch it tried; the key is the part of the path that is a field or an index.
    is_name = [part.isidentifier() and part.islower() and part not in _TYPE_TAGS for part in location]
    is_index = [part.isdigit() and named for part, named in zip(location, [*is_name[1:], False], strict=True)]
    key = ".".join(part for part, *keep in zip(location, is_name, is_index, strict=True) if any(keep))
    message = problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")  # as YAML calls it
    return key, f"{message} (got {problem['input']!r})"


def _suggestion(cls: type[Section], location: Sequence[str]) -> str:
    """What to write for an unknown key: a similar key of the same section or of another one, or all known keys."""
    names, elsewhere = _field_names(cls, location[:-1]), _leaf_keys(cls)
    of_leaf = {dotted.rpartition(".")[2]: dotted for dotted in reversed(elsewhere)}  # the first of a name
    if close := difflib.get_close_matches(location[-1], names, n=1):
        return f"did you mean {close[0]!r}?"
    if close := difflib.get_close_matches(location[-1], of_leaf, n=1, cutoff=0.75):
        return f"did you mean {of_leaf[close[0]]!r}?"
    return f"known keys: {', '.join(names)}"


def _leaf_keys(cls: type[Section]) -> list[str]:
    """The dotted names of all keys that hold values; those inside lists of sections are left out."""
    found = list[str]()
    for name, field in cls.model_fields.items():
        inside = field.annotation
        if isinstance(inside, type) and issubclass(inside, Section):
            found += [f"{name}.{key}" for key in _leaf_keys(inside)]
        elif _section_in(inside) is None:
            found.append(name)
    return found


def _is_section(cls: type[Section], name: str) -> bool:
    annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
    return isinstance(annotation, type) and issubclass(annotation, Section)


_TYPE_TAGS = frozenset({"bool", "int", "float", "str", "tuple", "constrained", "literal"})


def _field_names(cls: type[Section], location: Sequence[str]) -> list[str]:
    for name in location:
        if name.isdigit():  # an item of a list of sections
            continue
        section = _section_in(cls.model_fields[name].annotation) if name in cls.model_fields else None
        if section is None:
            return []
        cls = section
    return list(cls.model_fields)


def _section_in(annotation: object) -> type[Section] | None:
    """The section that a field is, or whose list it holds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
