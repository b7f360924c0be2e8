"""Rows and prompts that kill workers, written as they are found, so that no later session of the run looks for them.

`quarantine-<session>.json` lies beside the data while the run is unfinished. Only the attempt tracker of that session
writes it, and a reader takes the files of the run's own sessions alone, so a process that outlives its run does no
harm. What is lost with a file is time.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from pipeline.store.run_folder import QUARANTINE, RunFolder


@dataclass(frozen=True)
class Finding:
    """Why a row, or each row with a prompt, is not decoded any more."""

    num_deaths: int
    """Of workers that decoded the row alone."""
    reason: str


@dataclass(frozen=True)
class Quarantine:
    rows: dict[str, Finding] = field(default_factory=dict)
    """By row id."""
    prompts: dict[str, Finding] = field(default_factory=dict)
    """By `stages.window_decoder.prompt_key`."""


def write_quarantine(folder: RunFolder, session: str, quarantine: Quarantine) -> None:
    """Replaces the session's file. A disk that is full ends the run elsewhere, with its reason."""
    with suppress(OSError):
        folder.write_text(QUARANTINE.format(session), json.dumps(asdict(quarantine), indent=1) + "\n")


def read_quarantine(folder: RunFolder, sessions: Sequence[str], max_row_attempts: int) -> Quarantine:
    """What these sessions found, except rows that died less often than `max_row_attempts`, which was raised since."""
    found = Quarantine()
    for session in sessions:
        text = folder.read_text(QUARANTINE.format(session))
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged: the search begins anew
            document = json.loads(text) if text else {}
            for name, known in (("rows", found.rows), ("prompts", found.prompts)):
                entries = {key: Finding(**entry) for key, entry in document.get(name, {}).items()}
                known |= {key: entry for key, entry in entries.items() if entry.num_deaths >= max_row_attempts}
    return found
