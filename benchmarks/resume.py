"""What a resume costs before the first row is decoded, for millions of rows: seconds and memory of the driver.

    python -m benchmarks.resume --rows 1000000,10000000 --output benchmarks/results/x.json

Makes a Parquet input with string ids and a run folder in which half of the rows are done, then does what
`jobs.generate --resume` does: scan, index, match; and reads what is left with nothing behind it (the trivial decoder).
The last line on stdout is one JSON document.
"""

import argparse
import datetime
import json
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from pipeline.cluster.pool import num_cores, start_ray
from pipeline.config.job import InputConfig
from pipeline.generate.row_index import TASK, index_outputs, mark_rows, match_rows, scan_input
from pipeline.input.files import list_input
from pipeline.input.ids import INPUT_ENTRY, OUTPUT_ENTRY
from pipeline.input.input_plan import plan_input
from pipeline.input.read import read_rest
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.store.run_folder import RunFolder

ROWS_PER_INPUT, ROWS_PER_OUTPUT = 100_000, 10_000


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_files(root: Path, num_rows: int) -> None:
    """`in/*.parquet` with every row, `run/data/status=ok/*.parquet` with every second one."""
    (root / "in").mkdir()
    (root / "run/data/status=ok").mkdir(parents=True)
    for first in range(0, num_rows, ROWS_PER_INPUT):
        numbers = range(first, min(first + ROWS_PER_INPUT, num_rows))
        ids = [f"row-{number:012d}" for number in numbers]
        pq.write_table(pa.table({"id": ids, "prompt": ["hello"] * len(ids)}), root / f"in/{first:012d}.parquet")
        done = ids[::2]
        for at in range(0, len(done), ROWS_PER_OUTPUT):
            some = done[at : at + ROWS_PER_OUTPUT]
            columns = {
                name: [""] * len(some) for name in OUTPUT_SCHEMA.names if OUTPUT_SCHEMA.field(name).type == "string"
            }
            columns |= {"id": some, "num_input_tokens": [1] * len(some), "num_generated_tokens": [1] * len(some)}
            columns |= {"generated_tokens": [[5]] * len(some)}
            columns |= {name: [0] * len(some) for name in ("layers_run", "ffns_run")}
            table = pa.table(columns).select(OUTPUT_SCHEMA.names).cast(OUTPUT_SCHEMA)
            pq.write_table(table, root / f"run/data/status=ok/part-{first + at:012d}.parquet")


def memory_mib(key: str) -> float:
    """Of this process: VmRSS, what is resident now, or VmHWM, the peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def measure(root: Path) -> dict[str, Any]:
    """Seconds of each step, and what the driver grew by."""
    config = InputConfig(path=(str(root / "in"),))
    folder = RunFolder.open(str(root / "run"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, times, started = memory_mib("VmRSS"), {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        times[name], started = time.perf_counter() - started, time.perf_counter()

    listing = list_input(config)
    scans, entries = scan_input(listing, config, True, log)
    plan = plan_input(listing, scans, config)
    lap("scan_s")
    paths = folder.all_data_files()
    num_outputs, outputs = index_outputs(folder.filesystem, paths, log)
    lap("index_s")
    plan, done = mark_rows(plan, match_rows(plan, entries, outputs, num_outputs))
    lap("match_s")
    driver = memory_mib("VmHWM") - before
    read = ray.remote(**TASK)(
        lambda plan, done, index: sum(len(block) for block in read_rest(plan, done, index, config))
    )
    held = ray.put(plan), ray.put(done)
    left = sum(ray.get([read.remote(*held, index) for index in range(len(listing.files))]))
    lap("read_s")
    assert (done.num_rows, left) == (num_outputs, plan.num_rows - num_outputs), "half is done, the other half is read"
    return times | {
        "rows": plan.num_rows,
        "done": done.num_rows,
        "driver_peak_growth_mib": driver,
        "driver_peak_mib": memory_mib("VmHWM"),
        "index_bytes_per_million": 1e6 * (INPUT_ENTRY.itemsize + OUTPUT_ENTRY.itemsize / 2),
        "driver_bitmap_bytes": int(done._bits.nbytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000000", help="one number or several, with commas")
    parser.add_argument("--output", help="JSON file to write")
    arguments = parser.parse_args()
    start_ray()
    results = []
    for num_rows in map(int, arguments.rows.split(",")):
        root = Path(tempfile.mkdtemp(prefix="resume-"))
        try:
            ray.get(ray.remote(make_files).remote(root, num_rows))
            results.append(measure(root))
            log(json.dumps(results[-1]))
        finally:
            shutil.rmtree(root)
    document = {
        "command": "python -m benchmarks.resume " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": f"{num_cores()} cores, {platform.machine()}",
        "versions": {"ray": ray.__version__, "pyarrow": pa.__version__, "numpy": np.__version__},
        "results": results,
    }
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
