"""Loads the chat template of a checkpoint from where transformers loads it, with the same special tokens.

These include the defaults of the tokenizer's class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.templates.chat_template import ChatTemplate
from actors.templates.sandbox import Template, TemplateError
from skipdecode.checkpoint.gguf_header import read_header
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.tokenizer_files import LLAMA_TOKENS, NAMED_TOKENS, content_of
from skipdecode.config.json_files import read_mapping
from skipdecode.config.model import TokenizerRules

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"  # the name of the one to use if there are several
GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END = "<|endoftext|>"
CLASS_TOKENS: dict[str, Mapping[str, str]] = {
    "LlamaTokenizer": LLAMA_TOKENS,
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
}  # fmt: skip
"""The special tokens of a tokenizer's class in transformers, if the files do not name them."""
TEKKEN_TOKENS = LLAMA_TOKENS | {"pad_token": "<pad>"}  # of every tekken.json (transformers.integrations.mistral)


def load_chat_template(
    source: str | Path, rules: TokenizerRules, file: str | Path | None = None
) -> ChatTemplate | None:
    """The template of a checkpoint, or of `file` with the checkpoint's special tokens; None if there is none.

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
    tokens = _special_tokens(folder, rules) if metadata is None else _gguf_tokens(metadata)
    return ChatTemplate(template, tokens).with_parts_detected()


def _of_folder(folder: Path) -> dict[str, str]:
    """Templates by name. Separate files take precedence over tokenizer_config.json."""
    files = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    found = {path.stem: _read(path) for path in files}
    if (folder / TEMPLATE_FILE).is_file():
        found[DEFAULT] = _read(folder / TEMPLATE_FILE)
    if found:
        return found
    given = read_mapping(folder / "tokenizer_config.json").get("chat_template")
    if given is None:
        return {}
    named = {DEFAULT: given} if isinstance(given, str) else given
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        named = {one.get("name"): one.get("template") for one in given}
    if not isinstance(named, dict) or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor named texts")
    return named


def _of_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name (gguf.Keys.Tokenizer: chat_template, and chat_template.NAME)."""
    start = "tokenizer.chat_template"
    found = {key.removeprefix(start): text for key, text in metadata.items() if key.startswith(start)}
    texts = {name: text for name, text in found.items() if isinstance(text, str) and (not name or name[0] == ".")}
    return {name[1:] or DEFAULT: text for name, text in texts.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _special_tokens(folder: Path, rules: TokenizerRules) -> dict[str, str]:
    """The `special_tokens_map` of the tokenizer that transformers would build from the folder."""
    settings = read_mapping(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or read_mapping(folder / "config.json").get("tokenizer_class")
    name = rules.class_name if rules.is_class_fixed else str(kind or rules.class_name).removesuffix("Fast")
    if rules.is_file_alone or (name == "LlamaTokenizer" and _is_byte_level(folder)):
        name = ""
    if "added_tokens_decoder" not in settings:
        settings = settings | read_mapping(folder / "special_tokens_map.json")
    is_tekken = (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file()
    tokens = dict(TEKKEN_TOKENS if is_tekken else CLASS_TOKENS.get(name, {}))
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
