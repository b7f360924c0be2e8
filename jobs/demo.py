"""`python -m jobs.demo` (`make demo`): the main job on the demo model, with a corpus made on the spot.

Writes the prompts as JSONL, generates, and prints five rows and the figures. Exit codes are those of jobs.generate.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from jobs.cli import make_parser, note, run_verb, start
from jobs.generate import ending, summarize


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("demo", __doc__, overrides="e.g. decode.speedup=5")
    parser.set_defaults(config="configs/demo.yaml")
    parser.add_argument("--rows", type=int, default=2400, help="prompts to make (2400)")
    parser.add_argument("--prompts", default="outputs/demo/prompts.jsonl", metavar="FILE", help="where they go")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; the next demo starts anew")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config import load_config

    started = time.monotonic()
    prompts = Path(arguments.prompts)
    config = load_config(arguments.config, [f"input.path={json.dumps(str(prompts))}", *arguments.overrides])
    write_prompts(prompts, arguments.rows)
    from pipeline.generate.run import run  # seconds, which a wrong key needs not
    from pipeline.store.samples import sample_rows

    finished = run(config, note)
    note("")
    for row in sample_rows(finished.folder, 5):
        note(f"  {row['id']}  {row['prompt']}\n      -> {row['generated_text']}\n")
    summarize(finished)
    note(f"the whole demo took {time.monotonic() - started:.0f} s")
    return ending(finished, {"was_finished": finished.was_finished})


def write_prompts(path: Path, rows: int) -> None:
    from pipeline.demo_corpus import make_prompts

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in make_prompts(rows)]
    path.write_text("".join(lines), encoding="utf-8")
    note(f"prompts: {path} ({rows} rows)")


if __name__ == "__main__":
    start(main)
