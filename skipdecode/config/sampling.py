"""The sampling parameters of a row. Tokens are chosen from logits in `skipdecode.model.sampler`."""

import sys
from dataclasses import dataclass

from skipdecode.config.model import MAX_LOGPROBS


@dataclass(frozen=True)
class Sampling:
    """How a row is continued, and what is returned beside its tokens. ValueError names a field that is out of range."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens are returned with the log-probability of each new token; None: neither is."""
    prompt_logprobs: bool = False
    """Also score the prompt's tokens, at full depth. With `max_new_tokens` 0 the scores are the whole answer."""

    def __post_init__(self) -> None:
        is_text = all(isinstance(text, str) and text and is_unicode(text) for text in self.stop)
        is_count = self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS)
        for name, is_valid, wanted in (
            ("max_new_tokens", _is_int(self.max_new_tokens, 0), "a whole number of at least 0"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and up to 1"),
            ("top_k", _is_int(self.top_k, 0), "a whole number of at least 0"),
            ("seed", _is_int(self.seed, -(2**63)), "a whole number of 64 bits"),
            ("stop", is_text, "texts that are not empty"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("logprobs", is_count, f"0 to {MAX_LOGPROBS}, or None"),
        ):
            if not is_valid:
                raise ValueError(f"{name}: must be {wanted}, got {getattr(self, name)!r}")


def is_unicode(text: str) -> bool:
    """Whether a tokenizer takes it: half of a surrogate pair is no character."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_int(value: object, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    """Whether it fits into a float; NaN and infinity do not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
