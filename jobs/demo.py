"""`python -m jobs.demo` (`make demo`): the main job on the demo model, with a corpus made on the spot.

Writes the prompts as JSONL, generates, and prints five rows and the figures.
"""

import argparse
import json
import time
from pathlib import Path

from jobs.cli import BAD_CONFIG, OK, fail, note, result, start
from jobs.generate import summarize


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.demo", description=__doc__)
    parser.add_argument("--config", default="configs/demo.yaml", metavar="FILE")
    parser.add_argument("--rows", type=int, default=2400, help="prompts to make (2400)")
    parser.add_argument("--prompts", default="outputs/demo/prompts.jsonl", metavar="FILE", help="where they go")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. decode.speedup=5")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError, load_config
    from pipeline.demo_corpus import make_prompts
    from pipeline.generate.run import run
    from pipeline.store.samples import sample_rows

    started = time.monotonic()
    prompts = Path(arguments.prompts)
    prompts.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in make_prompts(arguments.rows)]
    prompts.write_text("".join(lines), encoding="utf-8")
    note(f"prompts: {prompts} ({arguments.rows} rows)")
    try:
        finished = run(load_config(arguments.config, [f"input.path={prompts}", *arguments.overrides]), note)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    note("")
    for row in sample_rows(finished.folder, 5):
        note(f"  {row['id']}  {row['prompt']}\n      -> {row['generated_text']}\n")
    summarize(finished)
    note(f"the whole demo took {time.monotonic() - started:.0f} s")
    result({"output": finished.folder.root} | finished.report)
    return OK


if __name__ == "__main__":
    start(main)
