"""How many examples Hypothesis tries: all of them in the long lane, a quarter of them in the short one."""

from hypothesis import settings

LONG = settings.get_profile("thorough").max_examples


def examples(number: int) -> int:
    """`number` under `--hypothesis-profile=thorough`, a quarter of it otherwise, and at least five."""
    return number if settings.default.max_examples == LONG else max(5, number // 4)
