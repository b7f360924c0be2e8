"""Reads the texts of a generated corpus as hypotheses for evaluation: one per distinct prompt, empty for failed rows.

The corpus is a run folder or plain Parquet. References are read elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import pyarrow as pa
import pyarrow.dataset

from pipeline.config.job import ConfigError
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState


class CorpusRow(TypedDict):
    """The columns that are read."""

    prompt: str | None
    generated_text: str | None
    id: NotRequired[str | None]
    source_id: NotRequired[str | None]
    error_code: NotRequired[str | None]
    num_generated_tokens: NotRequired[int | None]
    layers_run: NotRequired[int | None]


@dataclass(frozen=True)
class Texts:
    """The hypotheses of a corpus: one per distinct prompt."""

    by_prompt: dict[str, str]
    prompts_of: dict[str, list[str]]
    """Prompts by the id of the input row: one, or one for each template."""
    failed: frozenset[str]
    """Prompts whose row failed; their text is empty."""
    num_rows: int
    num_repeated: int
    """Rows left out because their prompt was there before."""
    num_without_prompt: int
    layers_per_token: float | None
    """Layers run per decode step; None if the corpus does not tell."""


def read_texts(folder: RunFolder, state: RunState | None) -> Texts:
    """The texts of the run of `state`, or of plain Parquet if it is None."""
    source: str | list[str] = folder.root
    if state is not None:
        source = folder.run_files(state)
        if not source:
            raise ConfigError("", f"{folder.shown}: the run has written no rows yet")
    try:
        dataset = pa.dataset.dataset(source, filesystem=folder.filesystem, format="parquet")
        for name in ("prompt", "generated_text"):
            if name not in dataset.schema.names:
                raise ConfigError("", f"{folder.shown}: no column {name!r}; it has: {', '.join(dataset.schema.names)}")
            kind = dataset.schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ConfigError("", f"{folder.shown}: column {name!r} is {kind}, not text")
        optional = ("id", "source_id", "error_code", "num_generated_tokens", "layers_run")
        names = ["prompt", "generated_text", *(name for name in optional if name in dataset.schema.names)]
        rows = dataset.to_table(columns=names).to_pylist()
    except FileNotFoundError as error:
        raise ConfigError("", f"{folder.shown}: no such file or folder") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError("", f"{folder.shown}: neither a run folder nor Parquet: {error}") from error
    return choose_texts(rows)


def choose_texts(rows: Sequence[CorpusRow]) -> Texts:
    """Chooses, among rows with the same prompt, the one with the lowest id, whether it failed or not."""
    by_prompt: dict[str, str] = {}
    prompts_of: dict[str, list[str]] = {}
    failed = set()
    with_prompt = [(prompt, row) for row in rows if (prompt := row["prompt"]) is not None]
    for prompt, row in sorted(with_prompt, key=lambda pair: _rank(pair[1])):
        is_failed = bool(row.get("error_code"))
        if prompt not in by_prompt:
            by_prompt[prompt] = "" if is_failed else row["generated_text"] or ""
            failed |= {prompt} if is_failed else set()
        own = row.get("source_id") or row.get("id")
        if own is not None and prompt not in (known := prompts_of.setdefault(own, [])):
            known.append(prompt)
    steps = sum(max((row.get("num_generated_tokens") or 0) - 1, 0) for row in rows)
    return Texts(
        by_prompt=by_prompt,
        prompts_of=prompts_of,
        failed=frozenset(failed),
        num_rows=len(rows),
        num_repeated=len(with_prompt) - len(by_prompt),
        num_without_prompt=len(rows) - len(with_prompt),
        layers_per_token=sum(row.get("layers_run") or 0 for row in rows) / steps if steps else None,
    )


def _rank(row: CorpusRow) -> tuple[bool, str, bool]:
    """Sort key: by id, rows without an id last; among rows of one id, those that did not fail first."""
    own = row.get("id")
    return own is None, "" if own is None else own, bool(row.get("error_code"))
