"""Builds a tokenizer from the files of a model folder, as transformers' `AutoTokenizer` does.

`tokenizer.json` holds nearly everything. `tokenizer_config.json` adds special tokens, and for LlamaTokenizer `legacy`
and `add_prefix_space` say how spaces are written (transformers 5 rebuilds that class from the vocabulary and the
post-processor of tokenizer.json). `add_bos_token` and `add_eos_token` have no effect beside a tokenizer.json, whose
post-processor decides. Unlike transformers 5 we keep the pre-tokenizer of a GPT2Tokenizer or Qwen2Tokenizer, since it
is what the model was trained with.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from skipdecode.checkpoint.tokenizer_conversion import converted
from skipdecode.config.json_files import read_mapping

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # the defaults of LlamaTokenizer


def load_folder(folder: Path, vocab_size: int, *, is_file_alone: bool) -> Tokenizer:
    """The tokenizer of a folder, by its tokenizer.json or by the one that transformers makes of other files; ValueError
    says what is wrong, or what to do if there is none.

    Tokens that are only in tokenizer_config.json and exceed the model's `vocab_size` are left out. `is_file_alone` is
    that of `TokenizerRules`.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        text, is_file_alone = converted(folder), True
    settings = read_mapping(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or read_mapping(folder / "config.json").get("tokenizer_class") or ""
    # a byte-level tokenizer is no LlamaTokenizer, even if the files say so
    is_llama = str(kind).removesuffix("Fast") == "LlamaTokenizer" and not is_file_alone
    raw = json.loads(text) if is_llama and '"ByteLevel"' not in text else {}
    if raw.get("model", {}).get("type") == "BPE":
        tokenizer = Tokenizer.from_str(json.dumps(_as_llama(raw, settings)))
        settings = LLAMA_TOKENS | settings
    else:
        tokenizer = Tokenizer.from_str(text)
    if "added_tokens_decoder" not in settings:
        settings = settings | read_mapping(folder / "special_tokens_map.json")
    try:
        _add_tokens(tokenizer, settings, vocab_size)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: its special tokens cannot be read: {error!r}") from error
    return tokenizer


def load_opt_folder(folder: Path) -> Tokenizer:
    """The tokenizer of an OPT folder with tokenizer.json, or with vocab.json and merges.txt as the released ones."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise ValueError(f"{folder}: no tokenizer.json, and not both vocab.json and merges.txt; set model.tokenizer")
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges), add_prefix_space=False)
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", "<pad>") if t in known])
    inner: Tokenizer = tokenizer._tokenizer
    return inner


def eos_token(folder: Path) -> str:
    """The EOS token that the files name, or an empty text."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    found = (read_mapping(folder / name).get("eos_token") for name in names)
    return next(filter(None, map(content_of, found)), "")


def _as_llama(raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json with the parts replaced that `transformers.LlamaTokenizer` sets itself."""
    has_prefix = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if has_prefix else "never"
    model = {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None, "ignore_merges": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return raw | {
        "model": raw["model"] | model,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _add_tokens(tokenizer: Tokenizer, settings: dict[str, Any], vocab_size: int) -> None:
    """Adds the tokens that the settings name and tokenizer.json does not have."""
    named = [content_of(settings[key]) for key in settings if key in NAMED_TOKENS or key.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        extra = settings.get(key) or []
        named += [content_of(one) for one in (extra.values() if isinstance(extra, dict) else extra)]
    listed = dict(_listed(settings))
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token in listed.values():
        token.special = token.special or token.content in named
        if repr(known.get(token.content)) != repr(token):
            _add(tokenizer, token, vocab_size)
    seen = known.keys() | {token.content for token in listed.values()}
    for content in dict.fromkeys(named):
        if content and content not in seen:
            _add(tokenizer, AddedToken(content, special=True), vocab_size)


def _add(tokenizer: Tokenizer, token: AddedToken, vocab_size: int) -> None:
    if tokenizer.token_to_id(token.content) is not None or tokenizer.get_vocab_size() < vocab_size:
        tokenizer.add_tokens([token])


def _listed(settings: dict[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """The tokens of `added_tokens_decoder`, in the order of their ids."""
    listed = settings.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for number in sorted(listed, key=int):
        token = listed[number]
        yield int(number), AddedToken(token["content"], **{key: token[key] for key in flags if key in token})


def content_of(token: Any) -> str:
    """The text of a token given as a text or as a mapping with flags; empty for anything else."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
