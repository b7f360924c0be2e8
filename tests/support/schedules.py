"""The schedules that tests decode with, listed once. A new method needs one line in `EXAMPLES`."""

from collections.abc import Callable
from typing import Any

from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import Schedule

L = 6
"""Layers of the tiny models."""

EXAMPLES: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda num_layers: {},
    "skipdecode": lambda num_layers: {
        "max_layers": num_layers - 1,
        "min_layers": max(2, num_layers // 3),
        "horizon": 9,
    },
    "early_exit": lambda num_layers: {"max_layers": num_layers, "min_layers": 1, "horizon": 5},
    "unified": lambda num_layers: {"layers": max(2, num_layers - 2)},
    "layers": lambda num_layers: {"layers": [1, 2, num_layers - 1]},
}
"""For each value of `decode.method`, its keys for a model of so many layers."""


def decodes(num_layers: int = L) -> dict[str, dict[str, Any]]:
    """A `decode:` mapping for every method."""
    return {name: {"method": name, **keys(num_layers)} for name, keys in EXAMPLES.items()}


def schedules(num_layers: int = L) -> dict[str, Schedule]:
    """A schedule of every method."""
    return {
        name: make_schedule(decode, num_layers=num_layers, max_new_tokens=16)
        for name, decode in decodes(num_layers).items()
    }


SCHEDULES = schedules()
"""A schedule of every method for the tiny models."""
