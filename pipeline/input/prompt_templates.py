"""Renders prompts: columns by the input's templates, and conversations by the chat template.

The driver makes one `Prompter`, which travels to the tasks that read. What rows hold is data, never a template.
Left out: the sandbox that renders (`actors.templates.sandbox`), and where a checkpoint has its chat template
(`actors.templates.chat_template`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Protocol

from actors.templates.chat_template import (
    ChatTemplate,
    Message,
    MessagesError,
    Tool,
    check_continues,
    check_messages,
)
from actors.templates.sandbox import Template, TemplateError
from actors.templates.template_kwargs import NO_KWARGS
from actors.text.tool_calls import ToolForm, tool_form
from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.line_reader import InputRow
from pipeline.json_size import MAX_MARKS, count_marks
from pipeline.schema import BAD_MESSAGES, BAD_PARAMETERS, BAD_TEMPLATE, PROMPT

BATCH_MESSAGES = "messages"
"""The field of an OpenAI batch line that holds a conversation."""
CONTINUES = "continue_final_message"
"""The field of an OpenAI batch line that says whether the last message is continued."""
KWARGS = "chat_template_kwargs"
"""The field of an OpenAI batch line with variables for the chat template."""
TOOLS = "tools"
"""The field of an OpenAI batch line with the tools that the chat template shows."""
OF_LINES = (
    "template", "templates", "messages_column", "chat", "system", "continue_final_message", "sampling_column"
)  # fmt: skip
"""Keys that have no meaning for OpenAI batch lines, which say the same themselves."""
ROW = "row"
"""The name by which templates get all columns of a row, unless the input has a column of that name."""
NEWLINE = "\n"


@dataclass(frozen=True)
class Failure:
    """Why a document has no prompt."""

    code: str
    reason: str

    def marked(self, location: str) -> tuple[str, str]:
        """Error code and message of its rows."""
        return self.code, f"{location}: {self.reason}"


Made = str | Failure | None
"""A prompt, or why there is none; None if the row has failed before."""


class PromptMaker(Protocol):
    """`Prompter`, or a wrapper that stops at a time limit (`pipeline.estimate.sample`)."""

    def make(
        self, name: str, fields: Sequence[Mapping[str, object]], prompts: Sequence[str | None]
    ) -> "list[Made]": ...


@dataclass(frozen=True)
class Prompter:
    """Renders the prompts of a run."""

    templates: Mapping[str, Template]
    """By the names of `Expansion`; empty if the text of a column is the prompt."""
    messages: str | None
    """The field that holds a conversation, if there is one."""
    is_chat: bool
    """Whether prompts of rows without such a field become a user message for the chat template."""
    system: str | None
    chat: ChatTemplate | None
    now: datetime
    """The time that templates see: that of the run's start, so that a resume renders the same."""
    binds_row: bool = True
    """Whether templates get all columns as `row`."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables for the chat template, over which a batch line's own go."""
    continues: bool | None = False
    """Whether answers continue the last message of a conversation; None: of batch lines, which say it themselves."""

    @classmethod
    def of(
        cls,
        config: InputConfig,
        format: str,
        chat: ChatTemplate | None,
        now: datetime,
        *,
        columns: Collection[str] = (),
    ) -> "Prompter | None":
        """None where prompts are the text of a column as it is. `columns`: of the input."""
        templates = {name: _compiled(text) for name, text in config.by_name.items()}
        messages = BATCH_MESSAGES if format == "openai_batch" else config.messages_column
        if not templates and messages is None and not config.chat:
            return None
        return cls(
            templates,
            messages,
            config.chat,
            config.system,
            chat,
            now,
            binds_row=ROW not in columns,
            kwargs=config.chat_template_kwargs,
            continues=None if format == "openai_batch" else config.continue_final_message,
        )

    def make(self, name: str, fields: Sequence[Mapping[str, object]], prompts: Sequence[str | None]) -> list[Made]:
        """A prompt for each document, with the template of that name. `fields`: its columns (`prompt_fields`)."""
        made: list[Made] = list(prompts)
        if name in self.templates:
            texts = self.templates[name].render_rows(fields, now=self.now, binds_row=self.binds_row)
            made = [_checked(text, f"template {name!r}" if name else "template") for text in texts]
        chats: dict[int, list[Message]] = {}
        for row, (own, text) in enumerate(zip(fields, made, strict=True)):
            found = self._conversation(own, text)
            if isinstance(found, list):
                chats[row] = found
            else:
                made[row] = found
        if self.chat is not None and chats:
            continues = {number for number, row in enumerate(chats) if self._continues(fields[row])}
            kwargs = [{**self.kwargs, **self._own_kwargs(fields[row])} for row in chats]
            tools = [self._tools(fields[row]) for row in chats]
            rendered = self.chat.render_rows(
                list(chats.values()), now=self.now, continues=continues, kwargs=kwargs, tools=tools
            )
            for row, answer in zip(chats, rendered, strict=True):
                made[row] = _checked(answer, "chat template")
        return made

    def _conversation(self, fields: Mapping[str, object], text: Made) -> "list[Message] | Made":
        """The messages of a document, or its prompt if it has none."""
        if self.messages is not None and self.messages in fields:
            given = fields[self.messages]
        elif self.is_chat and isinstance(text, str):
            given = [{"role": "user", "content": text}]
        else:
            return text
        if self.chat is None:
            return Failure(
                BAD_PARAMETERS,
                "a chat needs a chat template, and the checkpoint has none that can be used; set input.chat_template",
            )
        if self._tools(fields) is not None and (reason := _reason_against_tools(self.chat.source)):
            return Failure(BAD_PARAMETERS, f"tools cannot be used: {reason}")
        try:
            messages = check_messages(_parsed(given))
            if self._continues(fields):
                check_continues(messages)
        except MessagesError as error:
            return Failure(BAD_MESSAGES, str(error))
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages

    def _own_kwargs(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        """What a batch line brings itself; other rows have no say."""
        own = fields.get(KWARGS) if self.continues is None else None
        return own if isinstance(own, Mapping) else NO_KWARGS

    def _tools(self, fields: Mapping[str, object]) -> Sequence[Tool] | None:
        """Those of a batch line; other rows have none."""
        own = fields.get(TOOLS) if self.continues is None else None
        return own if isinstance(own, list) else None

    def _continues(self, fields: Mapping[str, object]) -> bool:
        return bool(fields.get(CONTINUES)) if self.continues is None else self.continues


@lru_cache(maxsize=16)
def _reason_against_tools(source: str) -> str:
    """Why a model with this chat template cannot be given tools; empty if it can."""
    if "tools" not in Template(source, strict=False).names:
        return "the chat template has no tools"
    try:
        tool_form(source)
    except ValueError as error:
        return f"with this chat template: {error}"
    return ""


def form_of(prompter: Prompter | None) -> ToolForm:
    """How the model calls tools, where its chat template has some."""
    if prompter is None or prompter.chat is None or _reason_against_tools(prompter.chat.source):
        return "hermes"
    return tool_form(prompter.chat.source)


def _parsed(messages: object) -> object:
    """Messages given as text are JSON, since text formats have no other way to hold them."""
    if not isinstance(messages, str):
        return messages
    if (num_marks := count_marks(messages.encode())) > MAX_MARKS:  # of a line what is in its texts is not counted
        reason = f"have {num_marks} commas and brackets, more than the {MAX_MARKS} that JSON may have here"
        raise MessagesError("messages", reason)
    try:
        return json.loads(messages)
    except (ValueError, RecursionError) as error:
        raise MessagesError("messages", f"must be a list, or its JSON: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(text: str) -> Template:
    return Template(text, strict=True)


def _checked(text: str | TemplateError, title: str) -> Made:
    if not isinstance(text, TemplateError):
        return text
    return Failure(BAD_TEMPLATE, f"{title}: {text}")


def _key(name: str) -> str:
    return f"input.templates.{name}" if name else "input.template"


def compile_templates(config: InputConfig) -> dict[str, Template]:
    """The templates by name; ConfigError names the one that does not compile."""
    made = {}
    for name, text in config.by_name.items():
        try:
            made[name] = _compiled(text)
        except TemplateError as error:
            raise ConfigError(_key(name), f"no Jinja template: {error}") from error
    return made


def reads_column(config: InputConfig, column: str) -> bool:
    """Whether a template may read that column, by its name or through `row`."""
    templates = compile_templates(config).values()
    return any(t.row_keys is None or column in t.names or column in t.row_keys for t in templates)


def prompt_columns(config: InputConfig, columns: Sequence[str]) -> list[str]:
    """The columns that prompts are rendered from."""
    return [name for name in columns if name == config.messages_column or reads_column(config, name)]


def _names_read(template: Template, columns: Collection[str]) -> frozenset[str]:
    """The names of columns that a template reads from an input with these columns."""
    return template.names if ROW in columns else template.names - {ROW} | (template.row_keys or frozenset())


def check_templates(config: InputConfig, names: Collection[str]) -> None:
    """ConfigError for a template that reads none of the input's columns, `names`."""
    for name, template in compile_templates(config).items():
        own = _names_read(template, names)
        if not own & set(names) and (template.row_keys is not None or not names):
            read = ", ".join(sorted(own)) or "nothing"
            shown = ", ".join(sorted(names)[:20]) + (", ..." if len(names) > 20 else "")
            raise ConfigError(_key(name), f"names no column of the input: it reads {read}; there are: {shown}")


def unknown_names(config: InputConfig, names: Collection[str]) -> list[str]:
    """Remarks on columns that templates read and no file has: a misspelling, or an optional variable."""
    return [
        f"{_key(name)}: no file has a column {column!r}; rows that need it will fail"
        for name, template in compile_templates(config).items()
        for column in sorted(_names_read(template, names) - set(names))
    ]


def check_format(format: str, config: InputConfig) -> None:
    """ConfigError for keys that have no meaning for this format."""
    is_batch = format == "openai_batch"
    if is_batch and (given := [key for key in OF_LINES if getattr(config, key)]):
        names = " and ".join(f"input.{key}" for key in given)
        raise ConfigError(
            f"input.{given[0]}",
            f"OpenAI batch lines bring prompts or messages, and sampling parameters, of their own; leave {names} out",
        )
    if not is_batch:
        check_chat_template_is_used(config)


def check_chat_template_is_used(config: InputConfig) -> None:
    """ConfigError for a chat template, or variables for it, that no row goes through."""
    if config.chat_template_kwargs and not config.is_chat:
        raise ConfigError(
            "input.chat_template_kwargs",
            "has no effect without input.chat or input.messages_column; leave it out, or set one",
        )
    if config.chat_template != "auto" and not config.is_chat:
        raise ConfigError(
            "input.chat_template", "has no effect without input.chat or input.messages_column; leave it out, or set one"
        )


def prompt_fields(row: InputRow, format: str) -> Mapping[str, object]:
    """The fields that a prompt is rendered from."""
    if format == "text":
        return {PROMPT: row.prompt}
    if format == "openai_batch":
        if row.messages is None:
            return {}
        return {
            BATCH_MESSAGES: row.messages,
            CONTINUES: row.continues,
            KWARGS: row.chat_template_kwargs,
            TOOLS: row.tools,
        }
    return row.fields
