"""What the pipeline costs beside the decoder, and whether that depends on the size of the corpus.

    python -m benchmarks.overhead --rounds 3 --corpus 10000,100000,1000000 --output benchmarks/results/x.json

`steady`: output tokens per second of a real `jobs.generate` after its first window, in which tasks and pages are still
new, over those of the same `Generator` called in this process with the same windows, in turns: with nothing beside it,
and beside a Ray that was started as the job starts it and has nothing to do, so that what Ray takes and what the
pipeline adds are told apart; of the demo model, or of a released shape with random weights; with all cores or, as where
a host has some to spare, `--threads` of them.
`corpus`: a job with a decoder that only sleeps (`sleeping_decoder`), `--repeats` times in turns, medians: seconds per
row after the first window, of which the decoder sleeps 200 us; CPU time of the whole machine, which must be quiet, per
row, from the same moment on; and the peak of the driver's memory. The last line on stdout is one JSON document.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.measuring.bench import random_model
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import save_model
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.families import OPTConfig, released

MODEL = "models/opt-e2e"
SETTLE_S = 10.0  # until an idle Ray has started all that it starts
BATCHES_PER_WINDOW = 4  # as the workers take them on a CPU
STEADY = ["decode.speedup=3", "sampling.max_new_tokens=64", "sampling.ignore_eos=true", "actors.num_actors=1"]


def generate(root: Path, *overrides: str, job: str = "jobs.generate") -> tuple[Path, float, list[tuple[float, float]]]:
    """A whole job of its own, on the CPU; its run folder, the peak of the driver's memory in MiB, and the seconds of
    CPU time that the machine had used at points of `time.time()`."""
    target = root / "run"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", job, "-i", str(root / "in"), "-o", str(target)]
    used: list[tuple[float, float]] = []
    with (root / "log").open("w") as log:
        driver = subprocess.Popen(
            [*command, "baseline.fraction=0", "actors.num_gpus=0", *overrides], stdout=log, stderr=log
        )
        peak = 0.0
        while driver.poll() is None:
            peak = max(peak, peak_mib(driver.pid))
            used.append((time.time(), cpu_s()))
            time.sleep(0.2)
    assert driver.returncode == 0, (root / "log").read_text()[-3000:]
    return target, peak, used


def cpu_s() -> float:
    user, nice, system, _idle, _iowait, irq, softirq = Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    except (OSError, StopIteration):
        return 0.0


def windows(run: Path) -> list[dict[str, Any]]:
    rows = [row for path in run.glob("metrics/windows-*.parquet") for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: row["ended_at"])


def pipeline_rate(run: Path) -> float:
    """Output tokens per second between the end of the first window and that of the last one; all rows have as many."""
    tables = [pq.read_table(path, columns=["num_generated_tokens"]) for path in run.glob("data/status=ok/*.parquet")]
    (per_row,) = pc.unique(pa.concat_tables(tables)["num_generated_tokens"]).to_pylist()
    first, *later = windows(run)
    assert sum(row["failed"] for row in (first, *later)) == 0
    return float(per_row * sum(row["rows"] for row in later) / (later[-1]["ended_at"] - first["ended_at"]))


def save_random(config: DecoderConfig, folder: Path) -> None:
    """A checkpoint with the demo model's tokenizer."""
    save_model(random_model(config, device="cpu", dtype=torch.float32), folder)
    shutil.copy(Path(MODEL) / "tokenizer.json", folder / "tokenizer.json")


def steady(rounds: int, num_rows: int, shape: str | None, batch_size: int, threads: int) -> dict[str, Any]:
    assert num_rows >= 2 * BATCHES_PER_WINDOW * batch_size, "give --rows for two windows at least"
    rows = list(make_prompts(num_rows))
    root = Path(tempfile.mkdtemp(prefix="overhead-"))
    rates: dict[str, list[float]] = {"pipeline": [], "decoder": [], "decoder beside an idle Ray": []}
    source = str(root / "model") if shape else MODEL
    own = [f"model.source={source}", f"actors.num_cpus={threads}", f"actors.batch_size={batch_size}"]
    try:
        if shape:
            save_random(released(shape), root / "model")
        (root / "in").mkdir()
        pq.write_table(pa.Table.from_pylist(rows), root / "in/rows.parquet")
        for turn in range(rounds):
            for what in list(rates) if turn % 2 == 0 else list(rates)[::-1]:
                if what == "pipeline":
                    rate = pipeline_rate(generate(root, *own, *STEADY)[0])
                else:
                    with nullcontext() if what == "decoder" else idle_ray():
                        rate = decoder_rate(rows, source, batch_size, threads)
                rates[what].append(rate)
                print(f"{what}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root)
    job, alone, beside = rates.values()
    ratios = [a / b for a, b in zip(job, alone, strict=True)]
    to_idle = [a / b for a, b in zip(job, beside, strict=True)]
    setting = {"model": shape or MODEL, "batch_size": batch_size, "threads": threads, "rows": num_rows}
    medians = {"pipeline_over_decoder": median(ratios), "pipeline_over_decoder_beside_an_idle_ray": median(to_idle)}
    return setting | {"tokens_per_s": rates, "ratios": ratios, "ratios_beside_an_idle_ray": to_idle} | medians


@contextmanager
def idle_ray() -> Iterator[None]:
    """One of its own, which has settled, with a driver that waits."""
    code = "import sys; from pipeline.cluster.pool import start_ray; start_ray(); print('up', flush=True); "
    "sys.stdin.read()"
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin
    assert driver.stdout
    try:
        assert driver.stdout.readline() == "up\n", "Ray did not start"
        time.sleep(SETTLE_S)
        yield
    finally:
        driver.stdin.close()
        driver.wait()


def decoder_rate(rows: list[dict[str, str]], source: str, batch_size: int, threads: int) -> float:
    decode = {"method": "skipdecode", "speedup": 3.0}
    generator = Generator(
        GeneratorConfig(source=source, decode=decode, batch_size=batch_size, num_threads=threads, device="cpu")
    )
    tokens = generator.tokenizer.encode([row["prompt"] for row in rows])
    sampling = Sampling(max_new_tokens=64, ignore_eos=True)
    requests = [Request(row["id"], ids, sampling) for row, ids in zip(rows, tokens, strict=True)]
    size = BATCHES_PER_WINDOW * batch_size
    generator(requests[:size])
    start = time.perf_counter()
    results = [generator(requests[at : at + size]) for at in range(size, len(requests), size)]
    seconds = time.perf_counter() - start
    return sum(len(answer.tokens) for result in results for answer in result.answers) / seconds  # type: ignore[union-attr]


def corpus(num_rows: int) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="overhead-"))
    try:
        (root / "in").mkdir()
        for first in range(0, num_rows, 100_000):
            numbers = range(first, min(first + 100_000, num_rows))
            columns = {"id": [f"row-{n:09d}" for n in numbers], "prompt": [f"name[{n}]" for n in numbers]}
            pq.write_table(pa.table(columns), root / f"in/{first:09d}.parquet")
        config = read_config(Path(MODEL))
        small = {"hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 1}
        shape = {key: value for key, value in config.to_dict().items() if key in ("vocab_size", "bos_token_id")}
        tiny = OPTConfig(**(shape | small))
        save_random(tiny, root / "model")
        more = ["decode.method=full", "sampling.max_new_tokens=1", "actors.num_actors=1"]
        start = time.perf_counter()
        run, peak, used = generate(root, f"model.source={root / 'model'}", *more, job="benchmarks.sleeping_decoder")
        whole_s, spans = time.perf_counter() - start, windows(run)
        first = spans[0]
        steady_s = spans[-1]["ended_at"] - first["ended_at"]
        later = num_rows - first["rows"]
        assert later > 0, f"{num_rows} rows are one window, give more"
        times, seconds = zip(*used, strict=True)
        cpu = np.interp([first["ended_at"], spans[-1]["ended_at"]], times, seconds)
    finally:
        shutil.rmtree(root)
    row = {
        "rows": num_rows,
        "whole_s": whole_s,
        "us_per_row": 1e6 * steady_s / later,
        "cpu_us_per_row": 1e6 * float(cpu[1] - cpu[0]) / later,
        "driver_peak_mib": peak,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def compare_corpora(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Each size in turns; the median of each, by the number of rows."""
    runs = [corpus(size) for _ in range(repeats) for size in sizes]
    figures = ("whole_s", "us_per_row", "cpu_us_per_row", "driver_peak_mib")
    medians = {
        size: {name: median(run[name] for run in runs if run["rows"] == size) for name in figures} for size in sizes
    }
    return {"runs": runs, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000, help="of the steady state")
    parser.add_argument("--shape", help="of the steady state, e.g. opt-125m; without: the demo model")
    parser.add_argument("--batch-size", type=int, default=128, help="of the steady state")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the steady state")
    parser.add_argument("--corpus", default="10000,100000,1000000", help="rows; without any: only the steady state")
    parser.add_argument("--repeats", type=int, default=3, help="of each corpus")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    document = provenance(torch.device("cpu")) | {
        "command": "python -m benchmarks.overhead " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    if arguments.rounds:
        setting = (arguments.rows, arguments.shape, arguments.batch_size, arguments.threads)
        document["steady"] = steady(arguments.rounds, *setting)
    if arguments.corpus:
        document["corpus"] = compare_corpora([int(size) for size in arguments.corpus.split(",")], arguments.repeats)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
