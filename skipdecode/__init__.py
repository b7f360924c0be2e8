"""The method: which sublayers run for which token, and a decoder that obeys. Pure torch, no Ray.

`load` and `generate` are the door of plain Python (`skipdecode.door`); nothing is imported before one of them is asked
for, so that plans and schedules need no torch.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.door import Generated, TextModel, generate, load

__all__ = ["Generated", "TextModel", "generate", "load"]


class _Package(ModuleType):
    """`skipdecode.generate` is a module too, which the import system would put under that name here: whoever imports it
    by its full name gets it, and the name here stays the function's."""

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            from skipdecode import door

            return getattr(door, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "generate" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
