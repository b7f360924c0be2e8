"""Tokens to text as they come: whole characters only, and nothing that may still turn out to be a stop string.

What `push` and `finish` give, joined, is the text of all tokens at once, cut at the first stop string.
"""

from collections.abc import Callable, Sequence

from skipdecode.detokenizer import IncrementalDetokenizer, cut_at_stop


class TextStream:
    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._text, self._stop = IncrementalDetokenizer(decode), stop
        self._held = ""  # may be the beginning of a stop string
        self._is_over = False

    def push(self, token: int) -> str:
        """The text that is certain now, and was not before."""
        return self._release(self._held + self._text.push(token))

    def finish(self) -> str:
        """The rest: no more tokens will come."""
        return "" if self._is_over else cut_at_stop(self._held + self._text.rest, self._stop)

    def _release(self, text: str) -> str:
        if self._is_over:
            return ""
        cut = cut_at_stop(text, self._stop)
        if len(cut) < len(text):
            self._is_over, self._held = True, ""
            return cut
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
