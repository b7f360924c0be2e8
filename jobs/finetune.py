"""`python -m jobs.finetune`: trains a model under skip schedules, so that one checkpoint serves every speed.

Runs on Ray Train, alone or under `ray job submit --working-dir . -- python -m jobs.finetune ...`. Pairs come from
Parquet, JSONL or CSV; the result is a Hugging Face folder whose config.json carries the schedule that
`jobs.generate` takes by default, with training.json (what was done) and training/ (log, plot, checkpoints) beside it.
Progress goes to stderr; the last line on stdout is one JSON document. Exit codes: 0 done; 2 bad configuration or input,
nothing was started; 1 anything else.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, add_output, log, make_parser, output_keys, read_settings, run_verb, start
from pipeline.formatting import Json

INTERRUPTED = "interrupted; checkpoints that were written stay, --resume goes on from the last"


def training_parser(verb: str, about: str | None, example: str, override: str) -> argparse.ArgumentParser:
    """The arguments of a training; `about` is its help."""
    parser = make_parser(verb, about, config=f"YAML file, e.g. {example}", overrides=f"dotted keys, e.g. {override}")
    add_output(parser, "model folder")
    return parser


def train(tree: dict[str, Json]) -> tuple[dict[str, Any], int]:
    """Trains what the configuration says; the document and the exit code."""
    from pipeline.config.job import build_config
    from pipeline.training.config import FinetuneConfig
    from pipeline.training.finetune import finetune
    from skipdecode.checkpoint.lora_adapter import CONFIG_FILE

    finished = finetune(build_config(FinetuneConfig, tree), log)
    record, folder = finished.record, finished.folder
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in record["best"]["validation_loss"].items())
    log(f"best validation at step {record['best']['step']} of {record['steps']}: {losses}")
    is_adapter = (folder.root / CONFIG_FILE).is_file()
    what = f"adapter: {folder.root}   (model.adapter={folder.root})" if is_adapter else f"model: {folder.root}"
    log(f"{what}\nlosses: {folder.training / 'loss.svg'}")
    return {"output": str(folder.root), "was_finished": finished.was_finished} | record, OK


def main(argv: list[str] | None = None) -> int:
    parser = training_parser("finetune", __doc__, "configs/finetune-opt-e2e.yaml", "train.epochs=2")
    return run_verb(partial(work, parser.parse_intermixed_args(argv)), INTERRUPTED)


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    return train(read_settings(arguments, output_keys(arguments)))


if __name__ == "__main__":
    start(main)
