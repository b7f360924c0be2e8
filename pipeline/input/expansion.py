"""Documents -> output rows: one for each template and sample, each with an id and a prompt of its own.

The output rows of a document stand next to each other, and everything that counts rows (plans, books, the bits of a
resume) counts these. A document that failed fails all its rows, with its reason. Blocks end by rows and by bytes, so
that a thousand samples of a large document are many small blocks.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.config.job import InputConfig, SamplingConfig
from pipeline.input.ids import Mask
from pipeline.input.line_reader import BLOCK_BYTES
from pipeline.input.prompt_templates import Failure, Made, PromptMaker
from pipeline.schema import BAD_LINE, ID, PROMPT, SOURCE_ID, SOURCE_SCHEMA


@dataclass(frozen=True)
class Expansion:
    """Which output rows a document becomes."""

    names: tuple[str, ...] = ("",)
    """The names of the templates; "" adds nothing to an id."""
    samples: int = 1
    """Answers for each document that does not ask for a number itself."""
    temperature: float = 0.0
    """The temperature of batch lines that give none."""

    @classmethod
    def of(cls, config: InputConfig, sampling: SamplingConfig) -> "Expansion":
        return cls(tuple(config.by_name) or ("",), sampling.n, sampling.temperature)

    @property
    def is_on(self) -> bool:
        """Whether ids get a suffix, whatever a document asks for."""
        return self.samples > 1 or self.names != ("",)

    def count(self, samples: int | None = None) -> int:
        """How many rows a document becomes; `samples` is what it asks for itself."""
        return len(self.names) * (samples or self.samples)

    def parts(self, samples: int | None = None) -> Iterator[tuple[str, int, str]]:
        """Template, sample and the suffix of the id, for each row of a document."""
        number = samples or self.samples
        for name in self.names:
            for sample in range(number):
                yield name, sample, (f"-{name}" if name else "") + (f"-{sample}" if number > 1 else "")

    def ids(self, id: str, samples: int | None = None) -> list[str]:
        """The ids of a document's rows."""
        return [id + end for _, _, end in self.parts(samples)]

    def all_ids(self, ids: Sequence[str]) -> Sequence[str]:
        """The ids of the rows of documents that ask for no number of samples themselves."""
        return [id + end for id in ids for _, _, end in self.parts()] if self.is_on else ids


ONE_ROW: Final = Expansion()
"""One row per document."""


MAX_DOCUMENT_BYTES: Final = 1 << 30  # of all rows of a document, since Ray holds a window of them
RENDERED_AT_ONCE: Final = 64  # documents


@dataclass(frozen=True)
class Documents:
    """A block of the input, with one row per document."""

    table: pa.Table
    """The columns of `plan.ROW_SCHEMA`, and the input's own."""
    num_bytes: Sequence[int]
    """About what each takes in memory."""
    locations: Sequence[str]
    """How messages name each (file and line); empty where no prompt is rendered."""
    fields: Sequence[Mapping[str, object]]
    """The columns that prompts are rendered from; empty likewise."""
    samples: Sequence[int | None]
    """How many answers each asks for itself; empty where none can."""

    def __getitem__(self, part: slice) -> "Documents":
        cut = (self.num_bytes[part], self.locations[part], self.fields[part], self.samples[part])
        return Documents(self.table[part], *cut)

    def counts(self, expansion: Expansion) -> list[int]:
        """How many rows each document becomes."""
        if not self.samples:
            return [expansion.count()] * len(self.table)
        return [expansion.count(samples) for samples in self.samples]


@dataclass(frozen=True)
class _OutputRow:
    """One output row, before it is in a table."""

    document: int
    id: str
    template: str
    sample: int
    prompt: str | None
    code: str
    message: str
    is_held: bool
    """False: its document takes too much memory, and none of its columns are kept."""


def expand(
    documents: Documents,
    expansion: Expansion,
    schema: pa.Schema,
    prompter: PromptMaker | None,
    is_done: Mask | None,
    rows_per_block: int,
) -> Iterator[pa.Table]:
    """All rows of the documents in blocks of `schema`. Rows that are done, bool [rows], get no prompt."""
    if prompter is None and schema == documents.table.schema:
        yield documents.table
        return
    rows: list[_OutputRow] = []
    num_bytes = 0
    for row in _all_rows(documents, expansion, prompter, is_done):
        size = (documents.num_bytes[row.document] if row.is_held else 0) + len(row.prompt or "")
        if rows and (len(rows) == rows_per_block or num_bytes + size > BLOCK_BYTES):
            yield _to_table(documents.table, rows, schema)
            rows, num_bytes = [], 0
        rows.append(row)
        num_bytes += size
    if rows:
        yield _to_table(documents.table, rows, schema)


def _all_rows(
    documents: Documents, expansion: Expansion, prompter: PromptMaker | None, is_done: Mask | None
) -> Iterator[_OutputRow]:
    first = 0
    for start, end in itertools.pairwise(_cuts(documents, expansion)):
        part = documents[start:end]
        total = sum(part.counts(expansion))
        done = np.zeros(total, bool) if is_done is None else is_done[first : first + total]
        first += total
        yield from _rows(part, start, expansion, prompter, done)


def _cuts(documents: Documents, expansion: Expansion) -> list[int]:
    """Where to cut the documents so that the prompts of one part are not much at once."""
    cuts, num_bytes = [0], 0
    for row, size in enumerate(documents.num_bytes):
        is_full = row - cuts[-1] == RENDERED_AT_ONCE or num_bytes + size > BLOCK_BYTES // len(expansion.names)
        if row > cuts[-1] and is_full:
            cuts.append(row)
            num_bytes = 0
        num_bytes += size
    return [*cuts, len(documents.table)]


def _rows(
    part: Documents, start: int, expansion: Expansion, prompter: PromptMaker | None, is_done: Mask
) -> Iterator[_OutputRow]:
    """The rows of a part; `start` is the number of its first document."""
    ids, prompts = part.table[ID].to_pylist(), part.table[PROMPT].to_pylist()
    counts = part.counts(expansion)
    errors, is_held = _errors(part, counts)
    ends = np.cumsum(counts).tolist()
    ranges = zip(ends, counts, strict=True)
    is_open = [not is_done[end - count : end].all() for end, count in ranges] if prompter else []
    wanted = [document for document, yes in enumerate(is_open) if yes and not errors[document][0]]

    def make(name: str) -> list[Made]:
        """The prompts of all documents of the part with that template."""
        made: list[Made] = list(prompts)
        if prompter is not None and wanted:
            own = [part.fields[document] for document in wanted], [prompts[document] for document in wanted]
            for document, prompt in zip(wanted, prompter.make(name, *own), strict=True):
                made[document] = prompt
        return made

    # a document alone may be a large one: its templates are then rendered one after the other
    known = {name: make(name) for name in expansion.names} if len(ids) > 1 else {}
    for document, count in enumerate(counts):
        for name, sample, end in expansion.parts(count // len(expansion.names)):
            if sample == 0:
                prompt = (known.get(name) or make(name))[document] if is_held[document] else None
                code, message = errors[document]
            if isinstance(prompt, Failure):
                (code, message), prompt = prompt.marked(part.locations[document]), None
            row = ids[document] + end, name, sample, prompt, code, message, is_held[document]
            yield _OutputRow(start + document, *row)


def _errors(part: Documents, counts: Sequence[int]) -> tuple[list[tuple[str, str]], list[bool]]:
    """The error code and message of each document, and whether its rows fit in memory."""
    codes, messages = part.table["error_code"].to_pylist(), part.table["error_message"].to_pylist()
    errors, is_held = list(zip(codes, messages, strict=True)), []
    for document, (size, count) in enumerate(zip(part.num_bytes, counts, strict=True)):
        is_held.append(size * count <= MAX_DOCUMENT_BYTES)
        if not is_held[-1] and not codes[document]:
            reason = f"{count} rows of about {size} bytes take more than {MAX_DOCUMENT_BYTES} bytes"
            message = f"{part.locations[document]}: {reason}; ask for fewer samples or templates"
            errors[document] = BAD_LINE, message
    return errors, is_held


def _to_table(table: pa.Table, rows: Sequence[_OutputRow], schema: pa.Schema) -> pa.Table:
    documents = np.array([row.document for row in rows])
    kept = table.take(pa.array(documents, mask=np.array([not row.is_held for row in rows])))
    own: dict[str, list[str | int | None]] = {
        ID: [row.id for row in rows],
        PROMPT: [row.prompt for row in rows],
        "error_code": [row.code for row in rows],
        "error_message": [row.message for row in rows],
    }
    if SOURCE_ID in schema.names and SOURCE_ID not in table.schema.names:
        sources = table[ID].take(pa.array(documents)).to_pylist()
        values = (sources, [row.template or None for row in rows], [row.sample for row in rows])
        own |= dict(zip(SOURCE_SCHEMA.names, values, strict=True))
    arrays = [pa.array(own[field.name], field.type) if field.name in own else kept[field.name] for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
