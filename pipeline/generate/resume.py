"""Which rows of a run are done already and which are left, and the removal of files that late writers added.

The data files are the only record of what is done. Whether the run may go on at all is decided by `fingerprint`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config.job import ConfigError
from pipeline.fault_injection import fault_point
from pipeline.formatting import Log
from pipeline.generate.plan import PlannedRun
from pipeline.generate.row_index import index_outputs, mark_rows, match_rows
from pipeline.input.id_matching import DoneRows
from pipeline.input.input_plan import InputPlan
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState


@dataclass(frozen=True)
class Work:
    """The rows that are left to decode, and where they are written."""

    plan: InputPlan
    """The input, with its duplicates."""
    done: DoneRows | None
    """Rows that are written already; None: none."""
    subfolder: str = "data"
    """The folder in the run folder that gets `status=.../` folders."""

    @property
    def num_done(self) -> int:
        return self.done.num_rows if self.done else 0

    @property
    def num_left(self) -> int:
        return self.plan.num_rows - self.num_done


def find_work(
    planned: PlannedRun,
    data_files: list[str],
    log: Log,
    *,
    without_codes: frozenset[str] = frozenset(),
    subfolder: str = "data",
) -> Work:
    """The rows that the data files lack; those with `without_codes` count as lacking."""
    if not planned.entries:
        return Work(planned.input, None, subfolder)
    num_outputs, outputs = index_outputs(planned.folder.filesystem, data_files, log, without_codes)
    matches = match_rows(planned.input, planned.entries, outputs, num_outputs)
    plan, done = mark_rows(planned.input, matches)
    if plan.num_duplicates:
        log(f"input: {plan.num_duplicates} rows have the id of an earlier one")
    return Work(plan, done if done.num_rows else None, subfolder)


def refuse_unattributed(folder: RunFolder, state: RunState) -> None:
    """ConfigError if there is a data file that no session of `state` wrote: it is neither counted nor deleted."""
    if unknown := folder.unattributed_files(state):
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ConfigError(
            "output.path",
            f"{unknown[0]}{more}: no session that run.json names wrote it; move it out of {folder.shown}, "
            "or choose another output.path",
        )


def remove_late(folder: RunFolder, state: RunState, check: Callable[[], None], log: Log) -> None:
    """Deletes files that writers of earlier sessions added after the last session of `state` had begun, or ended it,
    and those of repeated tasks whose rows another attempt has written.

    Only files of sessions that `state` lists are removed: this process may have been suspended, and another session may
    be at work by now. `check` is called before each step.
    """
    late = folder.late_files(state)
    fault_point("late listed")
    for path in late:
        check()
        folder.remove(folder.name(path))
        log(f"{path}: removed; its writer was late, and another has made its rows or makes them again")
