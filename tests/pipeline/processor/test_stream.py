"""A million rows through a processor: the driver's memory does not grow with their number. The decoder is trivial."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]
FEW, MANY = 100_000, 1_000_000
GROWTH_MIB = 64  # of the peak: books of Ray Data's own, of some bytes a block

SCRIPT = """
import json, sys, threading, time
from collections.abc import Sequence
import pyarrow as pa, ray
from pathlib import Path
from pipeline.processor import build, build_processor
from tests.support.trivial_decoder import TrivialStage

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20)
        time.sleep(0.05)

threading.Thread(target=watch, daemon=True).start()
build.ProcessorStage = TrivialStage
ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
num_rows = int(sys.argv[2])
def prompts(table):
    return table.append_column("prompt", pa.array([f"name[{n}]" for n in table["id"].to_pylist()]))
rows = ray.data.range(num_rows).map_batches(prompts, batch_format="pyarrow")
config = {"model": {"source": sys.argv[1]}, "decode": {"method": "full"}, "sampling": {"max_new_tokens": 1},
          "actors": {"num_actors": 1, "num_cpus": 1}}
count = total = good = 0
for batch in build_processor(config)(rows).iter_batches(batch_size=8192, batch_format="pyarrow"):
    count += batch.num_rows
    total += sum(map(int, batch["id"].to_pylist()))
    good += sum(not code for code in batch["error_code"].to_pylist())
print(json.dumps({"rows": count, "total": total, "good": good, "peak_mib": peak}))
"""


def stream(model: Path, num_rows: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(num_rows)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert (found["rows"], found["good"], found["total"]) == (num_rows, num_rows, num_rows * (num_rows - 1) // 2)
    return found


def test_the_driver_does_not_grow_with_the_rows(tiny_checkpoint: Path) -> None:
    few, many = stream(tiny_checkpoint, FEW), stream(tiny_checkpoint, MANY)
    assert many["peak_mib"] - few["peak_mib"] < GROWTH_MIB, (few, many)
