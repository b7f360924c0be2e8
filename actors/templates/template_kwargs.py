"""`chat_template_kwargs`: variables of the chat template that a user sets, such as `enable_thinking`."""

from collections.abc import Mapping
from typing import Final

NO_KWARGS: Final[Mapping[str, object]] = {}
OWN_NAMES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names of a template's variables that other parameters set."""
MAX_KWARGS: Final = 64


def check_kwargs(kwargs: Mapping[str, object]) -> None:
    """ValueError for a name that they cannot set."""
    if taken := sorted(OWN_NAMES & kwargs.keys()):
        raise ValueError(f"{taken[0]!r} is set by other parameters, not by chat_template_kwargs")
    if len(kwargs) > MAX_KWARGS:
        raise ValueError(f"has {len(kwargs)} names, more than {MAX_KWARGS}")
