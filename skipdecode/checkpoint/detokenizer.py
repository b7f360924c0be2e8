"""Tokens to text, token by token, and the search for stop strings in the text.

The work per token does not grow with the length of the text. No torch, so that processes that only handle text start
quickly.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence

from skipdecode.config.sampling import Sampling

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
MAX_OPEN, MAX_PARTS = 8, 3  # an unfinished character has at most three bytes, and so spans at most three tokens


class TextDecoder:
    """Decodes a list of tokens, and knows what is needed to decode them one at a time.

    Special tokens have no text. In a byte-level vocabulary (no `byte_tokens`) any other token is a piece of UTF-8. With
    SentencePiece's byte fallback each one is whole characters or a single byte; neighbouring bytes are text if together
    they are valid UTF-8, otherwise each of them becomes REPLACEMENT.
    """

    def __init__(
        self,
        whole: Callable[[Sequence[int]], str],
        piece: Callable[[Sequence[int]], str] | None = None,
        byte_tokens: Mapping[int, int] | None = None,
    ) -> None:
        self._whole = whole
        self.piece = piece or whole
        """Decodes tokens that follow others; at the beginning of a text some decoders drop a space."""
        self.byte_tokens: Mapping[int, int] = byte_tokens or {}
        """The byte of each byte token."""

    def __call__(self, tokens: Sequence[int]) -> str:
        return self._whole(tokens)


class ByteRun:
    """Consecutive byte tokens. What they decode to is certain only when another kind of token follows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.chars: list[str] = []
        """The characters so far, as long as the bytes are valid UTF-8."""
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
        """True if the bytes so far are valid UTF-8 that ends with a whole character."""
        return not self._is_broken and not self._utf8.getstate()[0]


class IncrementalDetokenizer:
    """Decodes tokens one at a time. The texts that `push` returned, followed by `rest`, are the text of all tokens.

    The cost of a token does not grow with the length of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode if isinstance(decode, TextDecoder) else TextDecoder(decode)
        self._is_first = True  # no token had any text so far
        self._open: list[int] = []  # the last tokens, while they may end inside a character
        self._given = 0  # characters of their text that `push` has returned
        self._end = ""  # the uncertain end of their text: REPLACEMENT or nothing
        self._run = ByteRun()

    def push(self, token: int) -> str:
        """The characters that this token made certain."""
        return self._push_whole(token) if self._decode.byte_tokens else self._push_part(token)

    @property
    def rest(self) -> str:
        """The end of the text, which the next token may still change. Its cost grows with its length."""
        return self._text(self._run.tokens) if self._run.tokens else self._end

    @property
    def num_uncertain(self) -> int:
        """Whole characters in the last tokens that `push` has not returned, since the next token may change them."""
        return len(self._run.chars)

    def extended(self, text: str, reach: int) -> str:
        """`text`, the end of what `push` has returned, followed by as much of `rest` as a search must look at.

        It contains every string of up to `reach` characters that the last token completed, and none that is not in the
        whole text. The cost is bounded by the lengths of `text` and `reach`.
        """
        run = self._run
        if not run.tokens:
            return text + self._end
        if not run.is_text:
            return text + REPLACEMENT * min(len(run.tokens), reach)
        return text + "".join(run.chars) if len(run.chars) < reach else "".join(run.chars[-reach:])

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens) if self._is_first else self._decode.piece(tokens)

    def _push_part(self, token: int) -> str:
        """For vocabularies in which tokens may be parts of characters."""
        self._open.append(token)
        text = self._text(self._open)[self._given :]
        certain = text.removesuffix(REPLACEMENT)
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
        """For vocabularies in which a token is whole characters or one byte."""
        byte = self._decode.byte_tokens.get(token)
        if byte is not None:
            self._run.add(token, byte)
            if self._is_first and self._run.chars == [" "] and not self._decode(self._run.tokens):
                self._run.chars.clear()
            return ""
        own = self._decode.piece([token])
        if not own:
            return ""  # a special token: the bytes before and after it are neighbours
        if self._is_first or self._run.tokens:
            own = self._text([*self._run.tokens, token])
            self._is_first, self._run = False, ByteRun()
        return own


class StopStringSearch:
    """Searches for stop strings in a text that grows token by token."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._text = stop, IncrementalDetokenizer(decode)
        self._longest = max(map(len, stop))
        self._tail = ""  # the end of the text, where a stop string may have begun

    def push(self, token: int) -> bool:
        """True if this token completed a stop string. Must not be called again after that."""
        text = self._tail + self._text.push(token)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        text = self._text.extended(text, self._longest)
        return any(s in text for s in self._stop)


def answer_text(
    tokens: Sequence[int], finish_reason: str, sampling: Sampling, decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of the tokens that a row has generated, which ends before a stop string or a stop token."""
    if finish_reason != "stop":
        return decode(tokens)
    is_stopped = tokens[-1] in sampling.stop_token_ids
    return cut_at_stop(decode(tokens[:-1] if is_stopped else tokens), sampling.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(ends)] if ends else text
