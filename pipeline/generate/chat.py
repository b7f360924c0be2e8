"""The chat template of a run: found, compiled, and left out where no prompt goes through it. All errors are
`ConfigError`."""

from collections.abc import Sequence

from actors.templates.chat_template import ChatTemplate
from actors.templates.chat_template_files import load_chat_template
from pipeline.checkpoint import ResolvedModel
from pipeline.config.job import ConfigError, JobConfig
from pipeline.formatting import Log, count
from pipeline.input.scan import FileScan
from skipdecode.checkpoint.hub import resolve_source

REMEDY = "set input.chat_template to a file that has one"
UNUSED = (
    "input.chat: the model has a chat template, and prompts are given as they are; input.chat=true makes each a "
    "message of a user. Leave it false where prompts hold the template already, or the model was tuned without it"
)


def find_chat_template(config: JobConfig, model: ResolvedModel) -> ChatTemplate | None:
    """That of `input.chat_template`, or the checkpoint's; None: it has none, and the configuration asks for none."""
    given, own = config.input.chat_template, config.model.tokenizer
    try:
        source = resolve_source(own, "model.tokenizer") if own else model.folder
        found = load_chat_template(source, model.config.model_type, None if given == "auto" else given)
    except ValueError as error:
        if given == "auto" and not config.input.is_chat:
            return None
        raise ConfigError("input.chat_template", str(error)) from error
    if found is None and config.input.is_chat:
        asked = "input.chat" if config.input.chat else "input.messages_column"
        raise ConfigError(
            "input.chat_template", f"{asked} needs a chat template, and the checkpoint has none; {REMEDY}"
        )
    return found


def used_chat_template(
    chat: ChatTemplate | None, config: JobConfig, format: str, scans: Sequence[FileScan], log: Log
) -> ChatTemplate | None:
    """None where no prompt goes through it."""
    chats = sum(scan.num_chats for scan in scans)
    if format == "openai_batch" and chats and chat is None:
        if chats == sum(scan.num_documents for scan in scans):
            raise ConfigError(
                "input.chat_template",
                f"every line is a chat, and the checkpoint has no chat template that can be used; {REMEDY}",
            )
        why = "the checkpoint has no template that can be used"
        log(f"input.chat_template: {count(chats, 'chat')} will fail, since {why}; {REMEDY}")
    return chat if chats or config.input.is_chat else None


def unused_chat_template(chat: ChatTemplate | None, config: JobConfig, format: str) -> str | None:
    """A remark where the model has a template (`chat`, of `find_chat_template`), prompts are given as they are, and
    nobody said that this is meant. For new runs: one that was begun cannot change it. None: there is nothing to say."""
    is_meant = "chat" in config.input.model_fields_set or config.input.is_chat or config.model.adapter is not None
    return None if chat is None or is_meant or format == "openai_batch" else UNUSED
