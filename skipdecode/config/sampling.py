"""The sampling parameters of a row. Tokens are chosen from logits in `skipdecode.model.sampler`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from skipdecode.config.model import MAX_LOGPROBS
from skipdecode.config.structured_outputs import StructuredOutputs

MAX_BIAS = 100.0  # OpenAI
MAX_PENALTY = 2.0  # OpenAI: presence and frequency, in both directions
MAX_PATTERN_TOKENS = 1024
MAX_SHOWN_CHARS = 200


@dataclass(frozen=True)
class RepetitionDetection:
    """Ends a row that loops: its last tokens are `min_count` times the same pattern, as vLLM defines it. ValueError
    names a field that is out of range."""

    max_pattern_size: int
    """Tokens of the longest pattern."""
    min_pattern_size: int = 1
    """Tokens of the shortest pattern."""
    min_count: int = 12
    """How many times the pattern must follow itself. Text that is no loop has fewer: four zeros, or the rule of a table
    with eight columns."""

    def __post_init__(self) -> None:
        if not _is_int(self.max_pattern_size, 1, MAX_PATTERN_TOKENS):
            raise ValueError(f"max_pattern_size: must be 1 to {MAX_PATTERN_TOKENS}, got {self.max_pattern_size!r}")
        if not _is_int(self.min_pattern_size, 1, self.max_pattern_size):
            raise ValueError(f"min_pattern_size: must be 1 to max_pattern_size, got {self.min_pattern_size!r}")
        if not _is_int(self.min_count, 2):
            raise ValueError(f"min_count: must be a whole number of at least 2, got {self.min_count!r}")


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
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability, of those that top_k and top_p
    leave (transformers); 0: no limit."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens of the prompt and the answer, and multiplies negative ones
    (transformers)."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token of the answer (OpenAI)."""
    frequency_penalty: float = 0.0
    """Taken from the logit of each token of the answer, once for each time it occurs there (OpenAI)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias): added to logits before anything else (OpenAI)."""
    min_new_tokens: int = 0
    """Tokens before which neither EOS nor `stop_token_ids` may be chosen; a stop string ends a row before, too
    (transformers)."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a row as EOS does, even with `ignore_eos` (vLLM); they have no text."""
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None
    """What the answer must look like, up to its EOS."""

    @classmethod
    def names(cls) -> frozenset[str]:
        return frozenset(field.name for field in fields(cls))

    def with_parameters(self, own: Mapping[str, Any]) -> Self:
        """This sampling with other values, as JSON has them: lists, objects by the text of token ids. ValueError names
        one that is not valid."""
        changed = dict(own)
        for name in ("stop", "stop_token_ids"):
            if name in changed:
                value = changed[name]
                changed[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        if "logit_bias" in changed:
            changed["logit_bias"] = bias_pairs(changed["logit_bias"])
        if isinstance(detection := changed.get("repetition_detection"), Mapping):
            changed["repetition_detection"] = _detection(detection)
        if isinstance(structure := changed.get("structured_outputs"), Mapping):
            try:
                changed["structured_outputs"] = StructuredOutputs.of(structure)
            except ValueError as error:
                raise ValueError(f"structured_outputs: {error}") from error
        return replace(self, **changed)

    @property
    def processes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's (`skipdecode.engine.logits_processor`)."""
        return self.changes_logits or self.structured_outputs is not None

    @property
    def changes_logits(self) -> bool:
        """Whether more than a mask of allowed tokens is between the model's logits and the choice."""
        return self.penalizes or bool(self.logit_bias) or self.min_new_tokens > 0 or self.has_min_p

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_min_p(self) -> bool:
        """Whether `min_p` leaves tokens out; it never leaves out the likeliest."""
        return self.min_p > 0 and self.temperature > 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError for a token id that the model does not have."""
        for name, tokens in (("logit_bias", [t for t, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
            if tokens and max(tokens) >= vocab_size:
                raise ValueError(f"{name}: token {max(tokens)} is not in the vocabulary of {vocab_size} tokens")

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
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", _is_number(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", _is_within(self.presence_penalty, MAX_PENALTY), "-2 to 2"),
            ("frequency_penalty", _is_within(self.frequency_penalty, MAX_PENALTY), "-2 to 2"),
            (
                "logit_bias",
                all(_is_int(token, 0) and _is_within(bias, MAX_BIAS) for token, bias in self.logit_bias),
                "token ids with a bias of -100 to 100",
            ),
            ("min_new_tokens", _is_int(self.min_new_tokens, 0), "a whole number of at least 0"),
            ("stop_token_ids", all(_is_int(token, 0) for token in self.stop_token_ids), "token ids"),
            (
                "repetition_detection",
                isinstance(self.repetition_detection, RepetitionDetection | None),
                "max_pattern_size, min_pattern_size and min_count",
            ),
            (
                "structured_outputs",
                isinstance(self.structured_outputs, StructuredOutputs | None),
                "an object with json, json_object, regex, choice or grammar",
            ),
        ):
            if not is_valid:
                raise ValueError(f"{name}: must be {wanted}, got {_shown(getattr(self, name))}")
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_new_tokens"):
                if getattr(self, name):
                    raise ValueError(f"{name}: excludes structured_outputs, whose grammar says where an answer ends")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )


def bias_pairs(value: object) -> tuple[tuple[int, float], ...]:
    """`Sampling.logit_bias` from a mapping whose keys are token ids or, as in JSON, their text."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias: must be an object of token ids and biases, got {_shown(value)}")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, int) and not (isinstance(key, str) and key.isascii() and key.isdigit()):
            raise ValueError(f"logit_bias: must have token ids as keys, got {_shown(key)}")
        pairs[int(key)] = bias
    return tuple(sorted(pairs.items()))


def _detection(value: Mapping[str, Any]) -> RepetitionDetection:
    try:
        return RepetitionDetection(**value)
    except TypeError as error:
        known = ", ".join(field.name for field in fields(RepetitionDetection))
        raise ValueError(
            f"repetition_detection: needs max_pattern_size, and knows {known}; got {_shown(dict(value))}"
        ) from error
    except ValueError as error:
        raise ValueError(f"repetition_detection.{error}") from error


def _shown(value: object) -> str:
    """A value in an error message, cut short."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def is_unicode(text: str) -> bool:
    """Whether a tokenizer takes it: half of a surrogate pair is no character."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_int(value: object, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    """Whether it fits into a float; NaN and infinity do not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_within(value: object, most: float) -> bool:
    return _is_number(value) and isinstance(value, int | float) and abs(value) <= most
