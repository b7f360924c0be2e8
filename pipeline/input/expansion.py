"""A document and the output rows it becomes: one for each template and sample, each with an id of its own.

The rows of a document stand next to each other, and everything that counts rows (plans, books, bits of a resume) counts
these. Left out: what their prompts say (`prompting`), and tables of them (`expand`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.config.job import InputConfig, SamplingConfig

LINES_BEFORE: Final = 1
"""Version of reading OpenAI batch lines: neither `n` nor chat. A run folder goes on with the one it was begun in."""
LINES_NOW: Final = 2


@dataclass(frozen=True)
class Expansion:
    """Which rows a document becomes."""

    names: tuple[str, ...] = ("",)
    """Of templates; "" leaves no trace in an id."""
    samples: int = 1
    """Of each document that does not say it itself."""
    temperature: float = 0.0
    """Of lines that do not say it themselves."""
    lines: int = LINES_NOW

    @classmethod
    def of(cls, config: InputConfig, sampling: SamplingConfig, lines: int = LINES_NOW) -> "Expansion":
        return cls(tuple(config.by_name) or ("",), sampling.n, sampling.temperature, lines)

    @property
    def is_on(self) -> bool:
        """Whether ids are told apart, whatever a document says."""
        return self.samples > 1 or self.names != ("",)

    def count(self, samples: int | None = None) -> int:
        """Rows of a document; `samples`: what it asks for itself."""
        return len(self.names) * (samples or self.samples)

    def parts(self, samples: int | None = None) -> Iterator[tuple[str, int, str]]:
        """Template, sample and what is behind the document's id, for each of its rows."""
        number = samples or self.samples
        for name in self.names:
            for sample in range(number):
                yield name, sample, (f"-{name}" if name else "") + (f"-{sample}" if number > 1 else "")

    def ids(self, id: str, samples: int | None = None) -> list[str]:
        return [id + end for _, _, end in self.parts(samples)]

    def all_ids(self, ids: Sequence[str]) -> Sequence[str]:
        """Of the rows of all documents that ask for no number of samples themselves."""
        return [id + end for id in ids for _, _, end in self.parts()] if self.is_on else ids


ONE_ROW: Final = Expansion()
"""A row for each document."""
