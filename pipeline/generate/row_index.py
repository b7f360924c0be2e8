"""Matches the rows of the input with those of the data files by id, on the cluster: done, missing or duplicate.

Tasks read ids and put entries (`input.ids`) into the object store, which spills to disk; further tasks split them by
digest into parts of PART_ROWS, and match each part. So no process holds all rows: the driver keeps a bit per row and 16
bytes per duplicate. `benchmarks/resume.py` measures it. What follows from a match is up to `run`, `retry`, `verify`.
"""

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray
from numpy.typing import NDArray

from pipeline.config.job import ConfigError, InputConfig
from pipeline.formatting import Log
from pipeline.input.files import Listing
from pipeline.input.id_matching import DoneRows, Match, match, match_alone, split
from pipeline.input.ids import (
    ID_MODULUS,
    INPUT_ENTRY,
    OUTPUT_ENTRY,
    ROW_BITS,
    describe_location,
    hash_origin,
    input_entries,
    output_entries,
    sum_digests,
    sum_made_ids,
)
from pipeline.input.input_plan import InputPlan
from pipeline.input.scan import FileScan, scan_file

PART_ROWS = 4_000_000  # entries that one task matches, at about 150 bytes
MAX_GROUPS = (
    256  # tasks that read the files; with PART_ROWS, objects stay above the 100 KB that Ray keeps in the driver
)
BATCH_ROWS = 65536
LOG_S = 10.0
ID_COLUMNS = ["id", "error_code", "error_message"]

TASK = {"num_cpus": 1}

EntriesRef: TypeAlias = ray.ObjectRef
"""Entries of rows (`input.ids`) in the object store."""
T = TypeVar("T")


def scan_input(
    listing: Listing, config: InputConfig, index_all: bool, log: Log, sum_ids: bool = False
) -> tuple[list[FileScan], list[EntriesRef]]:
    """A scan per file, and references to the entries of the rows; the latter only if there are ids to compare.

    `index_all`: entries of rows with made ids too, as a resume needs them; `sum_ids`: sums of ids (`FileScan.id_sum`).
    ConfigError as of `scan_file`.
    """
    task = ray.remote(num_returns=2, **TASK)(_scan_group)
    held = ray.put(listing)
    groups = group_files([file.size_bytes for file in listing.files])
    refs = [task.remote(held, group, config, index_all, sum_ids) for group in groups]
    found: list[list[FileScan]] = gather([ref for ref, _ in refs], "input: scanned", log)
    scans = list(itertools.chain.from_iterable(found))
    has_own = any(scan.has_own_ids for scan in scans)
    if has_own and not all(scan.is_indexed for scan in scans):
        return scan_input(listing, config, True, log, sum_ids)  # somebody's id may look like a made one
    return scans, [entries for _, entries in refs] if has_own or index_all else []


def _scan_group(
    listing: Listing, indices: Sequence[int], config: InputConfig, index_all: bool, sum_ids: bool
) -> tuple[list[FileScan] | ConfigError, NDArray[np.void]]:
    scans, parts = [], [np.empty(0, INPUT_ENTRY)]
    for index in indices:
        try:
            scan, digests = scan_file(listing, index, config, index_all)
        except ConfigError as error:  # a value: of an exception Ray would print the traceback
            return error, parts[0]
        if sum_ids:
            is_whole, expand = len(digests) == scan.num_rows, listing.expansion.all_ids
            id_sum = sum_digests(digests) if is_whole else sum_made_ids(scan.file.name, scan.num_documents, expand)
            scan = replace(scan, id_sum=id_sum)
        scans.append(scan)
        parts.append(input_entries(digests, index))
    return scans, np.concatenate(parts)


def sum_input(plan: InputPlan, scans: Sequence[FileScan], config: InputConfig) -> int | None:
    """The sum of the ids of all rows of the plan; None where the scans have none."""
    total, task = 0, ray.remote(**TASK)(_sum_first)
    for index, (scan, count) in enumerate(zip(scans, plan.num_documents_per_file, strict=True)):
        if scan.id_sum is None:
            return None
        is_cut = 0 < count < scan.num_documents  # `input.limit` ends in this file
        total += ray.get(task.remote(plan.listing, index, config, count)) if is_cut else scan.id_sum if count else 0
    return total % ID_MODULUS


def _sum_first(listing: Listing, index: int, config: InputConfig, count: int) -> int:
    return sum_digests(scan_file(listing, index, config.model_copy(update={"limit": count}), index_all=True)[1])


def sum_duplicates(plan: InputPlan) -> int:
    """The sum of the ids of `duplicate_id` rows, as `ids.sum_outputs` counts them."""
    named = zip(plan.listing.files, plan.duplicates, strict=True)
    return sum(hash_origin(describe_location(file.name, int(row))) for file, rows in named for row in rows)


def index_outputs(
    filesystem: pafs.FileSystem, paths: Sequence[str], log: Log, without_codes: Collection[str] = ()
) -> tuple[int, list[EntriesRef]]:
    """How many rows the data files have, and references to their entries; rows with `without_codes` do not count."""
    task = ray.remote(num_returns=2, **TASK)(_index_group)
    groups = group_files([1] * len(paths))
    refs = [
        task.remote(filesystem, [(index, paths[index]) for index in group], frozenset(without_codes))
        for group in groups
    ]
    counts: list[int] = gather([ref for ref, _ in refs], "data: read the ids of", log)
    return sum(counts), [entries for _, entries in refs]


def _index_group(
    filesystem: pafs.FileSystem, files: Sequence[tuple[int, str]], without_codes: frozenset[str]
) -> tuple[int | ConfigError, NDArray[np.void]]:
    parts = [np.empty(0, OUTPUT_ENTRY)]
    for index, path in files:
        try:
            with pq.ParquetFile(filesystem.open_input_file(path)) as file:
                parts += _read_entries(file, index, without_codes)
        except (OSError, pa.ArrowException) as error:
            why = f"output.path: {path}: not a whole Parquet file ({error}); delete it, and its rows are made again"
            return ConfigError.parse(why), parts[0]
    entries = np.concatenate(parts)
    return len(entries), entries


def _read_entries(file: pq.ParquetFile, index: int, without_codes: frozenset[str]) -> Iterator[NDArray[np.void]]:
    first = 0
    for batch in file.iter_batches(BATCH_ROWS, columns=ID_COLUMNS):
        entries = output_entries(batch, index, first)
        first += len(entries)
        if without_codes:
            is_out = pc.is_in(batch["error_code"], value_set=pa.array(sorted(without_codes)))
            entries = entries[~np.asarray(is_out)]
        yield entries


def match_rows(
    plan: InputPlan | None,
    inputs: Sequence[EntriesRef],
    outputs: Sequence[EntriesRef],
    num_outputs: int = 0,
) -> Iterator[Match]:
    """Matches the rows of `plan` with those of the data files, part by part; without a plan the latter alone."""
    num_parts = max(1, -(-max(plan.num_rows if plan else 0, num_outputs) // PART_ROWS))
    cut = [[[ref] for ref in refs] if num_parts == 1 else _split_all(refs, num_parts) for refs in (inputs, outputs)]
    task = ray.remote(**TASK)(_match_part)
    files = (np.asarray(plan.num_rows_per_file), [file.name for file in plan.listing.files]) if plan else None
    held = ray.put(files)
    width = max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting: list[ray.ObjectRef] = []
    for part in range(num_parts):
        own, theirs = ([pieces[part] for pieces in side] for side in cut)
        waiting.append(task.remote(held, len(own), *own, *theirs))
        if len(waiting) == width:  # pending results fill the object store
            yield ray.get(waiting.pop(0))
    while waiting:
        yield ray.get(waiting.pop(0))


def _split_all(refs: Sequence[EntriesRef], num_parts: int) -> list[list[EntriesRef]]:
    task = ray.remote(num_returns=num_parts, **TASK)(split)
    return [task.remote(ref, num_parts) for ref in refs]


def _match_part(files: tuple[NDArray[np.void], list[str]] | None, num_inputs: int, *entries: NDArray[np.void]) -> Match:
    inputs = np.concatenate([np.empty(0, INPUT_ENTRY), *entries[:num_inputs]])
    outputs = np.concatenate([np.empty(0, OUTPUT_ENTRY), *entries[num_inputs:]])
    if files is None:
        return match_alone(outputs)
    num_rows_per_file, names = files
    rows = inputs["location"] & np.uint64(0xFFFFFFFF)
    limit = num_rows_per_file[(inputs["location"] >> ROW_BITS).astype(np.int64)]
    return match(inputs[rows < limit.astype(np.uint64)], outputs, names)  # input.limit may end within a file


def mark_rows(plan: InputPlan, matches: Iterator[Match]) -> tuple[InputPlan, DoneRows]:
    """The plan with its duplicates, and which rows are done; ConfigError where a row is done twice."""
    done = DoneRows(plan.num_rows_per_file)
    rows, firsts, num_doubled, num_unknown = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0, 0
    for part in matches:
        rows.append(part.duplicates)
        firsts.append(part.duplicate_of)
        done.add(part.done)
        num_doubled += part.num_doubled
        num_unknown += part.num_unknown
    if num_doubled or num_unknown:
        raise ConfigError(
            "output.path",
            f"the data files hold {num_doubled} rows twice and {num_unknown} rows that are not in the "
            "input; jobs.verify names them and their files. Delete those files: what is then missing is made again",
        )
    return plan.with_duplicates(np.concatenate(rows), np.concatenate(firsts)), done


def group_files(sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive files in at most MAX_GROUPS groups of about the same size."""
    if not len(sizes):
        return []
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64) + 1)
    group = (ends - 1) * MAX_GROUPS // ends[-1]
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    return [list(range(start, end)) for start, end in itertools.pairwise(cuts)]


def gather(refs: Sequence[ray.ObjectRef], what: str, log: Log) -> list[T]:
    """Results of tasks in order, with a log line now and then; raises the first ConfigError that one gave back."""
    left, logged_at = list(refs), time.monotonic()
    while left:
        _, left = ray.wait(left, num_returns=len(left), timeout=LOG_S, fetch_local=False)
        if left and time.monotonic() - logged_at >= LOG_S:
            logged_at = time.monotonic()
            log(f"{what} {len(refs) - len(left)} of {len(refs)} groups of files")
    results = []
    for ref in refs:
        result = ray.get(ref)
        if isinstance(result, ConfigError):
            raise result
        results.append(result)
    return results
