"""Idle time at the end of a run on a skewed corpus, with and without sharing what is left over.

`python benchmarks/tail.py OUT.json [--repeats 3]` runs `jobs.generate` on the demo model in turn without
(`actors.share_leftovers=false`: whoever is done stands still) and with. The last tenth of the prompts is six times as
long, as in a corpus sorted by length. One line per run on stderr; a file that is there gets the new runs too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

KEYS = [
    "decode.speedup=2", "actors.num_actors=2", "actors.batch_size=64", "baseline.fraction=0",
    "sampling.ignore_eos=true", "sampling.max_new_tokens=48",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="OUT.json")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    import torch

    from pipeline.cluster.machine import provenance
    from pipeline.demo.restaurant_prompts import make_prompts

    runs = json.loads(arguments.target.read_text())["runs"] if arguments.target.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "skewed.jsonl"
        rows = list(make_prompts(arguments.rows))
        for row in rows[-arguments.rows // 10 :]:
            row["prompt"] = f"{row['prompt']} " * 6
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for repeat in range(arguments.repeats):
            for shares in ("false", "true") if repeat % 2 == 0 else ("true", "false"):
                runs.append(one_run(source, Path(folder) / "run", shares))
    medians = {
        name: statistics.median(run["tail"]["idle_share"] for run in runs if run["share_leftovers"] == name)
        for name in ("false", "true")
    }
    document = provenance(torch.device("cpu"), ("torch", "ray")) | {
        "rows": arguments.rows, "keys": KEYS, "idle_share_median": medians, "runs": runs,
    }  # fmt: skip
    arguments.target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def one_run(source: Path, output: Path, shares: str) -> dict[str, object]:
    command = [
        sys.executable, "-m", "jobs.generate", "--overwrite", "-i", str(source), "-o", str(output), *KEYS,
        f"actors.share_leftovers={shares}",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["books"]["closed"]
    found = {"share_leftovers": shares, "tail": report["tail"], "duration_s": report["duration_s"]}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
