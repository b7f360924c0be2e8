"""Documents -> blocks of output rows, with the prompts that templates make of them.

A row of a document that failed fails too, all with the reason of the document. Blocks end by rows and by bytes, so that
a thousand samples of a large document are many small blocks. Left out: which rows those are (`expansion`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.input.arrays import Mask
from pipeline.input.expansion import Expansion
from pipeline.input.prompting import Failure, Prompter
from pipeline.input.row import BLOCK_BYTES
from pipeline.schema import BAD_LINE, ID, PROMPT, SOURCE_ID, SOURCE_SCHEMA

MAX_DOCUMENT_BYTES: Final = 1 << 30  # of all rows of a document: Ray holds a window of them at a time
RENDERED_AT_ONCE: Final = 64  # documents: what templates make of them is in memory at a time


@dataclass(frozen=True)
class Documents:
    """A block of the input, a row per document."""

    table: pa.Table
    """The columns of `plan.ROW_SCHEMA`, and the input's own."""
    num_bytes: Sequence[int]
    """About what each takes in memory."""
    places: Sequence[str]
    """Of each, for messages; empty where no prompt is made."""
    fields: Sequence[Mapping[str, object]]
    """What prompts are made of; empty likewise."""
    samples: Sequence[int | None]
    """That each asks for itself; empty where none may."""

    def __getitem__(self, part: slice) -> "Documents":
        cut = (self.num_bytes[part], self.places[part], self.fields[part], self.samples[part])
        return Documents(self.table[part], *cut)

    def counts(self, expansion: Expansion) -> list[int]:
        """Rows that each becomes."""
        if not self.samples:
            return [expansion.count()] * len(self.table)
        return [expansion.count(samples) for samples in self.samples]


@dataclass(frozen=True)
class _Made:
    """One output row to be."""

    document: int
    id: str
    template: str
    sample: int
    prompt: str | None
    code: str
    message: str
    is_held: bool
    """False: it takes too much, and nothing of the document is kept."""


def expand(
    documents: Documents,
    expansion: Expansion,
    schema: pa.Schema,
    prompter: Prompter | None,
    is_done: Mask | None,
    rows_per_block: int,
) -> Iterator[pa.Table]:
    """All rows of the documents, as blocks of `schema`. No prompt is made for rows that are done: bool [rows]."""
    if prompter is None and schema == documents.table.schema:
        yield documents.table
        return
    first = 0
    for start in range(0, len(documents.table), RENDERED_AT_ONCE):
        part = documents[start : start + RENDERED_AT_ONCE]
        total = sum(part.counts(expansion))
        done = np.zeros(total, bool) if is_done is None else is_done[first : first + total]
        first += total
        rows: list[_Made] = []
        num_bytes = 0
        for row in _rows(part, expansion, prompter, done):
            size = (part.num_bytes[row.document] if row.is_held else 0) + len(row.prompt or "")
            if rows and (len(rows) == rows_per_block or num_bytes + size > BLOCK_BYTES):
                yield _to_table(part.table, rows, schema)
                rows, num_bytes = [], 0
            rows.append(row)
            num_bytes += size
        if rows:
            yield _to_table(part.table, rows, schema)


def _rows(part: Documents, expansion: Expansion, prompter: Prompter | None, is_done: Mask) -> Iterator[_Made]:
    ids, prompts, codes, messages = (
        part.table[name].to_pylist() for name in (ID, PROMPT, "error_code", "error_message")
    )
    at = 0
    for document, count in enumerate(part.counts(expansion)):
        samples = count // len(expansion.names)
        code, message, is_held = codes[document], messages[document], True
        if part.num_bytes[document] * count > MAX_DOCUMENT_BYTES:
            is_held = False
            reason = f"{count} rows of about {part.num_bytes[document]} bytes take more than {MAX_DOCUMENT_BYTES} bytes"
            code, message = code or BAD_LINE, message or f"{reason}; ask for fewer samples or templates"
        made: str | Failure | None = None
        for name, sample, end in expansion.parts(samples):
            if sample == 0:
                made = prompts[document] if is_held else None
                if prompter is not None and not code and not is_done[at : at + samples].all():
                    made = prompter.make(name, part.fields[document], prompts[document])
            own = made.marked(part.places[document]) if isinstance(made, Failure) else (code, message)
            text = None if isinstance(made, Failure) else made
            yield _Made(document, ids[document] + end, name, sample, text, own[0], own[1], is_held)
            at += 1


def _to_table(table: pa.Table, rows: Sequence[_Made], schema: pa.Schema) -> pa.Table:
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
