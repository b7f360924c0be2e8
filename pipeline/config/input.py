"""`input.*`: which files are read, and what of a row becomes its prompt.

Left out: whether the files and their columns are there (`pipeline.input`), and whether a template can be compiled
(`pipeline.input.prompt_templates`).
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.tree import Section
from pipeline.formatting import Json

PROMPT_SOURCES: Final = ("prompt_column", "template", "templates", "messages_column")
"""Keys of which a run takes one: where its prompts come from."""
MAX_TEMPLATES: Final = 1024

TemplateName = Annotated[str, Field(pattern="^[a-z0-9_]+$")]
TemplateText = Annotated[str, Field(min_length=1)]


class InputConfig(Section):
    path: Annotated[tuple[str, ...], Field(min_length=1)] = ("prompts/",)
    """Files, folders, patterns (`*`, `?`, `**`) or URIs; a folder is read recursively."""
    format: Literal["auto", "parquet", "arrow", "jsonl", "csv", "text", "openai_batch"] = "auto"
    """auto: by the names of the files. arrow: what `datasets` saves to disk, and other Arrow IPC files."""
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    """Where the prompt is: a text. In place of it one of the next three keys."""
    template: TemplateText | None = None
    """Jinja, over the row's columns: `"Question: {{ question }}\\nAnswer:"`."""
    templates: Annotated[dict[TemplateName, TemplateText], Field(min_length=1, max_length=MAX_TEMPLATES)] | None = None
    """Several by name (`[a-z0-9_]+`): each document becomes a row for each of them."""
    messages_column: Annotated[str, Field(min_length=1)] | None = None
    """Where a conversation is: a list of `{role, content}`, or its JSON; it goes through the chat template."""
    chat: bool = False
    """Whether the prompt, or what a template makes, is a message of the user's for the chat template. A model with a
    template is remarked on where the key is not given."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """A system message before each conversation that has none; needs `chat` or `messages_column`."""
    chat_template: Annotated[str, Field(min_length=1)] = "auto"
    """A file with the chat template (Jinja); auto: the checkpoint's own."""
    id_column: Annotated[str, Field(min_length=1)] = "id"
    """Where a row's id is; a row without one gets an id from its file and row number."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first rows (documents, where each becomes several rows), in file order."""
    too_long: Literal["fail_row", "truncate_left", "truncate_right"] = "fail_row"
    """What becomes of a prompt that leaves no room for `sampling.max_new_tokens`. Chats fail under truncate_right: it
    would cut what asks for the answer."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> "InputConfig":
        given = [name for name in PROMPT_SOURCES if name in self.model_fields_set and getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join(f"input.{name}" for name in given)
            raise ValueError(f"{names} exclude each other: each says where prompts come from; keep one of them")
        if self.system is not None and not self.is_chat:
            raise ValueError("input.system is for conversations; set input.chat to true, or input.messages_column")
        return self

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the chat template; OpenAI batch lines say it themselves."""
        return self.chat or self.messages_column is not None

    @property
    def by_name(self) -> Mapping[str, str]:
        """The templates by name, in the order of the rows of a document; "" is the name of `template`."""
        if self.template is not None:
            return {"": self.template}
        return dict(sorted((self.templates or {}).items()))

    @property
    def text_column(self) -> str | None:
        """The column whose text is the prompt; None: there is none."""
        return None if self.by_name or self.messages_column is not None else self.prompt_column


def stored_input(tree: Mapping[str, Json]) -> dict[str, Json]:
    """`input` of a configuration that was written out whole: without the default that gave way to another source."""
    is_other = any(tree.get(name) is not None for name in PROMPT_SOURCES[1:])
    return {key: value for key, value in tree.items() if not (is_other and key == "prompt_column")}
