"""JSON files of a model, read, and keys of them, each checked by itself: they may come from anywhere. No torch.

ValueError names the key at fault. What the keys mean is `config` and `families`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What is in the file; ValueError, which names it, where that is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The same of a file that need not be there, and then is empty; ValueError where it holds no mapping."""
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
    """One token id or a list of them; ValueError otherwise."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not ids or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError(f"{key} is {value!r}, expected one integer or a list of them")
    return ids[0] if len(ids) == 1 else tuple(ids)


def check_flag(key: str, value: Any) -> bool:
    """`value`; ValueError where it is not true or false: "false" would be true."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, expected true or false")
    return value


def check_size(key: str, value: Any) -> int:
    """`value`; ValueError where it is not a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, expected a positive integer")
    return value


def check_number(key: str, value: Any) -> None:
    """ValueError where it is no number from 0 on."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{key} is {value!r}, expected a number from 0 on")


def check_mapping(key: str, value: Any) -> None:
    """ValueError where it is no mapping; None, which says nothing, is fine."""
    if not isinstance(value, dict | None):
        raise ValueError(f"{key} is {value!r}, expected a mapping")


def check_mappings(key: str, value: Any) -> None:
    """ValueError where it is no list of mappings; None, which says nothing, is fine."""
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise ValueError(f"{key} is {value!r}, expected a list of mappings")


def refuse(raw: Mapping[str, Any], key: str, only: Any) -> None:
    """ValueError where a config.json asks for something else than `only`."""
    if raw.get(key, only) != only:
        raise ValueError(f"{key} is {raw[key]!r}; only {only!r} is supported")
