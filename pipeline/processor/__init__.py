"""Generation as a stage of a pipeline of one's own: `build_processor`, in a notebook or a script with Ray Data.

The tasks that prepare and finish rows import this package too, and need no torch; so nothing is imported before it is
asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.processor.build import Processor, build_processor

__all__ = ["Processor", "build_processor"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from pipeline.processor import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
