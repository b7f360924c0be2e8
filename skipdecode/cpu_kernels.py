"""Old names of what `skipdecode.backends` says, until all callers have moved there."""

from skipdecode.backends.choice import choose
from skipdecode.backends.cpu import MAX_INT8_INPUTS as MAX_INT8_INPUTS


def status() -> str:
    """`compiled`, or why torch's operators are used instead."""
    chosen = choose()
    return "compiled" if chosen.name != "torch" else chosen.reason


def has_bfloat16() -> bool:
    """Whether `dtype: auto` is bfloat16."""
    return choose().dtype == "bfloat16"


def has_tiles() -> bool:
    """Whether weights may be int8."""
    return choose().no_int8 is None


def why_no_tiles() -> str:
    return choose().no_int8 or ""
