"""The prompts of a sweep and their references: from a file, or prompts made on the spot. All errors: `ConfigError`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pipeline.config.job import ConfigError, InputConfig
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.evaluation.metrics import slot_share
from pipeline.evaluation.score import ReferenceData, group_references
from pipeline.formatting import Log
from pipeline.input.sample_prompts import read_prompts
from pipeline.input.training_pairs import read_pairs

MADE_PROMPTS = 500  # without references
E2E_DATA = (
    "the E2E NLG challenge data (github.com/tuetschek/e2e-dataset, CC BY-SA 4.0; devset.csv with columns mr and ref) "
    "are not part of this project; download the file and name it with data.path=... (make quality E2E=...)"
)


class SweepData(ReferenceData):
    path: str | None = "data/devset.csv"
    """null: prompts made by `pipeline.demo.restaurant_prompts`, and no references."""
    has_references: bool = True
    """false: `path` holds prompts alone, in any form that jobs.generate reads."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first distinct prompts."""


@dataclass(frozen=True)
class Corpus:
    prompts: list[str]
    references: list[list[str]] | None
    pairs: list[tuple[str, str]]
    """(prompt, reference) of all `prompts`, for the loss."""

    @property
    def slot_share(self) -> float | None:
        """The slot share of the references themselves."""
        return slot_share([p for p, _ in self.pairs], [text for _, text in self.pairs])["slot_share"]


def load_corpus(data: SweepData, log: Log) -> Corpus:
    """All distinct prompts with their references; without a file, prompts made on the spot."""
    if data.path is None:
        log(f"data.path is null, so no references, no BLEU, ROUGE or loss: {E2E_DATA}")
        return Corpus([row["prompt"] for row in make_prompts(data.limit or MADE_PROMPTS)], None, [])
    if not data.has_references:
        source = InputConfig(path=(data.path,), prompt_column=data.prompt_column)
        try:
            return Corpus(read_prompts(source, data.limit or sys.maxsize), None, [])
        except ConfigError as error:  # it speaks of a job's keys
            raise error.renamed("input", "data") from error
    if not Path(data.path).is_file():
        raise ConfigError("data.path", f"no file {data.path}; {E2E_DATA}; data.path=null does without references")
    keys = ("data.path", "data.prompt_column", "data.reference_column")
    pairs = read_pairs(data.path, data.prompt_column, data.reference_column, keys)
    grouped = dict(list(group_references(pairs).items())[: data.limit])
    return Corpus(list(grouped), list(grouped.values()), [pair for pair in pairs if pair[0] in grouped])
