"""Texts to tokens and back, by the tokenizer of a checkpoint. Does not truncate or pad.

For OPT the BOS of the config comes first whatever the tokenizer's files say, so that an empty prompt is BOS alone.
Other models add special tokens as Hugging Face's `AutoTokenizer` does (`tokenizer_files`), and an empty prompt may have
no tokens. Special tokens never appear in decoded text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from skipdecode.checkpoint.detokenizer import TextDecoder
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.tokenizer_files import eos_token, load_folder, load_opt_folder
from skipdecode.config.model import DecoderConfig
from skipdecode.families import FAMILIES

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 in every OPT vocabulary
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # in SentencePiece vocabularies


class Tokenizer:
    """Encodes and decodes. Raises ValueError if the files do not fit the model."""

    def __init__(self, source: str | Path, config: DecoderConfig) -> None:
        folder = resolve_source(str(source))
        self._rules = FAMILIES[config.model_type].tokenizer
        try:
            self._tokenizer = self._load(folder, config)
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{folder}: tokenizer.json (or vocab.json, merges.txt) cannot be read: {error}") from error
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
        self.front: tuple[int, ...] = self._front(config)
        """What `encode` puts before a text: BOS or nothing."""
        self.end = self._end(folder, config, vocabulary)
        """The token that ends a complete answer: the tokenizer's own EOS if the model has several."""
        self.decode = self._decoder(vocabulary)
        """Decodes tokens without the special ones; bytes that are no valid UTF-8 become U+FFFD."""

    def _load(self, folder: Path, config: DecoderConfig) -> tokenizers.Tokenizer:
        if folder.is_file():
            from skipdecode.checkpoint import gguf_tokenizer  # only a GGUF file needs it

            return gguf_tokenizer.tokenizer(folder)
        if self._rules.is_opt:
            return load_opt_folder(folder)
        return load_folder(folder, config.vocab_size, is_file_alone=self._rules.is_file_alone)

    def _special_ids(self, config: DecoderConfig, vocabulary: Mapping[str, int]) -> set[int]:
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        special |= set(config.eos_token_ids)
        if self._rules.is_opt:
            special |= {number for number in (config.bos_token_id, config.pad_token_id) if number is not None}
            # vocab.json does not say which of its tokens are special; OPT's four are, whatever file they come from
            special |= {vocabulary[token] for token in SPECIAL_TOKENS if token in vocabulary}
        return special

    def _front(self, config: DecoderConfig) -> tuple[int, ...]:
        if self._rules.is_opt:
            return () if config.bos_token_id is None else (config.bos_token_id,)
        (bare,), (dressed,) = (self._ids(["a"], add_special_tokens=add) for add in (False, True))
        at = next((n for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare), 0)
        return tuple(dressed[:at])

    def _end(self, folder: Path, config: DecoderConfig, vocabulary: Mapping[str, int]) -> int:
        ends = config.eos_token_ids
        named = vocabulary.get(eos_token(folder)) if len(ends) > 1 and folder.is_dir() else None
        return named if named in ends else ends[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """One list of tokens per text, including the special tokens of the model."""
        if self._rules.is_opt:
            return [[*self.front, *ids] for ids in self.encode_rendered(texts)]
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
        kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else set()
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


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """The types of the parts of a decoder."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _kinds(part)
    else:
        yield decoder["type"]


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
