"""Checks of a run's input and output before it starts: that they do not overlap, that the output is free or can be
resumed, and whether the run in it is complete."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
from pyarrow.fs import LocalFileSystem

from pipeline.config.job import ConfigError, JobConfig
from pipeline.formatting import Log
from pipeline.generate.openai_batch import has_batch_files
from pipeline.input.files import Listing
from pipeline.store.atomic_files import check_writable
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.run_state import IS_RUN, RunState


def check_no_overlap(folder: RunFolder, listing: Listing) -> None:
    """Raises ConfigError if input and run folder overlap: --overwrite would delete input files, and --resume would read
    generated rows as input."""
    if not listing.filesystem.equals(folder.filesystem):
        return
    is_local = isinstance(folder.filesystem, LocalFileSystem)
    root = os.path.realpath(folder.root) if is_local else folder.root
    for given in listing.folders:
        path = os.path.realpath(given) if is_local else given
        if f"{root}/".startswith(f"{path.rstrip('/')}/"):
            raise ConfigError(
                "output.path",
                f"{folder.shown} lies in the input folder {given}, which is read with everything in it; "
                "choose an output.path outside, or give input.path as a pattern like *.parquet",
            )
    for file in listing.files:
        path = os.path.realpath(file.path) if is_local else file.path
        if path.startswith(f"{root}/"):
            raise ConfigError(
                "output.path",
                f"the input file {file.path} lies in {folder.shown}; "
                "choose an output.path that holds nothing of input.path",
            )


@contextmanager
def removed_on_refusal(folder: RunFolder) -> Iterator[None]:
    """Removes the output folder again if it was made in the block and the run is refused."""
    is_new = folder.is_local and not os.path.lexists(folder.root)
    try:
        yield
    except ConfigError:
        if is_new:
            with suppress(OSError):  # not empty, or never made
                os.rmdir(folder.root)
        raise


def check_output(folder: RunFolder, config: JobConfig) -> RunState | None:
    """The state of the run to resume, or None for a new one; ConfigError if the folder is taken, or if no file can be
    written there although there is something to do."""
    try:
        folder.filesystem.create_dir(folder.root, recursive=True)
    except OSError as error:
        raise ConfigError("output.path", f"{folder.shown} cannot be created: {error}") from error
    state = _earlier_state(folder, config.output.if_exists)
    if state is None or state["state"] != "finished":
        check_writable(folder.filesystem, folder.root, folder.shown)
    return state


def _earlier_state(folder: RunFolder, mode: str) -> RunState | None:
    if mode == "overwrite" and (foreign := folder.foreign_files()):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ConfigError(
            "output.path",
            f"{folder.shown} holds {', '.join(foreign[:3])}{more}, which no run of ours wrote, and "
            "--overwrite will not delete it; move it away, or choose another output.path",
        )
    if mode == "overwrite" or not folder.exists():
        return None
    if mode == "fail":
        raise ConfigError(
            "output.path",
            f"{folder.shown} exists already; use --resume to go on with it, --overwrite to start anew, "
            "or another output.path",
        )
    state = folder.read_state()
    if state is None or not state.keys() >= IS_RUN:
        raise ConfigError("output.path", f"{folder.shown} exists but holds no run.json of a run to resume")
    return state


def has_all_rows(folder: RunFolder, state: RunState, log: Log) -> bool:
    """True if a finished run has its report, its OpenAI batch files, and the data files and rows that `run.json`
    counts."""
    try:
        files = folder.read_files(folder.all_data_files())
    except (OSError, pa.ArrowException):
        return False  # a torn file; who reads the rows names it
    there = {status: sum(int(files[name][0]) for name in files if f"/status={status}/" in name) for status in STATUSES}
    books = {"ok": state["books"]["ok"], "failed": state["books"]["failed"]}
    if books != there:
        log(f"{folder.shown}: finished before, but its data files hold {there} rows now, and its books say {books}")
        return False
    if state["files"] != files:
        log(f"{folder.shown}: finished before, but its data files are not those that its books were closed with")
        return False
    if not has_batch_files(folder, state):
        log(f"{folder.shown}: finished before, but its OpenAI batch files are not whole; they are made again")
        return False
    if not _has_report(folder, state):
        log(f"{folder.shown}: finished before, but its report.json is not whole; it is made again")
        return False
    if left := folder.unexpected_files("checkpoint"):
        log(f"{folder.shown}: finished before, but {left[0]} came late; it is removed")
        return False
    return True


def _has_report(folder: RunFolder, state: RunState) -> bool:
    """True if the counts in `report.json` are those of the books."""
    try:
        report = json.loads(folder.read_text("report.json") or "null")
    except ValueError:
        return False
    counted = (report.get("completed"), report.get("failed")) if isinstance(report, dict) else None
    return counted == (state["books"]["ok"], state["books"]["failed"])
