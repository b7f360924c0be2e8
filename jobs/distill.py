"""Give a model SwiftKV: train projections that fill the upper layers' KV cache from a lower layer.

    skipdecode distill --config configs/distill.yaml -o outputs/swiftkv
    skipdecode distill --config configs/distill.yaml -o outputs/swiftkv --resume

The model is its own teacher: only the new projections and their norm are trained, unless train.trainable=all. Use the
result with prefill.method=swiftkv. --init-only writes the projections untrained, which is enough to time them but not
to generate text; train.fit_pairs initialises keys and values by least squares. Keys are those of `finetune`.
Guide: docs/methods/swiftkv.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, output_keys, read_settings, run_verb, start
from jobs.finetune import INTERRUPTED, train, training_parser
from pipeline.formatting import Json


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("distill", __doc__, "configs/distill.yaml", "model.swiftkv.kv_layers=12")
    parser.add_argument("--init-only", action="store_true", help="write the untrained weights and stop")
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
        f"{document['output']}: SwiftKV from layer {shape['kv_layers']} on, K/V shared by {shape['group_size']}; "
        f"{document['new_parameters']:,} untrained parameters of {document['parameters']:,}"
    )
    return {**document}, OK


if __name__ == "__main__":
    start(main)
