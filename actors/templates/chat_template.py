"""Renders conversations to prompts by a chat template, as `tokenizer.apply_chat_template` of transformers does.

The rendered text has its special tokens already, so `Tokenizer.encode_rendered` adds none. Two things make older
templates work: content in parts is joined to one text for a template that does not read parts (and a text made one part
for a template that reads only parts), and the role `developer` becomes `system` for a template that does not mention
it. Arguments of earlier calls of tools, which OpenAI's clients send as JSON in a text, become objects, as transformers
asks for. Documents and images are not supported. Imports are few, since every task that reads rows has them.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from actors.templates.sandbox import Template, TemplateError
from actors.templates.template_kwargs import NO_KWARGS

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of the reasoning before an answer, in the order in which transformers looks for them."""
PASSED_ON = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
WITHOUT_EFFECT = frozenset({"type", "id", "weight", "metadata", "annotations", "cache_control"})
"""Keys of messages that say nothing to a prompt: those of training data, of caches and of answers."""
WITHOUT_EFFECT_IN_PARTS = frozenset({"id", "index", "annotations", "cache_control", "prompt_cache_breakpoint"})
PROBE = "qzx7"  # a text that no template contains
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers: the blank shows whether a template strips messages
DEVELOPER = re.compile(r"""(["'])developer\1""")  # as a constant in a template

Message = dict[str, Any]
"""With the keys `role` and `content`, a text or a list of `{type: text, text: ...}`, and optionally `name`,
`tool_call_id` and those of REASONING, which are texts, and `tool_calls`, a list of
`{id, type: function, function: {name, arguments}}` with arguments as an object."""
Tool = Mapping[str, Any]
"""`{type: function, function: {name, description, parameters}}`, as OpenAI and transformers have it."""


class MessagesError(ValueError):
    """`field` is the part at fault, such as `messages[2].role`, and `reason` what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")
        self.field, self.reason = field, reason

    def __reduce__(self) -> tuple[type["MessagesError"], tuple[str, str]]:
        return MessagesError, (self.field, self.reason)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a checkpoint, from `load_chat_template`. Picklable."""

    template: Template
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and so on, for the template to read."""
    takes_parts: bool = False
    """True if it reads content as a list of parts, too."""
    drops_text: bool = False
    """True if it reads content only as a list of parts, and drops a text."""

    def with_parts_detected(self) -> "ChatTemplate":
        """A copy in which `takes_parts` and `drops_text` are detected by rendering the template twice."""
        asked: list[Message] = [{"role": "user", "content": PROBE}]
        in_parts: list[Message] = [{"role": "user", "content": [_text_part(PROBE)]}]
        own = replace(self, takes_parts=True, drops_text=False)
        text, parts = own.render_rows([asked, in_parts], now=datetime.now(UTC))
        # one that prints the list itself, be it as JSON, does not read it
        takes_parts = isinstance(parts, str) and PROBE in parts and not re.search(r"""["']type["']""", parts)
        drops_text = takes_parts and isinstance(text, str) and PROBE not in text
        return replace(self, takes_parts=takes_parts, drops_text=drops_text)

    @property
    def source(self) -> str:
        return self.template.source

    @property
    def reads_tools(self) -> bool:
        """Whether the template looks at the tools that a model may call."""
        return "tools" in self.template.names

    def render(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        continues: bool = False,
        kwargs: Mapping[str, object] = NO_KWARGS,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """The prompt for the assistant's next message; with `continues`, for the rest of the last one. `messages` come
        from `check_messages`, `kwargs` have passed `check_kwargs`. Raises TemplateError."""
        text = self.template.render(self._values(messages, continues, kwargs, tools), now=now)
        return _cut_at_end(text, messages) if continues else text

    def render_rows(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        now: datetime,
        continues: Collection[int] = (),
        kwargs: Sequence[Mapping[str, object]] = (),
        tools: Sequence[Sequence[Tool] | None] = (),
    ) -> list[str | TemplateError]:
        """One prompt or error per conversation; of those in `continues` the last message goes on. `kwargs`, `tools`: of
        each, none by default."""
        values = [
            self._values(
                messages, row in continues, kwargs[row] if kwargs else NO_KWARGS, tools[row] if tools else None
            )
            for row, messages in enumerate(chats)
        ]
        texts = self.template.render_rows(values, now=now)
        for row in continues:
            try:
                texts[row] = _cut_at_end(texts[row], chats[row])
            except TemplateError as error:
                texts[row] = error
        return texts

    def unread(self, kwargs: Collection[str]) -> list[str]:
        """Those of the names that the template never reads, in which case they change nothing."""
        return sorted(set(kwargs) - self.template.names)

    def _values(
        self,
        messages: Sequence[Message],
        continues: bool,
        kwargs: Mapping[str, object] = NO_KWARGS,
        tools: Sequence[Tool] | None = None,
    ) -> dict[str, object]:
        if DEVELOPER.search(self.source) is None:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if continues:
            messages = [*messages[:-1], messages[-1] | {"content": _with_end(messages[-1]["content"], END_MARK)}]
        given: dict[str, object] = {"messages": [self._shaped(m) for m in messages], "tools": tools, "documents": None}
        return given | {"add_generation_prompt": not continues} | dict(self.special_tokens) | dict(kwargs)

    def _shaped(self, message: Message) -> Mapping[str, object]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": [_text_part(content)]} if self.drops_text else message
        return message if self.takes_parts else {**message, "content": text_of(message)}


def text_of(message: Message) -> str:
    """The content of a message as one text, with a line break between its parts."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_end(content: Any, end: str) -> Any:
    if isinstance(content, str):
        return content + end
    return [*content[:-1], _text_part(content[-1]["text"] + end)]


def _cut_at_end(text: str | TemplateError, messages: Sequence[Message]) -> str:
    """A rendered conversation without what its template puts after the last message."""
    if isinstance(text, TemplateError):
        raise text
    content = messages[-1]["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    if END_MARK.strip() not in text or last.strip() not in text:
        raise TemplateError("the template changes the last message, so that it cannot be continued")
    end = text.rindex(END_MARK.strip())
    return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()


def check_messages(value: object) -> list[Message]:
    """The messages of a row or a request, without nulls and what says nothing. Raises MessagesError.

    A message is a mapping with `role` (one of ROLES) and `content` (a text, or a list of `{type: text, text: ...}`),
    and may have a `name` and `reasoning_content`; one of the assistant `tool_calls`, beside which content may be left
    out, and one of a tool `tool_call_id`. Other keys are refused unless they say nothing.
    """
    if not isinstance(value, list | tuple):
        raise MessagesError("messages", f"must be a list of {{role, content}}, got {_kind(value)}")
    if not value:
        raise MessagesError("messages", "is empty; give at least one message")
    return [_message(f"messages[{n}]", message) for n, message in enumerate(value)]


def check_continues(messages: Sequence[Message]) -> None:
    """MessagesError unless the last message is one that an answer can continue."""
    if (role := messages[-1]["role"]) != "assistant":
        reason = f"must be 'assistant' for continue_final_message, got {role!r}"
        raise MessagesError(f"messages[{len(messages) - 1}].role", reason)


def _message(field: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise MessagesError(field, f"must be a mapping with role and content, got {_kind(message)}")
    for key, given in message.items():
        if key not in PASSED_ON and key not in WITHOUT_EFFECT and not _is_nothing(given):
            raise MessagesError(f"{field}.{str(key)[:40]}", f"is not supported; a message has {', '.join(PASSED_ON)}")
    role = message.get("role")
    if role is None:
        raise MessagesError(f"{field}.role", f"is missing; it is one of {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise MessagesError(f"{field}.role", f"must be one of {', '.join(ROLES)}, got {_shown(role)}")
    calls = _tool_calls(f"{field}.tool_calls", role, message.get("tool_calls"))
    content = message.get("content")
    made: Message = {"role": role, "content": _content(f"{field}.content", "" if calls and not content else content)}
    if calls:
        made["tool_calls"] = calls
    for key in ("name", "tool_call_id", *REASONING):
        if (text := message.get(key)) is not None:
            if not isinstance(text, str):
                raise MessagesError(f"{field}.{key}", f"must be a text, got {_kind(text)}")
            made[key] = text
    reasoning = next((made[key] for key in REASONING if key in made), None)
    # as in transformers: templates read it by one of these names
    return made if reasoning is None else {"thinking": reasoning} | made | {"reasoning_content": reasoning}


def _tool_calls(field: str, role: str, given: object) -> list[dict[str, Any]]:
    """The calls of a message, as transformers wants them: with arguments that are objects."""
    if _is_nothing(given):
        return []
    if role != "assistant":
        raise MessagesError(field, f"belong to messages of the assistant, not to one with the role {role!r}")
    if not isinstance(given, list | tuple):
        raise MessagesError(field, f"must be a list, got {_kind(given)}")
    return [_tool_call(f"{field}[{n}]", call) for n, call in enumerate(given)]


def _tool_call(field: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise MessagesError(field, "must be a mapping with id, type and function: {name, arguments}")
    if (kind := call.get("type")) not in (None, "function"):
        raise MessagesError(f"{field}.type", f"must be 'function', got {_shown(kind)}")
    if not isinstance(name := function.get("name"), str):
        raise MessagesError(f"{field}.function.name", f"must be a text, got {_kind(name)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise MessagesError(f"{field}.function.arguments", f"must be a JSON object: {error}") from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise MessagesError(f"{field}.function.arguments", f"must be a JSON object, got {_kind(arguments)}")
    if not isinstance(id := call.get("id"), str | None):
        raise MessagesError(f"{field}.id", f"must be a text, got {_kind(id)}")
    own = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return own if id is None else {"id": id, **own}


def _is_nothing(value: object) -> bool:
    """Whether a value is null, false or empty."""
    return value is None or value is False or (isinstance(value, str | Mapping | list | tuple) and not value)


def _content(field: str, content: object) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content is None:
        raise MessagesError(field, "is missing; it is a text, or a list of text parts")
    if not isinstance(content, list | tuple):
        raise MessagesError(field, f"must be a text or a list of text parts, got {_kind(content)}")
    if not content:
        raise MessagesError(field, "is empty; give at least one part")
    return [_text_part(_part(f"{field}[{n}]", part)) for n, part in enumerate(content)]


def _part(field: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise MessagesError(field, f"must be a mapping with type and text, got {_kind(part)}")
    if part.get("type") != "text":
        raise MessagesError(f"{field}.type", f"must be 'text', got {_shown(part.get('type'))}")
    if not isinstance(text := part.get("text"), str):
        raise MessagesError(f"{field}.text", f"must be a text, got {_kind(text)}")
    for key, given in part.items():
        if key not in ("type", "text") and key not in WITHOUT_EFFECT_IN_PARTS and not _is_nothing(given):
            raise MessagesError(f"{field}.{str(key)[:40]}", "is not supported; a part has type and text")
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else _kind(value)
