"""Reads the JSON files of a model and checks single keys, since the files may come from anywhere. No torch.

A ValueError names the key at fault.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The contents of a JSON file; ValueError names the file if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The contents of a JSON file that holds a mapping; empty if there is no such file."""
    try:
        raw = read_json(path)
    except ValueError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        return {}
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(raw).__name__}")
    return raw


def read_eos(key: str, value: Any) -> int | tuple[int, ...]:
    """The checked value of an EOS key: one token id, or several; () for null, where nothing ends a text."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError(f"{key} is {value!r}, expected one integer or a list of them")
    return ids[0] if len(ids) == 1 else tuple(ids)


def check_flag(key: str, value: Any) -> bool:
    """The value, which must be true or false: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, expected true or false")
    return value


def check_size(key: str, value: Any) -> int:
    """The value, which must be a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, expected a positive integer")
    return value


def check_number(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a number of at least 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{key} is {value!r}, expected a number of at least 0")


def check_mapping(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a mapping or None."""
    if not isinstance(value, dict | None):
        raise ValueError(f"{key} is {value!r}, expected a mapping")


def check_mappings(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a list of mappings or None."""
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise ValueError(f"{key} is {value!r}, expected a list of mappings")


def refuse(raw: Mapping[str, Any], key: str, only: Any) -> None:
    """Raises ValueError if a config.json asks for another value of `key` than `only`."""
    if raw.get(key, only) != only:
        raise ValueError(f"{key} is {raw[key]!r}; only {only!r} is supported")
