"""What an answer must look like (`sampling.structured_outputs`): a JSON schema, any JSON object, a regular expression,
one of several texts, or a grammar. Compiled in `skipdecode.checkpoint.grammar`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHARS = 256 << 10
"""Of a schema, an expression or a grammar; compiling takes time for each."""
MAX_CHOICES = 4096


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint. Equal ones are compiled once."""

    kind: Kind
    text: str
    """The schema as JSON, the expression, the list of choices as JSON, or the grammar; empty for `json_object`."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """From the object that configurations and vLLM's requests have; null counts as absent, and false where it is no
        schema. ValueError says what is wrong with it, and whether its grammar compiles is another matter."""
        given = {name: own for name, own in value.items() if own is not None and (own is not False or name == "json")}
        if unknown := sorted(set(given) - set(KINDS)):
            raise ValueError(f"{unknown[0]!r} is not known; give one of {', '.join(KINDS)}")
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(KINDS)}, got {', '.join(sorted(given)) or 'none'}")
        ((kind, own),) = given.items()
        text = _text(kind, own)
        if len(text) > MAX_CHARS:
            raise ValueError(f"{kind}: has {len(text)} characters, more than the {MAX_CHARS} that are compiled")
        return cls(next(known for known in KINDS if known == kind), text)


def _text(kind: str, value: object) -> str:
    if kind == "json_object":
        if value is not True:
            raise ValueError(f"json_object: must be true, got {value!r}")
        return ""
    if kind == "choice":
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
            raise ValueError("choice: must be a list of texts that are not empty")
        if len(value) > MAX_CHOICES:
            raise ValueError(f"choice: has {len(value)} texts, more than {MAX_CHOICES}")
        return json.dumps(list(value), ensure_ascii=False)
    if kind == "json":
        return _schema(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind}: must be a text that is not empty")
    return value


def _schema(value: object) -> str:
    """A schema as JSON, in one spelling."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json: must be a JSON schema: {error}") from error
    if not isinstance(value, Mapping | bool):
        raise ValueError(f"json: must be a JSON schema, an object, got {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json: must be a JSON schema: {error}") from error
