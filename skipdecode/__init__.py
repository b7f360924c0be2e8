"""The method: which sublayers run for which token, and a decoder that obeys. Pure torch, no Ray.

`load` and `generate` are the Python API (`skipdecode.api`). They are imported on first use, so that plans and schedules
need no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.api import Generated, TextModel, generate, load

__version__ = "1.0.0"
"""The one place that says it: pyproject.toml, `--version`, `run.json` and `report.json` take it from here."""

__all__ = ["Generated", "TextModel", "generate", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from skipdecode import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
