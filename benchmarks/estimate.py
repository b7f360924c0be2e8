"""What `jobs.doctor` expects of a corpus beside what the run then takes: hours, tokens. On an idle machine.

    python -m benchmarks.estimate --output benchmarks/results/x.json

Three corpora of made prompts for the demo model: answers that end by themselves, answers of a fixed length, and two
templates with four samples of each. For each the estimate, made by a process of its own before the run, then the run.
`duration_ratio` is expected over measured; `live_ratio` is that of the run's own estimate, after its first rows. The
last line on stdout is one JSON document.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from pipeline.cluster.machine import provenance
from pipeline.demo.restaurant_prompts import make_prompts

TEMPLATES = '{"plain": "{{ prompt }}", "again": "{{ prompt }}, familyFriendly[yes]"}'
CORPORA: dict[str, tuple[float, list[str]]] = {  # documents for each of --rows, and what the run is told
    "answers that end": (1.0, []),
    "fixed length": (1.0, ["sampling.ignore_eos=true"]),
    "templates x n": (0.125, [f"input.templates={TEMPLATES}", "sampling.n=4", "sampling.temperature=0.7"]),
}


def call(verb: str, arguments: list[str]) -> dict[str, Any]:
    """The document of a verb; RuntimeError where it fails."""
    done = subprocess.run([sys.executable, "-m", f"jobs.{verb}", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"jobs.{verb} {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, rows: int, root: Path) -> dict[str, Any]:
    share, keys = CORPORA[name]
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    lines = (json.dumps(row) + "\n" for row in make_prompts(max(1, round(share * rows))))
    (folder / "in.jsonl").write_text("".join(lines), encoding="utf-8")
    arguments = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "run"), "decode.speedup=2", *keys]
    expected = call("doctor", arguments)["estimate"]
    call("generate", arguments)
    report = json.loads((folder / "run/report.json").read_text(encoding="utf-8"))
    live = report["estimate"]
    found = {
        "corpus": name,
        "rows": expected["rows"],
        "decoded_rows": expected["decoded_rows"],
        "expected_s": expected["duration_s"],
        "measured_s": report["duration_s"],
        "duration_ratio": expected["duration_s"] / report["duration_s"],
        "live_ratio": None if live is None else live["duration_ratio"],
        "output_tokens_ratio": expected["output_tokens"] / report["total_output_tokens"],
        "input_tokens_ratio": expected["input_tokens"] / report["total_input_tokens"],
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000, help="of each corpus: minutes on two cores (60000)")
    parser.add_argument("--corpora", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the document there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = [compare(name, arguments.rows, Path(root)) for name in arguments.corpora]
    packages = ("torch", "ray", "pyarrow")
    document = {
        "provenance": provenance(torch.device("cpu"), packages),
        "command": " ".join(sys.argv),
        "corpora": found,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
