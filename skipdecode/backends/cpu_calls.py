"""The functions of the compiled library of `cpp/`, by ctypes."""

from functools import cache
from typing import Any, Literal

import torch

from skipdecode.backends import build, choice
from skipdecode.backends.heads import INT, INT64, POINTER

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Kind = torch.dtype | Literal["int8"]
"""Of a function: its type, or that of the weights beside it."""
ARGUMENTS = {
    "step": [POINTER, INT64, INT64, POINTER, INT, INT, *[POINTER] * 8, INT],
    "prompt": [POINTER, INT64, *[POINTER] * 4, INT, INT, *[POINTER] * 2, INT64, POINTER, INT],
    "store": [*[POINTER] * 2, INT64, *[POINTER] * 2, INT64, *[POINTER] * 7, INT],
    "attend": [POINTER, INT64, *[POINTER] * 3, INT64, *[POINTER] * 2, INT64, *[POINTER] * 5, INT],
    "argmax": [INT64, INT64, POINTER, POINTER, INT],
    "draw": [INT64, INT64, *[POINTER] * 6, INT],
    "pack": [INT64, INT64, POINTER, POINTER],
    "linear": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT, POINTER, POINTER, INT],
    "linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 4, INT, POINTER, POINTER, INT],
    "argmax_linear": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT],
    "argmax_linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 4, INT],
}


def function(name: str, kind: Kind | None = None) -> Any:
    """A function of the back end's library with its argument types; that of `kind` where there are several."""
    return _function(choice.choose().name, name, kind)


@cache
def _function(backend: str, name: str, kind: Kind | None) -> Any:
    library = build.load(backend, choice.cpu_flags())
    whole = name if kind is None else f"{name}_{NAMES[kind] if isinstance(kind, torch.dtype) else kind}"
    found = getattr(library, whole)
    found.argtypes, found.restype = ARGUMENTS.get(whole) or ARGUMENTS[name], None
    return found
