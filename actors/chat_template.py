"""A conversation to a prompt: the chat template of a checkpoint, as `tokenizer.apply_chat_template` of transformers.

The template is found where transformers finds it, and knows the special tokens that transformers gives it, those of the
tokenizer's class among them. The text that it makes has its special tokens already: `Tokenizer.encode_rendered` adds
none. Two things are done before, so that a template made for plain text does not meet what it does not know: content in
parts becomes one text, its parts on lines of their own, and the role `developer` is `system` to a template that does
not speak of it. Left out: tools, documents, images, and a request's own template. No Ray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from actors.jinja_sandbox import Template, TemplateError
from skipdecode.gguf_header import read_header
from skipdecode.hub import resolve_source
from skipdecode.tokenizer_files import FILE_ALONE, LLAMA_TOKENS, NAMED_TOKENS, content_of, read_json

ROLES = ("system", "developer", "user", "assistant")
PASSED_ON = ("role", "content", "name")
TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"  # the name of the template that is meant where there are several
GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END = "<|endoftext|>"
CLASS_TOKENS: dict[str, Mapping[str, str]] = {
    "LlamaTokenizer": LLAMA_TOKENS,
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
}
"""What transformers takes for granted of a tokenizer's class, where the files do not say."""
FAMILY_CLASSES = {"opt": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}

Message = dict[str, str]
"""`role`, `content`, and `name` where it has one."""


class MessagesError(ValueError):
    """`field` is what is at fault, such as `messages[2].role`; `reason` says what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")
        self.field, self.reason = field, reason

    def __reduce__(self) -> tuple[type["MessagesError"], tuple[str, str]]:
        return MessagesError, (self.field, self.reason)


@dataclass(frozen=True)
class ChatTemplate:
    """Picklable; `load_chat_template` makes it."""

    template: Template
    special_tokens: Mapping[str, str]
    """What the template reads as `bos_token`, `eos_token` and so on."""

    @property
    def source(self) -> str:
        return self.template.source

    def render(self, messages: Sequence[Message], *, now: datetime) -> str:
        """The prompt that asks for the assistant's next words. `messages`: of `check_messages`. TemplateError."""
        return self.template.render(self._values(messages), now=now)

    def render_rows(self, chats: Sequence[Sequence[Message]], *, now: datetime) -> list[str | TemplateError]:
        """One prompt or error per conversation; cheaper than one by one."""
        return self.template.render_rows([self._values(messages) for messages in chats], now=now)

    def _values(self, messages: Sequence[Message]) -> dict[str, object]:
        if "developer" not in self.source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        given: dict[str, object] = {"messages": messages, "tools": None, "documents": None}
        return given | {"add_generation_prompt": True} | dict(self.special_tokens)


def load_chat_template(source: str | Path, model_type: str, file: str | Path | None = None) -> ChatTemplate | None:
    """That of the checkpoint, or of `file` with the special tokens of the checkpoint; None where it has none.

    `source` is the folder, hub id or GGUF file of the tokenizer. ValueError names the file and what is wrong with it.
    """
    folder = resolve_source(str(source))
    metadata = read_header(folder).metadata if folder.is_file() else None
    if file is not None:
        text, where = _read(Path(file).expanduser()), str(file)
    else:
        found = _of_folder(folder) if metadata is None else _of_gguf(metadata)
        if not found:
            return None
        if DEFAULT not in found:
            raise ValueError(f"{folder}: has the chat templates {', '.join(sorted(found))}, and none is {DEFAULT!r}")
        text, where = found[DEFAULT], f"{folder}: its chat template"
    try:
        template = Template(text, strict=False)
    except TemplateError as error:
        raise ValueError(f"{where} cannot be used: {error}") from error
    if "messages" not in template.names:
        raise ValueError(f"{where} cannot be used: it does not read `messages`")
    return ChatTemplate(template, _special_tokens(folder, model_type) if metadata is None else _gguf_tokens(metadata))


def _of_folder(folder: Path) -> dict[str, str]:
    """Name -> template. Files of their own come before tokenizer_config.json."""
    files = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    found = {path.stem: _read(path) for path in files}
    if (folder / TEMPLATE_FILE).is_file():
        found[DEFAULT] = _read(folder / TEMPLATE_FILE)
    if found:
        return found
    said = read_json(folder / "tokenizer_config.json").get("chat_template")
    if said is None:
        return {}
    named = {DEFAULT: said} if isinstance(said, str) else said
    if isinstance(said, list) and all(isinstance(one, dict) for one in said):
        named = {one.get("name"): one.get("template") for one in said}
    if not isinstance(named, dict) or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor named texts")
    return named


def _of_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template (gguf.Keys.Tokenizer: chat_template, and chat_template.NAME)."""
    start = "tokenizer.chat_template"
    found = {key.removeprefix(start): text for key, text in metadata.items() if key.startswith(start)}
    texts = {name: text for name, text in found.items() if isinstance(text, str) and (not name or name[0] == ".")}
    return {name[1:] or DEFAULT: text for name, text in texts.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _special_tokens(folder: Path, model_type: str) -> dict[str, str]:
    """`special_tokens_map` of the tokenizer that transformers makes of the folder."""
    settings = read_json(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or read_json(folder / "config.json").get("tokenizer_class")
    name = str(kind or FAMILY_CLASSES.get(model_type, "")).removesuffix("Fast")
    if model_type == "qwen2":
        name = FAMILY_CLASSES[model_type]  # whatever the file says
    if model_type in FILE_ALONE or (name == "LlamaTokenizer" and _is_byte_level(folder)):
        name = ""
    if "added_tokens_decoder" not in settings:
        settings = settings | read_json(folder / "special_tokens_map.json")
    tokens = dict(CLASS_TOKENS.get(name, {}))
    for key in NAMED_TOKENS:
        if key in settings:
            tokens[key] = content_of(settings[key])
    return {key: tokens[key] for key in NAMED_TOKENS if tokens.get(key)}


def _is_byte_level(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and '"ByteLevel"' in path.read_text(encoding="utf-8")


def _gguf_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    numbers = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in GGUF_TOKENS.items()}
    return {key: tokens[n] for key, n in numbers.items() if isinstance(n, int) and n < len(tokens)}


def check_messages(value: object) -> list[Message]:
    """What a column or a request has as messages: checked, without what is null, each content one text; MessagesError.

    A message is a mapping with `role` (one of ROLES) and `content` (a text, or a list of `{type: text, text: ...}`),
    and may have a `name`.
    """
    if not isinstance(value, list | tuple):
        raise MessagesError("messages", f"must be a list of {{role, content}}, got {_kind(value)}")
    if not value:
        raise MessagesError("messages", "is empty; give at least one message")
    return [_message(f"messages[{n}]", message) for n, message in enumerate(value)]


def _message(field: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise MessagesError(field, f"must be a mapping with role and content, got {_kind(message)}")
    for key, given in message.items():
        if key not in PASSED_ON and given is not None and given != []:
            raise MessagesError(f"{field}.{str(key)[:40]}", f"is not supported; a message has {', '.join(PASSED_ON)}")
    role, name = message.get("role"), message.get("name")
    if role is None:
        raise MessagesError(f"{field}.role", f"is missing; it is one of {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise MessagesError(f"{field}.role", f"must be one of {', '.join(ROLES)}, got {_shown(role)}")
    made = {"role": role, "content": _text(f"{field}.content", message.get("content"))}
    if name is None:
        return made
    if not isinstance(name, str):
        raise MessagesError(f"{field}.name", f"must be a text, got {_kind(name)}")
    return made | {"name": name}


def _text(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise MessagesError(field, "is missing; it is a text, or a list of text parts")
    if not isinstance(content, list | tuple):
        raise MessagesError(field, f"must be a text or a list of text parts, got {_kind(content)}")
    if not content:
        raise MessagesError(field, "is empty; give at least one part")
    return "\n".join(_part(f"{field}[{n}]", part) for n, part in enumerate(content))


def _part(field: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise MessagesError(field, f"must be a mapping with type and text, got {_kind(part)}")
    if part.get("type") != "text":
        raise MessagesError(f"{field}.type", f"must be 'text', got {_shown(part.get('type'))}")
    if not isinstance(text := part.get("text"), str):
        raise MessagesError(f"{field}.text", f"must be a text, got {_kind(text)}")
    for key, given in part.items():
        if key not in ("type", "text") and given is not None:
            raise MessagesError(f"{field}.{str(key)[:40]}", "is not supported; a part has type and text")
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else _kind(value)
