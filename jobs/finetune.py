"""`python -m jobs.finetune`: trains an OPT under skip schedules, so that one checkpoint serves every speed.

Runs on Ray Train, alone or under `ray job submit --working-dir . -- python -m jobs.finetune ...`. Pairs come from
Parquet, JSONL or CSV; the result is a Hugging Face OPT folder whose config.json carries the schedule that
`jobs.generate` takes by default, with training.json (what was done) and training/ (log, plot, checkpoints) beside it.
Progress goes to stderr; the last line on stdout is one JSON document. Exit codes: 0 done; 2 bad configuration or input,
nothing was started; 1 anything else.
"""

import argparse
import traceback
from typing import Any

from jobs.cli import BAD_CONFIG, ERROR, OK, fail, note, result, start


def training_parser(module: str, about: str | None, example: str, override: str) -> argparse.ArgumentParser:
    """The arguments of a training; `about` is its help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file, e.g. {example}")
    parser.add_argument("-o", "--output", metavar="PATH", help="the model folder: output.path")
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    exists.add_argument("--overwrite", action="store_true", help="start anew in the output folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted keys, e.g. {override}")
    return parser


def read_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration as it was given: file, overrides, flags. ConfigError."""
    from pipeline.config import read_tree, set_key

    tree: dict[str, Any] = read_tree(arguments.config, arguments.overrides)
    for key, value in (
        ("path", arguments.output),
        ("if_exists", "resume" if arguments.resume else "overwrite" if arguments.overwrite else None),
    ):
        if value is not None:
            set_key(tree, f"output.{key}", value)
    return tree


def train(tree: dict[str, Any]) -> int:
    """Trains what the configuration says; the exit code."""
    from pipeline.config import ConfigError, build_config
    from pipeline.training.config import FinetuneConfig
    from pipeline.training.finetune import finetune

    try:
        finished = finetune(build_config(FinetuneConfig, tree), note)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted; checkpoints that were written stay, --resume goes on from the last", ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    record, folder = finished.record, finished.folder
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in record["best"]["validation_loss"].items())
    note(f"best validation at step {record['best']['step']} of {record['steps']}: {losses}")
    note(f"model: {folder.root}\nlosses: {folder.training / 'loss.svg'}")
    result({"output": str(folder.root), "was_finished": finished.was_finished} | record)
    return OK


def main(argv: list[str] | None = None) -> int:
    parser = training_parser("jobs.finetune", __doc__, "configs/finetune-opt-e2e.yaml", "train.epochs=2")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError

    try:
        return train(read_arguments(arguments))
    except ConfigError as error:
        return fail(error, BAD_CONFIG)


if __name__ == "__main__":
    start(main)
