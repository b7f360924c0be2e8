"""The text of an answer while its tokens arrive: whole characters only, and nothing that may become a stop string."""

from collections.abc import Callable, Collection, Sequence

from skipdecode.checkpoint.detokenizer import IncrementalDetokenizer, cut_at_stop


class TextStream:
    """What `push` and `finish` return, joined, is the text of all tokens, cut at the first stop string."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), stop_token_ids: Collection[int] = ()
    ) -> None:
        self._text, self._stop = IncrementalDetokenizer(decode), stop
        self._stop_tokens = stop_token_ids
        self._held = ""  # may be the beginning of a stop string
        self._is_over = False

    def push(self, token: int) -> str:
        """The text that this token made certain."""
        return "" if token in self._stop_tokens else self._release(self._held + self._text.push(token))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        return "" if self._is_over else cut_at_stop(self._held + self._text.rest, self._stop)

    def _release(self, text: str) -> str:
        if self._is_over:
            return ""
        cut = cut_at_stop(text, self._stop)
        if len(cut) < len(text):
            self._is_over, self._held = True, ""
            return cut
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
