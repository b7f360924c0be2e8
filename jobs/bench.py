"""Measure speed: skip schedules against full depth in one process, or HTTP servers under load.

    skipdecode bench --config configs/bench.yaml
    skipdecode bench shape=opt-1.3b batch_sizes=[16]
    skipdecode bench --serve --config configs/bench-serve.yaml

A table goes to stderr. Models have random weights of the given `shape` unless `source` names a checkpoint.
`fraction_of_roofline` and `speedup_decode_predicted` compare with the bandwidth and arithmetic measured on this device
at the start. Results so far: docs/results/speed.md and docs/results/serving.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, check_target, log, make_parser, run_verb, start, write_target


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "bench",
        __doc__,
        config="YAML file, e.g. configs/bench.yaml",
        overrides="configuration keys, e.g. shape=opt-1.3b batch_sizes=[16]",
    )
    parser.add_argument("--serve", action="store_true", help="measure HTTP servers under load and not the decoder")
    parser.add_argument("--output-json", metavar="FILE", help="also write the JSON document to this file")
    parser.add_argument(
        "--profile", action="store_true", help="measure the share of each stage of a decode step and not speed"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.serve and arguments.profile:
        parser.error("--profile measures the decoder, not servers; give either --serve or --profile")
    return arguments


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)))


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    target = check_target(arguments.output_json)
    if arguments.serve:
        from pipeline.bench.service import load_serve_bench_config, run_serve_bench

        document = run_serve_bench(load_serve_bench_config(arguments.config, arguments.overrides), log)
    else:
        from pipeline.bench.decoder import load_bench_config, run_bench

        config = load_bench_config(arguments.config, arguments.overrides)
        document = run_bench(config, log, profile=arguments.profile)
    write_target(target, document)
    return document, OK


if __name__ == "__main__":
    start(main)
