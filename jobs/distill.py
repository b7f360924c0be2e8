"""`python -m jobs.distill`: gives a model SwiftKV's weights and teaches them to stand for what they replace.

The model itself is the teacher and stays as it is: only the new projections and their norm are trained (on Ray Train,
as `python -m jobs.finetune`, with the same keys and another recipe for defaults), and `prefill.method=swiftkv` runs
them. `--init-only` writes them as they are taken from the model: to time and to test, not to read. With
`train.trainable=all` and several `train.schedules` everything is trained at once, and `model.teacher` teaches.
`train.fit_pairs` lets keys and values begin where least squares has them, with `--init-only` too.
Progress goes to stderr; the last line on stdout is one JSON document. Exit codes: 0 done; 2 bad configuration or input,
nothing was started; 1 anything else.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, output_keys, read_settings, run_verb, start
from jobs.finetune import INTERRUPTED, train, training_parser
from pipeline.formatting import Json


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("distill", __doc__, "configs/distill-swiftkv-e2e.yaml", "model.swiftkv.kv_layers=12")
    parser.add_argument("--init-only", action="store_true", help="write the weights that training starts from")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.init_only and (arguments.resume or arguments.overwrite):
        parser.error("--init-only writes a new folder; it takes neither --resume nor --overwrite")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    return run_verb(partial(work, arguments), "interrupted" if arguments.init_only else INTERRUPTED)


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.training.distill import with_defaults

    tree = with_defaults(read_settings(arguments, output_keys(arguments)))
    return init(tree) if arguments.init_only else train(tree)


def init(tree: dict[str, Json]) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import build_config
    from pipeline.training.config import FinetuneConfig
    from pipeline.training.distill import init_swiftkv

    document = init_swiftkv(build_config(FinetuneConfig, tree), log)
    shape = document["swiftkv"]
    log(
        f"{document['output']}: layers from {shape['kv_layers']} on take K/V from below, by {shape['group_size']}; "
        f"{document['new_parameters']:,} new parameters of {document['parameters']:,}, not trained"
    )
    return {**document}, OK


if __name__ == "__main__":
    start(main)
