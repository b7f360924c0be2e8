"""Jinja templates of strangers: compiled and rendered as `transformers.apply_chat_template` does, at a bounded price.

Jinja's own sandbox keeps a template from Python's internals, but not from time and memory: `'a' * 10**9`, `|center`,
`%` with a width, nested empty loops, `10 ** 10 ** 9`, a filter mapped over a range, and constants that the compiler
folds. Each operator, filter and method would have to be watched, and one forgotten is a dead worker, since no thread
can be ended from outside. So a process of its own renders (`jinja_process`). Of a template that was too slow for many
rows the next ones have less time, or none (`jinja_child`): a loop in each row must not stop a reader.

`strict` (templates over the columns of a row): an undefined variable is an error, so is a null that becomes text, a key
comes before a method of that name, and the final newline stays. Otherwise (chat templates) all is as in transformers.
Values are plain data: what else they hold comes as its text. No Ray; Linux.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal

from actors.templates.jinja_errors import TemplateError, TemplateTooCostly
from actors.templates.jinja_process import Debt, Job, ask

CHUNK_BYTES, CHUNK_ROWS = 2**18, 256
PLAIN = (str, int, float, bool, type(None), bytes, datetime, date, timedelta, time_of_day, Decimal)


class Template:
    """A template that compiles; picklable. TemplateError where it does not."""

    def __init__(self, source: str, *, strict: bool) -> None:
        self.source, self.strict = source, strict
        (made,) = ask(Job(source, strict, None), [])
        if isinstance(made, TemplateError):
            raise made
        names, keys = json.loads(made)
        self.names = frozenset[str](names)
        """What it reads and does not make itself: columns of a row, or a chat's `messages`."""
        self.row_keys = None if keys is None else frozenset[str](keys)
        """What it reads as `row['...']`; None: any key."""
        self._debt = Debt()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_debt": Debt()}

    def render(self, values: Mapping[str, object], *, now: datetime) -> str:
        """`now` is what `strftime_now` tells. TemplateError."""
        ((made,),) = self._render([values], Job(self.source, self.strict, now), None)
        if isinstance(made, TemplateError):
            raise made
        return made

    def render_rows(
        self, rows: Sequence[Mapping[str, object]], *, now: datetime, binds_row: bool = False
    ) -> list[str | TemplateError]:
        """One text or error per row; cheaper than one by one. `binds_row`: each row is there as `row` too."""
        chunks = self._render(rows, Job(self.source, self.strict, now, binds_row), self._debt)
        return [text for chunk in chunks for text in chunk]

    def _render(
        self, rows: Sequence[Mapping[str, object]], job: Job, debt: Debt | None
    ) -> Iterator[list[str | TemplateError]]:
        for chunk in _chunks([_pickled(row) for row in rows]):
            texts = iter(ask(job, [row for row in chunk if isinstance(row, bytes)], debt))
            yield [next(texts) if isinstance(row, bytes) else row for row in chunk]


def _pickled(row: Mapping[str, object]) -> bytes | TemplateError:
    try:
        return pickle.dumps(_plain(row), protocol=5)
    except RecursionError:
        return TemplateTooCostly("the values are nested too deeply")
    except Exception as error:  # of objects that a processor's rows may hold
        return TemplateError(f"the values cannot be read: {type(error).__name__}: {error}"[:300])


def _plain(value: object) -> object:
    """Of types that the other process knows, and whose methods are harmless."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if callable(to_list := getattr(value, "tolist", None)):  # numpy's arrays and scalars
        return _plain(to_list())
    return str(value)


def _chunks(rows: Sequence[bytes | TemplateError]) -> Iterator[list[bytes | TemplateError]]:
    chunk: list[bytes | TemplateError] = []
    size = 0
    for row in rows:
        length = len(row) if isinstance(row, bytes) else 0
        if chunk and (len(chunk) == CHUNK_ROWS or size + length > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += length
    if chunk:
        yield chunk
