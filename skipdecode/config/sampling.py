"""How a row is to be continued: its parameters, its random numbers, and where its text stops.

The number for token k of a row comes from a counter-based generator (Philox) keyed by seed and row id, so it never
depends on neighbours, batch, worker or a retry. Without torch, so that processes that only handle text start quickly;
choosing tokens from logits is `sampler`.
"""

import codecs
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

INCOMPLETE = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
MAX_OPEN, MAX_PARTS = 8, 3  # an unfinished character has at most three bytes, and so lies in as many tokens with text


@dataclass(frozen=True)
class Sampling:
    """How one row is continued, and what is wanted beside its tokens."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of the new tokens, and of this many likeliest ones, come with the answer; None: they do not."""
    prompt_logprobs: bool = False
    """Those of the prompt's tokens do, at full depth. With `max_new_tokens` 0 there is no other answer."""


def row_uniforms(seed: int, row_id: str, count: int) -> np.ndarray:
    """[count] float32 in [0, 1): number k decides token y_k of that row."""
    digest = hashlib.blake2b(f"{seed}\0{row_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)
    return ((raw >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)  # 24 bits: exact in float32


class TextDecoder:
    """Tokens to text, as a whole (called) and as `piece`, with what a stream of tokens must know about them.

    Special tokens have no text. Without `byte_tokens` the others are pieces of UTF-8 (byte-level vocabularies). With
    them each of the others is whole characters, and bytes next to each other are text if they are UTF-8 together, else
    INCOMPLETE each (SentencePiece's byte fallback).
    """

    def __init__(
        self,
        whole: Callable[[Sequence[int]], str],
        piece: Callable[[Sequence[int]], str] | None = None,
        byte_tokens: Mapping[int, int] | None = None,
    ) -> None:
        self._whole = whole
        self.piece = piece or whole
        """The text of tokens behind others: at the beginning of a text some decoders leave a space out."""
        self.byte_tokens: Mapping[int, int] = byte_tokens or {}
        """Token -> its byte."""

    def __call__(self, tokens: Sequence[int]) -> str:
        return self._whole(tokens)


class ByteRun:
    """Byte tokens next to each other, of which nothing is certain before they end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.chars: list[str] = []
        """The characters they make so far, as long as they are UTF-8."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_broken = False

    def add(self, token: int, byte: int) -> None:
        self.tokens.append(token)
        if not self._is_broken:
            try:
                self.chars.extend(self._utf8.decode(bytes([byte])))
            except UnicodeDecodeError:
                self._is_broken = True

    @property
    def is_text(self) -> bool:
        """Whether they are whole characters now."""
        return not self._is_broken and not self._utf8.getstate()[0]


class GrowingText:
    """Tokens to text one by one: what `push` has given, and then `rest`, is the text of all tokens at once.

    A token costs the same however long the text is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode if isinstance(decode, TextDecoder) else TextDecoder(decode)
        self._is_first = True  # no token with text has come
        self._open: list[int] = []  # the last tokens, while they end in what may be part of a character
        self._given = 0  # characters of their text that `push` has given
        self._end = ""  # of their text: INCOMPLETE, or nothing
        self._run = ByteRun()

    def push(self, token: int) -> str:
        """The characters that are certain now and were not before."""
        return self._push_whole(token) if self._decode.byte_tokens else self._push_part(token)

    @property
    def rest(self) -> str:
        """The end of the text, which the next token may change. Costs as much as it is long."""
        return self._text(self._run.tokens) if self._run.tokens else self._end

    def extended(self, text: str, reach: int) -> str:
        """`text` (the end of what `push` has given) and behind it what of the rest can hold news.

        Holds every string of up to `reach` characters that the text so far holds and did not hold a token before, and
        none that it does not hold. Costs no more than `text` and `reach` are long.
        """
        run = self._run
        if not run.tokens:
            return text + self._end
        if not run.is_text:
            return text + INCOMPLETE * min(len(run.tokens), reach)
        return text + "".join(run.chars) if len(run.chars) < reach else "".join(run.chars[-reach:])

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens) if self._is_first else self._decode.piece(tokens)

    def _push_part(self, token: int) -> str:
        """Where tokens may be parts of characters."""
        self._open.append(token)
        text = self._text(self._open)[self._given :]
        certain = text.removesuffix(INCOMPLETE)
        self._end = text[len(certain) :]
        if not self._end:
            self._is_first = self._is_first and not (certain or self._given or self._decode.piece(self._open))
            self._open, self._given = [], 0
        elif len(self._open) <= MAX_OPEN:
            self._given += len(certain)
        else:
            self._is_first = False
            self._open = [t for t in self._open if self._decode.piece([t])][-MAX_PARTS:]
            self._given = len(self._decode.piece(self._open)) - 1
        return certain

    def _push_whole(self, token: int) -> str:
        """Where tokens are whole characters, or bytes."""
        byte = self._decode.byte_tokens.get(token)
        if byte is not None:
            self._run.add(token, byte)
            if self._is_first and self._run.chars == [" "] and not self._decode(self._run.tokens):
                self._run.chars.clear()
            return ""
        own = self._decode.piece([token])
        if not own:
            return ""  # a special token; bytes before and behind it are next to each other
        if self._is_first or self._run.tokens:
            own = self._text([*self._run.tokens, token])
            self._is_first, self._run = False, ByteRun()
        return own


class StopScan:
    """Looks for stop strings in a text that grows token by token."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._text = stop, GrowingText(decode)
        self._longest = max(map(len, stop))
        self._tail = ""  # of the text so far, where a stop string may have begun

    def push(self, token: int) -> bool:
        """Whether the text holds a stop string with this token; not to be asked again once it does."""
        text = self._tail + self._text.push(token)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        text = self._text.extended(text, self._longest)
        return any(s in text for s in self._stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(ends)] if ends else text
