"""`python -m jobs.bench`: the decoder alone, schedules side by side; a table on stderr, one JSON document on stdout.

With `--serve`: endpoints under load, side by side (configs/bench-serve.yaml).
`fraction_of_roofline` and `speedup_decode_predicted` come from ceilings measured on this device at the start.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, check_target, log, make_parser, run_verb, start, write_target


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "bench",
        __doc__,
        config="YAML file, e.g. configs/bench-cpu.yaml",
        overrides="e.g. shape=opt-1.3b batch_sizes=[16]",
    )
    parser.add_argument("--serve", action="store_true", help="endpoints under load instead of the decoder alone")
    parser.add_argument("--output-json", metavar="FILE", help="write the document there too")
    parser.add_argument("--profile", action="store_true", help="instead: the share of each stage of a decode step")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.serve and arguments.profile:
        parser.error("--profile looks at the decoder alone, not at endpoints; leave --serve or --profile out")
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
