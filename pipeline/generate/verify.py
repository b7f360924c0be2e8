"""`jobs.verify`: proves from the files alone that every row of a run is accounted for, or says what is wrong.

Row for row: every row of the input is there once, good or failed. An id belongs to the first row that has it; a later
row with the same id is a failed row of its own (`duplicate_id`), identified by its location. So "every id once" means
one row that is not a `duplicate_id`, and for each later row exactly one that is. It also checks that data files are
complete and have the run's columns, that no row contradicts itself, that there are no files which no run wrote, and
that the counts in `run.json` and `report.json` are right. It does not check whether the tokens are right. Memory use is
that of `row_index`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow.parquet as pq
import ray

from pipeline.cluster.pool import start_ray
from pipeline.config.input import stored_input
from pipeline.config.job import ConfigError, InputConfig, LimitsConfig, SamplingConfig, build_config
from pipeline.formatting import Json, Log, count
from pipeline.generate.fingerprint import compare_files, list_files
from pipeline.generate.openai_batch import FILES, read_lines_record
from pipeline.generate.row_index import TASK, EntriesRef, gather, group_files, match_rows, scan_input
from pipeline.generate.verify_files import NUM_SHOWN, FilesFound, Problems, check_files
from pipeline.input.expansion import Expansion
from pipeline.input.files import list_input
from pipeline.input.id_matching import Match
from pipeline.input.ids import describe_location, split_location
from pipeline.input.input_plan import InputPlan, plan_input
from pipeline.input.read import read_file
from pipeline.schema import score_schema
from pipeline.store.lease import may_live, read_lease
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import Books, LinesRecord, RunState

T = TypeVar("T")


@dataclass
class Verdict:
    """The result of a verification; `is_proven` if no problem was found."""

    folder: RunFolder
    rows: dict[str, int] = field(default_factory=dict)
    """Counted rows: of the input (if it was read), good, failed."""
    input: str = "left out"
    """read, changed, unreadable, or left out."""
    problems: Problems = field(default_factory=Problems)

    @property
    def is_proven(self) -> bool:
        return not self.problems.counts


def verify(path: str, log: Log, inputs: list[str] | None = None, read_input: bool = True) -> Verdict:
    """Checks the run folder `path`; raises ConfigError if there is none. `inputs`: the present paths of the input."""
    folder = RunFolder.open(path)
    state = folder.read_state()
    if state is None or not {"state", "books", "columns", "input", "config"} <= state.keys():
        raise ConfigError("", f"{path}: no run.json of a run, so not a run folder")
    verdict = Verdict(folder)
    _check_state(folder, state, verdict.problems)
    verdict.problems.add("stray", folder.unexpected_files())
    verdict.problems.add("count", _files_since(folder, state))
    start_ray(log)
    found, paths, outputs = _check_data(folder, state, log)
    verdict.problems.join(found.problems)
    verdict.rows = dict(found.num_rows)
    plan = None
    if read_input:
        tree = stored_input(state["config"]["input"]) | ({"path": list[Json](inputs)} if inputs else {})
        config = build_config(InputConfig, tree)
        plan, entries = _read_input(config, state, inputs is not None, verdict, log)
    num_outputs = sum(found.num_rows.values())
    if plan is None:
        _check_ids(folder, paths, match_rows(None, [], outputs, num_outputs), verdict)
        verdict.problems.add("count", _other_ids(state, found))
    else:
        verdict.rows["input"] = plan.num_rows
        missing = _check_ids(folder, paths, match_rows(plan, entries, outputs, num_outputs), verdict)
        verdict.problems.first["missing"] = _name_inputs(plan, config, missing)
    _check_counts(folder, state, found, verdict)
    return verdict


def _check_state(folder: RunFolder, state: RunState, problems: Problems) -> None:
    lease = read_lease(folder)
    if lease is not None and may_live(lease) and state["state"] != "finished":
        problems.add("state", [f"run {lease['session']} may be at work in this folder (process {lease['pid']} on "
                               f"{lease['host']}); what is checked may change"])  # fmt: skip
    if state["state"] == "committing":
        problems.add("state", ["a retry was cut off in its exchange of rows; jobs.retry or --resume ends it"])


def _files_since(folder: RunFolder, state: RunState) -> list[str]:
    """Data files that do not belong to the run: they came late, or no session of it wrote them."""
    reason = "its writer was late, and its rows are those of another session or attempt; --resume removes it"
    late = [f"{path}: {reason}" for path in folder.late_files(state)]
    unknown = folder.unattributed_files(state)
    return [*late, *(f"{path}: no session of this run wrote it; move it away" for path in unknown)]


def _other_ids(state: RunState, found: FilesFound) -> list[str]:
    """A problem if the ids are not those that `run.json` sums up. With the input at hand the rows are named instead."""
    recorded = state["ids"]["output"] if state["state"] == "finished" else None
    counted = f"{found.id_sum:032x}"
    return [] if recorded in (None, counted) else [f"run.json: the sum of all ids is {recorded}, counted {counted}"]


def _check_data(folder: RunFolder, state: RunState, log: Log) -> tuple[FilesFound, list[str], list[EntriesRef]]:
    """The contents of the data files, their paths, and references to the entries of their rows."""
    paths = folder.all_data_files()
    task = ray.remote(num_returns=2, **TASK)(check_files)
    groups = [[(index, paths[index]) for index in group] for group in group_files([1] * len(paths))]
    scores = score_schema(build_config(SamplingConfig, state["config"]["sampling"])).names
    refs = [task.remote(folder.filesystem, group, state["columns"], scores) for group in groups]
    total = FilesFound()
    checked: list[FilesFound] = gather([ref for ref, _ in refs], "data: checked", log)
    for found in checked:
        total.join(found)
    log(f"data: {total.num_rows['ok']} good and {total.num_rows['failed']} failed rows in {count(len(paths), 'file')}")
    return total, paths, [entries for _, entries in refs]


def _read_input(
    config: InputConfig, state: RunState, has_moved: bool, verdict: Verdict, log: Log
) -> tuple[InputPlan | None, list[EntriesRef]]:
    max_line_bytes = build_config(LimitsConfig, state["config"]["limits"]).max_line_bytes
    sampling = build_config(SamplingConfig, state["config"]["sampling"])
    expansion = Expansion.of(config, sampling)
    try:
        listing = list_input(config, max_line_bytes, expansion)
        scans, entries = scan_input(listing, config, True, log)
        plan = plan_input(listing, scans, config)
    except (ConfigError, OSError) as error:
        verdict.input = "unreadable"
        verdict.problems.add("input", [f"{error}; -i says where it lies now, --no-input checks the rest alone"])
        return None, []
    verdict.input = "read"
    before, now = state["input"]["files"], list_files(plan)
    if has_moved:  # a copy has times and etags of its own
        before, now = ([[name, size, None, None, rows] for name, size, _, _, rows in files] for files in (before, now))
    if differing := compare_files(before, now):
        verdict.input = "changed"
        verdict.problems.add("input", differing)
    log(f"input: {plan.describe()} in {count(len(listing.files), 'file')}, {verdict.input}")
    return plan, entries


def _check_ids(folder: RunFolder, paths: list[str], matches: Iterator[Match], verdict: Verdict) -> list[int]:
    """Adds the problems that the matches show; gives the positions of the first missing rows."""
    missing: list[int] = []
    for part in matches:
        verdict.problems.add("missing", [""] * len(part.missing), part.num_missing)
        missing += part.missing.tolist()
        for kind, rows, num_rows in (
            ("doubled", part.doubled, part.num_doubled), ("unknown", part.unknown, part.num_unknown)
        ):  # fmt: skip
            left = NUM_SHOWN - len(verdict.problems.first.get(kind, []))
            verdict.problems.add(kind, [_name_output(folder, paths, location) for location in rows[:left]], num_rows)
    return sorted(missing)[:NUM_SHOWN]


def _name_output(folder: RunFolder, paths: list[str], location: int) -> str:
    file, row = split_location(location)
    ids = pq.read_table(paths[file], columns=["id"], filesystem=folder.filesystem, partitioning=None)["id"]
    return f"{ids[row].as_py()!r} ({describe_location(paths[file], row)})"


def _name_inputs(plan: InputPlan, config: InputConfig, missing: list[int]) -> list[str]:
    """Ids and positions of input rows; `missing` is sorted."""
    names = []
    for file in sorted({split_location(location)[0] for location in missing}):
        wanted, first = [split_location(location)[1] for location in missing if split_location(location)[0] == file], 0
        for block in read_file(plan, file, config):
            here = [row for row in wanted if first <= row < first + len(block)]
            name = plan.listing.files[file].name
            names += [f"{block['id'][row - first].as_py()!r} ({describe_location(name, row)})" for row in here]
            first += len(block)
            if first > wanted[-1]:
                break
    return names


def _check_counts(folder: RunFolder, state: RunState, found: FilesFound, verdict: Verdict) -> None:
    """`run.json`, `report.json` and the batch files count what the data files hold."""
    counted = {"ok": found.num_rows["ok"], "failed": found.num_rows["failed"]}
    books: Books = {
        "ok": counted["ok"],
        "failed": counted["failed"],
        "input": verdict.rows.get("input", sum(counted.values())),
        "closed": True,
    }
    if state["books"]["ok"] is not None:  # a run that was cut off has not counted
        verdict.problems.add("count", _miscounts("run.json: books", {**state["books"]}, {**books}))
    if state["state"] not in ("finished", "committing"):
        done = f"{sum(counted.values()):,} of {state['books']['input']:,} rows"
        text = f"the run is {state['state']} at {done}; jobs.generate --resume goes on with it"
        verdict.problems.add("state", [text])
    if state["state"] == "finished":
        totals: dict[str, Json] = {
            "completed": counted["ok"],
            "failed": counted["failed"],
            "total_input_tokens": found.tokens["num_input_tokens"],
            "total_output_tokens": found.tokens["num_generated_tokens"],
            "errors": {**found.errors},
        }
        verdict.problems.add("count", _miscounts("report.json:", _read_report(folder), totals))
    if state["input"]["format"] == "openai_batch" and state["state"] == "finished":
        written = {name: read_lines_record(folder, name) for name in FILES.values()}
        lines = _miscounted_lines(written, counted, found)
        verdict.problems.add("count", lines or _changed_batch_files(written, state))


def _read_report(folder: RunFolder) -> Mapping[str, Json]:
    """Nothing where it cannot be read."""
    try:
        report = json.loads(folder.read_text("report.json") or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _changed_batch_files(written: Mapping[str, LinesRecord], state: RunState) -> list[str]:
    """Batch files whose contents are not those that the run wrote."""
    return [
        f"{name}: is not as it was written ({written[name]['bytes']} bytes, then {record['bytes']}); delete it, and "
        "--resume makes it again"
        for name, record in state.get("answers", {}).items()
        if written[name] != record
    ]


def _miscounted_lines(written: Mapping[str, LinesRecord], counted: Mapping[str, int], found: FilesFound) -> list[str]:
    """Problems if the batch files have not one line per row, or per line of the input where these have several rows."""
    lines = {status: written[name]["lines"] for status, name in FILES.items()}
    if found.num_documents is None:
        named = [(FILES[status], lines[status], counted[status], "row") for status in FILES]
    else:
        named = [(" and ".join(FILES.values()), sum(lines.values()), found.num_documents, "document")]
    return [f"{name}: {own} lines for {count(rows, word)}" for name, own, rows, word in named if own != rows]


def _miscounts(where: str, recorded: Mapping[str, T], counted: Mapping[str, T]) -> list[str]:
    wrong = [key for key, value in counted.items() if recorded.get(key) != value]
    return [f"{where} {key} is {recorded.get(key)!r}, counted {counted[key]!r}" for key in wrong]
