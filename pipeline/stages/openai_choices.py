"""The parts of an OpenAI batch answer other than its text: log-probabilities, the prompt again (`echo`), calls of
tools, and whether the text has the structure that the line asks for.

What a line requests is in its own sampling parameters (`schema.SAMPLING`). The worker adds what it found to them, and
the task that finishes rows turns both into what the endpoint would send. The answer files contain it unchanged
(`pipeline.generate.openai_batch`).
"""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict

from actors.text.tool_calls import ToolForm, shown_calls, split_calls
from pipeline.openai_format.logprobs import Decode, LogprobsBody, TextOffsets, add_logprob, add_prompt, empty_logprobs
from pipeline.openai_format.parameters import TOOLS, ToolCalls
from pipeline.schema import IS_VALID
from skipdecode.engine.results import TokenLogprobs

if TYPE_CHECKING:
    from skipdecode.engine.results import Completion

ECHO: Final = "echo"
SCORES: Final = "scores"
NOT_SAMPLING: Final = (ECHO, SCORES, IS_VALID, TOOLS)
"""Keys of a row's own parameters that are not fields of `skipdecode.config.sampling.Sampling`."""


class ChoicePart(TypedDict):
    """The part of an entry of `choices` that is made here."""

    text: str | None
    """None beside calls of tools."""
    logprobs: LogprobsBody | None
    is_valid: NotRequired[bool]
    tool_calls: NotRequired[list[dict[str, Any]]]
    finish_reason: NotRequired[str]


def with_findings(own: str, answer: "Completion") -> str:
    """The row's own parameters with the scores of its answer, and whether it has its structure."""
    prompt = answer.prompt_logprobs
    scores = [_listed(answer.logprobs), None if prompt is None else _listed(prompt)]
    return json.dumps(json.loads(own) | {SCORES: scores, IS_VALID: answer.is_valid})


def found_valid(own: str | None) -> bool | None:
    """What `with_findings` says of the structure; None for an answer without one of its own."""
    found: bool | None = json.loads(own).get(IS_VALID) if own is not None and f'"{IS_VALID}"' in own else None
    return found


def _listed(scored: Sequence[TokenLogprobs]) -> list[list[object]]:
    return [[one.logprob, one.top] for one in scored]


def _scored(listed: Sequence[tuple[float, Sequence[tuple[int, float]]]]) -> list[TokenLogprobs]:
    return [TokenLogprobs(logprob, [(token, value) for token, value in top]) for logprob, top in listed]


def choice_of(
    own: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    text: str,
    decode: Decode,
    *,
    id: str = "",
    finish_reason: str = "stop",
    tool_form: ToolForm = "hermes",
) -> str:
    """The JSON of a `ChoicePart`. `own`: from `with_findings`; `tokens`, `text` and `finish_reason`: the answer; `id`:
    of the row."""
    asked = json.loads(own)
    new, old = asked[SCORES]
    front = decode(prompt) if asked.get(ECHO) else ""
    logprobs: LogprobsBody | None = None
    if asked.get("logprobs") is not None:
        logprobs = empty_logprobs()
        if asked.get(ECHO):
            add_prompt(logprobs, prompt, _scored(old), decode)
        offsets = TextOffsets(decode, len(front))
        for token, scored in zip(tokens, _scored(new), strict=True):
            add_logprob(logprobs, token, scored, offsets.next(token), decode)
    part: ChoicePart = {"text": front + text, "logprobs": logprobs}
    if asked[IS_VALID] is not None:
        part[IS_VALID] = asked[IS_VALID]
    calls: ToolCalls | None = asked.get(TOOLS)
    if calls is not None:
        found = split_calls(text, tool_form, calls["names"], is_single=calls["is_single"])
        part["text"] = found.content
        if found.calls:
            part["text"] = found.content or None
            part["tool_calls"] = shown_calls(found.calls, [_call_id(id, number) for number in range(len(found.calls))])
            part["finish_reason"] = "tool_calls" if finish_reason == "stop" else finish_reason
    return json.dumps(part, ensure_ascii=False)


def _call_id(id: str, number: int) -> str:
    """The same whenever the row is decoded again."""
    return f"call_{hashlib.blake2b(f'{id} {number}'.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"
