"""Tool calls in generated text: parsing them, and the grammar that forces them.

Two forms are known, by the names of vLLM's parsers. `hermes` (Hermes, Qwen, SmolLM3): `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`, as often as the model likes and after text. `llama3_json` (Llama 3): an answer that is
`{"name": ..., "parameters": {...}}` and nothing else, or several of them with `;` in between or in a list. What is no
call of a tool that the request has stays text. No torch.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from actors.text.text_stream import overlap

ToolForm = Literal["hermes", "llama3_json"]
START, END = "<tool_call>", "</tool_call>"
ARGUMENTS: Final = {"hermes": "arguments", "llama3_json": "parameters"}
"""What models call the arguments in each form."""
WHITESPACE: Final = "[ ]?"
"""Between the parts of forced arguments, as in other structured outputs."""
BETWEEN: Final = " \t\r\n;"
"""Between calls that are JSON alone."""
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


class ParsedAnswer(NamedTuple):
    """An answer, or the new part of one."""

    content: str
    calls: list[ToolCall]


def tool_form(template: str) -> ToolForm:
    """The form that a chat template asks for; ValueError for one that is not known."""
    if "<function=" in template or "[TOOL_CALLS]" in template:
        raise ValueError("its calls of tools are neither <tool_call> with JSON nor JSON alone, and are not parsed")
    return "hermes" if START in template else "llama3_json"


class ToolCallStream:
    """Tells calls from text that arrives in pieces."""

    def __init__(self, form: ToolForm, names: Collection[str], *, is_single: bool = False) -> None:
        """`names`: of the tools. `is_single`: later calls are dropped (`parallel_tool_calls: false`)."""
        self._form, self._names, self._is_single = form, frozenset(names), is_single
        self._held = ""
        self._is_text = False
        """`llama3_json`: the answer has begun with something else, and has no calls."""
        self.num_calls = 0

    def push(self, text: str) -> ParsedAnswer:
        self._held += text
        return self._push_hermes() if self._form == "hermes" else self._push_llama3_json()

    def finish(self) -> ParsedAnswer:
        """The rest, at the end of the text."""
        held, self._held = self._held, ""
        if self._form == "llama3_json":
            found = None if self._is_text else _calls_of(held, self._names)
            return ParsedAnswer(held, []) if found is None else ParsedAnswer("", self._counted(found))
        before, mark, body = held.partition(START)
        if mark and (call := _call_of(body, self._names)):  # a call may end an answer without its tag
            return ParsedAnswer(before.rstrip(), self._counted([call]))
        is_blank_after_calls = self.num_calls > 0 and not held.strip()  # line breaks after calls say nothing
        return ParsedAnswer("" if is_blank_after_calls else held, [])

    def _push_hermes(self) -> ParsedAnswer:
        content, calls = "", list[ToolCall]()
        while True:
            before, mark, body = self._held.partition(START)
            if not mark:
                certain = before[: len(before) - overlap(before, START)].rstrip()
                self._held = before[len(certain) :]
                return ParsedAnswer(content + certain, calls)
            body, mark, rest = body.partition(END)
            if not mark:
                certain = before.rstrip()
                self._held = self._held[len(certain) :]
                return ParsedAnswer(content + certain, calls)
            if call := _call_of(body, self._names):
                content += before.rstrip()
                calls += self._counted([call])
            else:
                content += before + START + body + END
            self._held = rest

    def _push_llama3_json(self) -> ParsedAnswer:
        if not self._is_text and (start := self._held.lstrip()):
            self._is_text = start[0] not in "{["
        if not self._is_text:
            return ParsedAnswer("", [])
        text, self._held = self._held, ""
        return ParsedAnswer(text, [])

    def _counted(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._is_single:
            calls = calls[: 1 - self.num_calls]
        self.num_calls += len(calls)
        return calls


def split_calls(text: str, form: ToolForm, names: Collection[str], *, is_single: bool = False) -> ParsedAnswer:
    """A whole answer."""
    stream = ToolCallStream(form, names, is_single=is_single)
    first, last = stream.push(text), stream.finish()
    return ParsedAnswer(first.content + last.content, first.calls + last.calls)


def _call_of(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        return _call(json.loads(text), names)
    except (ValueError, RecursionError):
        return None


def _calls_of(text: str, names: Collection[str]) -> list[ToolCall] | None:
    """The calls of an answer that is nothing else."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text.rstrip(BETWEEN)):
            at += len(text[at:]) - len(text[at:].lstrip(BETWEEN))
            value, at = decoder.raw_decode(text, at)
            found += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return None
    calls = [_call(value, names) for value in found]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as in OpenAI's messages
        arguments = json.loads(arguments)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def tool_grammar(form: ToolForm, schemas: Mapping[str, Mapping[str, Any] | None], *, is_single: bool) -> str:
    """The Lark grammar of an answer that is one or more calls of these tools, by name, with arguments of their
    schemas."""
    rules, names = [], []
    for number, (name, schema) in enumerate(schemas.items()):
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{ARGUMENTS[form]}": '
        front, end = (f"{START}\n{begin}", f"}}\n{END}") if form == "hermes" else (begin, "}")
        names.append(f"call_{number}")
        own = {**(NO_PARAMETERS if schema is None else schema), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f"call_{number}: {_quoted(front)} arguments_{number} {_quoted(end)}")
        rules.append(f"arguments_{number}: %json {json.dumps(own)}")
    more = "" if is_single or form == "llama3_json" else ' ("\\n" call)*'
    return "\n".join([f"start: call{more}", f"call: {' | '.join(names)}", *rules])


def _quoted(text: str) -> str:
    """A string of Lark, which is one of JSON."""
    return json.dumps(text, ensure_ascii=False)


def shown_calls(calls: Sequence[ToolCall], ids: Sequence[str], *, first: int | None = None) -> list[dict[str, Any]]:
    """`tool_calls` as OpenAI has them; in a delta with an `index` from `first` on."""
    return [
        ({} if first is None else {"index": first + number})
        | {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, (call, id) in enumerate(zip(calls, ids, strict=True))
    ]
