"""Train a model under skip schedules, so that one checkpoint serves every speed.

    skipdecode finetune --config configs/finetune-demo.yaml -o outputs/my-model
    skipdecode finetune --config configs/finetune-demo.yaml -o outputs/my-model --resume

Prompts and responses come from Parquet, JSON Lines or CSV. The result is a Hugging Face folder, or a LoRA adapter with
train.lora, whose configuration carries the schedule that `generate` then uses by default. On a cluster:
ray job submit --working-dir . -- python -m jobs.finetune ... Guide: docs/training.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, add_output, log, make_parser, output_keys, read_settings, run_verb, start
from pipeline.formatting import Json

INTERRUPTED = "interrupted; --resume continues from the last checkpoint"


def training_parser(verb: str, about: str | None, example: str, override: str) -> argparse.ArgumentParser:
    """The parser of `finetune` and `distill`; `example` and `override` go into the help."""
    parser = make_parser(
        verb, about, config=f"YAML file, e.g. {example}", overrides=f"configuration keys, e.g. {override}"
    )
    add_output(parser, "model folder")
    return parser


def train(tree: dict[str, Json]) -> tuple[dict[str, Any], int]:
    """Trains as configured and prints the result; returns the document and the exit code."""
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
    parser = training_parser("finetune", __doc__, "configs/finetune-demo.yaml", "train.epochs=2")
    return run_verb(partial(work, parser.parse_intermixed_args(argv)), INTERRUPTED)


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    return train(read_settings(arguments, output_keys(arguments)))


if __name__ == "__main__":
    start(main)
