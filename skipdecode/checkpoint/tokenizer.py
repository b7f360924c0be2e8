"""Texts to tokens and back, by the tokenizer of a checkpoint. Does not truncate or pad.

For OPT the BOS of the config comes first whatever the tokenizer's files say, so that an empty prompt is BOS alone.
Other models add special tokens as Hugging Face's `AutoTokenizer` does (`tokenizer_files`), and an empty prompt may have
no tokens. Special tokens never appear in decoded text.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from skipdecode.checkpoint.detokenizer import TextDecoder
from skipdecode.checkpoint.grammar import GrammarCompiler
from skipdecode.checkpoint.hub import resolve_source, why_unreadable
from skipdecode.checkpoint.tokenizer_files import eos_token, load_folder, load_opt_folder
from skipdecode.config.model import DecoderConfig

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 in every OPT vocabulary
MAX_GROWTH = 1000
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # in SentencePiece vocabularies


class Tokenizer:
    """Encodes and decodes. Raises ValueError if the files do not fit the model."""

    def __init__(self, source: str | Path, config: DecoderConfig) -> None:
        folder = resolve_source(str(source))
        self._rules = config.tokenizer_rules
        self._vocab_size, self._ends = config.vocab_size, config.eos_token_ids
        self._grammars: GrammarCompiler | None = None
        try:
            self._tokenizer = self._load(folder, config)
            self._refuse_growth(folder)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
            self._special = self._special_ids(config, vocabulary)
            self.max_token_chars = max(map(len, vocabulary), default=1)
            """An upper bound on the characters of text that one token stands for."""
            if max(vocabulary.values(), default=-1) >= config.vocab_size:
                raise ValueError(
                    f"{folder}: the tokenizer has token ids up to {max(vocabulary.values())}, "
                    f"the model only {config.vocab_size} tokens"
                )
            self.bos_tokens: tuple[int, ...] = self._bos_tokens(config)
            """What `encode` puts before a text: BOS or nothing."""
            self.end = self._end(folder, config, vocabulary)
            """The token that ends a complete answer, the tokenizer's own EOS if the model has several; None without
            one."""
            self.decode = self._decoder(vocabulary)
            """Decodes tokens without the special ones; bytes that are no valid UTF-8 become U+FFFD."""
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            why = why_unreadable(folder / "tokenizer.json", error)
            raise ValueError(f"{folder}: tokenizer.json (or vocab.json, merges.txt) cannot be read: {why}") from error

    def _load(self, folder: Path, config: DecoderConfig) -> tokenizers.Tokenizer:
        with _panics_are_errors():
            if folder.is_file():
                from skipdecode.checkpoint import gguf_tokenizer  # only a GGUF file needs it

                return gguf_tokenizer.tokenizer(folder)
            if self._rules.is_opt:
                return load_opt_folder(folder)
            return load_folder(folder, config.vocab_size, is_file_alone=self._rules.is_file_alone)

    def _refuse_growth(self, folder: Path) -> None:
        """ValueError for rules by which a character may become a megabyte: they would multiply every prompt."""
        for part in (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer, self._tokenizer.decoder):
            rules = _rules(json.loads(part.__getstate__())) if part is not None else ()
            if math.prod(max(1, _growth(rule)) for rule in rules) > MAX_GROWTH:
                raise ValueError(
                    f"{folder}: tokenizer.json has rules that make a text more than {MAX_GROWTH} times as long"
                )

    def _special_ids(self, config: DecoderConfig, vocabulary: Mapping[str, int]) -> set[int]:
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        special |= set(config.eos_token_ids)
        if self._rules.is_opt:
            special |= {number for number in (config.bos_token_id, config.pad_token_id) if number is not None}
            # vocab.json does not say which of its tokens are special; OPT's four are, whatever file they come from
            special |= {vocabulary[token] for token in SPECIAL_TOKENS if token in vocabulary}
        return special

    def _bos_tokens(self, config: DecoderConfig) -> tuple[int, ...]:
        if self._rules.is_opt:
            return () if config.bos_token_id is None else (config.bos_token_id,)
        (bare,), (dressed,) = (self._ids(["a"], add_special_tokens=add) for add in (False, True))
        if len(dressed) > MAX_GROWTH:
            raise ValueError(f"the tokenizer adds {len(dressed) - len(bare)} tokens to every text")
        at = next((n for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare), 0)
        return tuple(dressed[:at])

    @property
    def bos_text(self) -> str:
        """How `bos_tokens` is written; a text that begins with it gets it twice, as in Hugging Face."""
        return "".join(self._tokenizer.id_to_token(token) or "" for token in self.bos_tokens)

    def _end(self, folder: Path, config: DecoderConfig, vocabulary: Mapping[str, int]) -> int | None:
        ends = [token for token in config.eos_token_ids if 0 <= token < config.vocab_size]
        named = vocabulary.get(eos_token(folder)) if len(ends) > 1 and folder.is_dir() else None
        return named if named in ends else next(iter(ends), None)

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles structured outputs for this vocabulary."""
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer.to_str(), self._vocab_size, self._ends)
        return self._grammars

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """One list of tokens per text, including the special tokens of the model."""
        if self._rules.is_opt:
            return [[*self.bos_tokens, *ids] for ids in self.encode_rendered(texts)]
        return self._ids(texts, add_special_tokens=True)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Adds no special tokens, but parses those written in the text, as a rendered chat template has them."""
        return self._ids(texts, add_special_tokens=False)

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        with _panics_are_errors():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [item.ids for item in encoded]

    def _text(self, tokens: Sequence[int]) -> str:
        with _panics_are_errors():
            text: str = self._tokenizer.decode([t for t in tokens if t not in self._special], skip_special_tokens=False)
        return text

    def _decoder(self, vocabulary: Mapping[str, int]) -> TextDecoder:
        decoder = self._tokenizer.decoder
        kinds = {rule["type"] for rule in _rules(json.loads(decoder.__getstate__()))} if decoder is not None else set()
        if kinds == {"ByteLevel"}:
            return TextDecoder(self._text)
        found = {number: BYTE_TOKEN.fullmatch(token) for token, number in vocabulary.items()}
        byte_tokens = {
            number: int(match[1], 16) for number, match in found.items() if match and "ByteFallback" in kinds
        }
        byte_tokens = {number: byte for number, byte in byte_tokens.items() if number not in self._special}
        return TextDecoder(self._text, self._behind(self._anchor(vocabulary, byte_tokens)), byte_tokens)

    def _anchor(self, vocabulary: Mapping[str, int], byte_tokens: Mapping[int, int]) -> int | None:
        """A token with text, after which other tokens can be decoded."""
        numbers = sorted(set(vocabulary.values()) - byte_tokens.keys())
        return next((number for number in numbers if self._text([number]).strip()), None)

    def _behind(self, anchor: int | None) -> Callable[[Sequence[int]], str] | None:
        if anchor is None:
            return None
        length = len(self._text([anchor]))
        return lambda tokens: self._text([anchor, *tokens])[length:]


def _rules(part: Any) -> Iterator[dict[str, Any]]:
    """The rules that a normalizer, a pre-tokenizer or a decoder consists of."""
    if part["type"] == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders"):
            for one in part.get(key, ()):
                yield from _rules(one)
    else:
        yield part


def _growth(rule: dict[str, Any]) -> int:
    """The most characters that a rule writes in the place of one, or before a text."""
    if rule["type"] == "Precompiled":  # SentencePiece's: the size of a trie, the trie, and texts that end in a zero
        table = base64.b64decode(rule["precompiled_charsmap"])
        return max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    return len(rule.get("content") or rule.get("prepend") or "")


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Makes a panic of the Rust library, a BaseException by design, an error of one row."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # its module cannot be imported
            raise RuntimeError(f"the tokenizer panicked: {error}") from error
        raise


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Trains a byte-level BPE in OPT's numbering of special tokens and writes `folder/tokenizer.json`."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(
        iter(texts), vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
