"""The commit of a retry: replaces rows in a run folder so that a kill at any moment loses none.

The new files are complete in `checkpoint/retry-<session>/`. Writing the list of moves and deletions to `run.json`
(state "committing") is the commit: before it nothing has happened, and after it everything will. Then the new files are
moved, the old ones are deleted, and the list is removed from `run.json`; every step is idempotent. Meanwhile rows are
in both places and the state says so; the next `jobs.retry` or `--resume` completes an interrupted commit. The files are
made by `generate.retry`.
"""

from collections.abc import Callable

import pyarrow.fs as pafs

from pipeline.fault_injection import fault_point
from pipeline.formatting import Log
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState


def start_commit(
    folder: RunFolder,
    state: RunState,
    moves: list[list[str]],
    removes: list[str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """`moves`: [from, to] of files; `removes`: files that they replace; all relative to the folder."""
    state |= {"state": "committing", "commit": {"moves": moves, "removes": removes}}
    folder.write_state(state, check)


def finish_commit(folder: RunFolder, state: RunState, log: Log, check: Callable[[], None] = lambda: None) -> None:
    """Completes a commit if one was begun; `state` (of `run.json`) is changed but not written. `check` is called before
    each step.

    If new files vanished before they were moved (the user deleted `checkpoint/`) and the old ones still exist, the
    commit is rolled back. If rows are missing afterwards, --resume generates them again, like any missing rows.
    """
    commit = state.pop("commit", None)
    if commit is None:
        return
    there = {source for source, _ in commit["moves"] if _is_file(folder, source)}
    lost = [target for source, target in commit["moves"] if source not in there and not _is_file(folder, target)]
    if lost and all(_is_file(folder, path) for path in commit["removes"]):
        log(f"{folder.shown}: files of a retry are gone ({lost[0]}, ...); its rows stay as they were")
        for _, target in commit["moves"]:
            check()
            folder.remove(target)
        return
    for source, target in commit["moves"]:
        if source in there:
            check()
            folder.move(source, target)
            fault_point("commit moved")
    for path in commit["removes"]:
        check()
        folder.remove(path)
        fault_point("commit removed")


def _is_file(folder: RunFolder, name: str) -> bool:
    return bool(folder.filesystem.get_file_info(folder.path(name)).type == pafs.FileType.File)
