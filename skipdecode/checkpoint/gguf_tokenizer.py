"""Builds the tokenizer of a GGUF file from its metadata, to the same tokens as llama.cpp.

There are two kinds: `gpt2` (byte-level BPE, where `tokenizer.ggml.pre` names the pre-tokenizer) and `llama`
(SentencePiece, BPE whose merges follow from scores). As in llama.cpp, text is not normalised, and if the file does not
say whether BOS comes first, its kind decides. transformers 5 differs in `smollm` (it does not split digits),
`tokenizer.ggml.add_space_prefix`, BOS of Llama 3 files without `add_bos_token`, and control tokens that are not written
in the byte alphabet.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from skipdecode.checkpoint.gguf_header import read_header

CONTROL, USER_DEFINED = 3, 4  # llama_token_type
MAX_PIECE_CHARS = 1024  # SentencePiece makes 16 unless it is told otherwise
NAMED = ("bos", "eos", "unknown", "padding", "eot", "eom")
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class Cut(NamedTuple):
    """How text is split into words before merges apply."""

    pattern: str | None
    """None: the pattern of GPT-2."""
    has_bos: bool = False
    """Put BOS first if the file does not say."""
    ignores_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges are."""
    splits_digits: bool = False


_LLAMA3 = Cut(_WORDS + r"\p{N}{1,3}" + _END, has_bos=True, ignores_merges=True)
_QWEN2 = Cut(_WORDS + r"\p{N}" + _END)
_TEKKEN = Cut(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    has_bos=True,
    ignores_merges=True,
)
CUTS: dict[str, Cut] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(_LLAMA3.pattern)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-2": Cut(None),
    "smollm": Cut(None, splits_digits=True),
}
"""By `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp)."""


def tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a file; ValueError names the file and the key at fault."""
    metadata = read_header(path).metadata
    try:
        return _build(metadata)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path}: its tokenizer cannot be read: {error}") from error
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: its tokenizer cannot be made: {error}") from error


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama', or set model.tokenizer")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ValueError("tokenizer.ggml.tokens is missing")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if kind == "gpt2":
        made, has_bos = _byte_level(metadata, tokens, types)
    else:
        made, has_bos = _sentencepiece(metadata, tokens), True
    _add_tokens(made, metadata, tokens, types)
    ends = [
        _token(metadata, tokens, key) if metadata.get(f"tokenizer.ggml.add_{key}_token", fallback) else ""
        for key, fallback in (("bos", has_bos), ("eos", False))
    ]
    single = " ".join(part for part in (ends[0], "$A", ends[1]) if part)
    special = [(token, made.token_to_id(token)) for token in dict.fromkeys(ends) if token]
    made.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)
    return made


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether BOS comes first if the file does not say."""
    name = metadata.get("tokenizer.ggml.pre")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(CUTS)}, or set model.tokenizer")
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError("tokenizer.ggml.merges is missing")
    spelling = _byte_spelling()
    alphabet = set(spelling)

    def spelled(token: str, kind: int) -> str:
        """The token in the byte alphabet, since some files write tokens in plain text."""
        if kind in (CONTROL, USER_DEFINED) or alphabet.issuperset(token):
            return token
        return "".join(spelling[byte] for byte in token.encode("utf-8"))

    vocab = {spelled(token, kind): n for n, (token, kind) in enumerate(zip(tokens, types, strict=True))}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignores_merges))
    parts: list[pre_tokenizers.PreTokenizer] = []
    if cut.splits_digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    return made, cut.has_bos


def _byte_spelling() -> list[str]:
    """The characters that byte-level vocabularies write bytes as (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        scores = metadata["tokenizer.ggml.scores"]
        if len(scores) != len(tokens):
            raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
        merges = merges_of(vocab, dict(zip(tokens, scores, strict=True)))
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    scheme = "first" if has_prefix else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if has_prefix else parts)
    return made


def merges_of(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All merges of two tokens to a third, best score first, with ties as in transformers' converter."""
    found = []
    if (longest := max(map(len, scores), default=0)) > MAX_PIECE_CHARS:  # all its cuts are tried
        raise ValueError(f"tokenizer.ggml.tokens has one of {longest} characters")
    for token, score in scores.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        own = [(left, right, score) for left, right in cuts if left in vocab and right in vocab]
        found += sorted(own, key=lambda one: (vocab[one[0]], vocab[one[1]]))
    found.sort(key=lambda one: (one[2], len(one[0]), len(one[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def _add_tokens(made: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> None:
    """Adds control and named tokens as special ones, and user-defined tokens, which are never split."""
    named = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        is_special = kind == CONTROL or number in named
        if token and (is_special or kind == USER_DEFINED) and made.token_to_id(token) == number:
            made.add_tokens([AddedToken(token, normalized=False, special=is_special)])


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> str:
    """The text of BOS or EOS; empty if there is none."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return ""
    if not isinstance(number, int) or number >= len(tokens):
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {number!r}, and there are {len(tokens)} tokens")
    return tokens[number]
