"""Text to OPT token lists and back, with the model folder's own byte-level BPE files.

BOS is put in front here, from the checkpoint's config, whatever the tokenizer files say: OPT always starts with it, and
an empty prompt is BOS alone. Special tokens never appear in decoded text. No truncation and no padding happen here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from skipdecode.config import DecoderConfig
from skipdecode.hub import resolve_source

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0..3 in every OPT vocabulary


class OPTTokenizer:
    """`encode` and `decode` in batches; safe to build once per worker."""

    def __init__(self, source: str | Path, config: DecoderConfig) -> None:
        folder = resolve_source(str(source))
        try:
            self._tokenizer = _load(folder)
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{folder}: tokenizer.json (or vocab.json, merges.txt) cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._bos = config.bos_token_id
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {config.bos_token_id, config.eos_token_id, config.pad_token_id} | {
            token_id for token_id, token in added.items() if token.special
        }
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # vocab.json does not say which of its tokens are special; OPT's four are, whatever file they come from
        self._special |= {vocabulary[token] for token in SPECIAL_TOKENS if token in vocabulary}
        self.max_token_chars = max(map(len, vocabulary), default=1)
        """No token stands for more characters of text: in a byte-level vocabulary every character is one byte."""
        if max(vocabulary.values(), default=-1) >= config.vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has token ids up to {max(vocabulary.values())}, "
                f"the model only {config.vocab_size} tokens"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """One token list per text, BOS first."""
        with _panics_are_errors():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[self._bos, *item.ids] for item in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of one token list without special tokens; bytes that are no UTF-8 become U+FFFD."""
        with _panics_are_errors():
            text: str = self._tokenizer.decode([t for t in tokens if t not in self._special], skip_special_tokens=False)
        return text


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """A panic in the Rust library is a BaseException by intent; here it is one row's error, not the worker's end."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # its module cannot be imported
            raise RuntimeError(f"the tokenizer panicked: {error}") from error
        raise


def _load(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"  # the released OPT repositories
    if not (vocab.is_file() and merges.is_file()):
        raise ValueError(f"{folder}: no tokenizer.json, and not both vocab.json and merges.txt; set model.tokenizer")
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges), add_prefix_space=False)
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", "<pad>") if t in known])
    inner: Tokenizer = tokenizer._tokenizer
    return inner


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Trains a byte-level BPE in OPT's numbering of special tokens and writes `folder/tokenizer.json`."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(
        iter(texts), vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
