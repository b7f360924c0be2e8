"""Prompts that are made: from columns by templates, and from conversations by the chat template.

One `Prompter` is made by the driver and travels to the tasks that read; templates are compiled there, once in a
process. What rows hold is data, and never a template. Left out: the sandbox (`actors.jinja_sandbox`), and the chat
template itself (`actors.chat_template`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.config import InputConfig
from pipeline.input.files import Listing
from pipeline.input.row import Row
from pipeline.schema import PROMPT

BATCH_MESSAGES = "messages"
"""The field of a line that is a conversation."""


@dataclass(frozen=True)
class Failure:
    """Why a document has no prompt."""

    code: str
    reason: str

    def marked(self, place: str) -> tuple[str, str]:
        """Error code and message of its rows."""
        return self.code, f"{place}: {self.reason}"


class Prompter:
    def make(self, name: str, fields: Mapping[str, object], prompt: str | None) -> str | Failure:
        raise NotImplementedError


def template_columns(config: InputConfig) -> frozenset[str]:
    return frozenset()


def check_format(listing: Listing, config: InputConfig) -> None:
    pass


def check_templates(config: InputConfig, names: Collection[str]) -> None:
    pass


def prompt_fields(row: Row, format: str) -> Mapping[str, object]:
    """What a prompt is made of."""
    if format == "text":
        return {PROMPT: row.prompt}
    if format == "openai_batch":
        return {} if row.messages is None else {BATCH_MESSAGES: row.messages}
    return row.fields
