"""The section `input`: which files are read, and how a row becomes a prompt.

Whether the files and columns exist is checked in `pipeline.input`, whether a template compiles in
`pipeline.input.prompt_templates`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from actors.templates.template_kwargs import check_kwargs
from pipeline.config.tree import Section
from pipeline.formatting import Json

PROMPT_SOURCES: Final = ("prompt_column", "template", "templates", "messages_column")
"""The keys that say where prompts come from, of which a run takes one."""
MAX_TEMPLATES: Final = 1024

TemplateName = Annotated[str, Field(pattern="^[a-z0-9_]+$")]
TemplateText = Annotated[str, Field(min_length=1)]


class InputConfig(Section):
    path: Annotated[tuple[str, ...], Field(min_length=1)] = ("prompts/",)
    """Files, folders, patterns (`*`, `?`, `**`) or URIs; folders are read recursively."""
    format: Literal["auto", "parquet", "arrow", "jsonl", "csv", "text", "openai_batch"] = "auto"
    """auto: by the file names. arrow: what `datasets` saves to disk, and other Arrow IPC files."""
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    """The column with the prompt, a string. One of the next three keys may replace it."""
    template: TemplateText | None = None
    """A Jinja template over the row's columns: `"Question: {{ question }}\\nAnswer:"`."""
    templates: Annotated[dict[TemplateName, TemplateText], Field(min_length=1, max_length=MAX_TEMPLATES)] | None = None
    """Several templates by name (`[a-z0-9_]+`); each document becomes one row per template."""
    messages_column: Annotated[str, Field(min_length=1)] | None = None
    """The column with a conversation, a list of `{role, content}` or its JSON, which the chat template renders."""
    chat: bool = False
    """Whether each prompt, or rendered `template`, is sent through the chat template as a user message. If the key
    is not given and the model has a chat template, a line at the start says so."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """A system message for every conversation that has none; needs `chat` or `messages_column`."""
    chat_template: Annotated[str, Field(min_length=1)] = "auto"
    """A file with a chat template (Jinja); auto: the checkpoint's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, as in transformers and vLLM: `{enable_thinking: false}` for Qwen3."""
    continue_final_message: bool = False
    """Whether an answer continues the last message of its conversation, which must be the assistant's, as
    `continue_final_message` of transformers and vLLM; needs `messages_column`."""
    sampling_column: Annotated[str, Field(min_length=1)] | None = None
    """The column with sampling parameters of the row's own, a struct, map or JSON with keys of `sampling`; null: every
    row has the run's."""
    id_column: Annotated[str, Field(min_length=1)] = "id"
    """The column with the id; a row without one gets an id made of its file and row number."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Read only the first rows in file order (documents, where one becomes several rows)."""
    too_long: Literal["fail_row", "truncate_left", "truncate_right"] = "fail_row"
    """What happens to a prompt that leaves no room for `sampling.max_new_tokens`. Under truncate_right conversations
    fail, since it would cut off what asks for the answer."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_kwargs(value)
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "InputConfig":
        given = [name for name in PROMPT_SOURCES if name in self.model_fields_set and getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join(f"input.{name}" for name in given)
            raise ValueError(f"{names} exclude each other: each says where prompts come from; keep one of them")
        if self.system is not None and not self.is_chat:
            raise ValueError("input.system is for conversations; set input.chat to true, or input.messages_column")
        if self.continue_final_message and self.messages_column is None:
            raise ValueError("input.continue_final_message is for conversations; set input.messages_column")
        return self

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the chat template. OpenAI batch lines decide that by their URL."""
        return self.chat or self.messages_column is not None

    @property
    def by_name(self) -> Mapping[str, str]:
        """The templates by name, in the order of a document's output rows; `template` has the name ""."""
        if self.template is not None:
            return {"": self.template}
        return dict(sorted((self.templates or {}).items()))

    @property
    def text_column(self) -> str | None:
        """The column whose text is the prompt; None if prompts are rendered."""
        return None if self.by_name or self.messages_column is not None else self.prompt_column


def stored_input(tree: Mapping[str, Json]) -> dict[str, Json]:
    """The section `input` as a run folder stores it, without the default `prompt_column` where another source is
    given."""
    is_other = any(tree.get(name) is not None for name in PROMPT_SOURCES[1:])
    return {key: value for key, value in tree.items() if not (is_other and key == "prompt_column")}
