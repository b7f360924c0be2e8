"""`python -m jobs.bench`: the decoder alone, schedules side by side; a table on stderr, one JSON document on stdout.

With `--serve`: endpoints under load, side by side (configs/bench-serve.yaml).
`fraction_of_roofline` and `speedup_decode_predicted` come from ceilings measured on this device at the start.
"""

import argparse
import json
from pathlib import Path

from jobs.cli import BAD_CONFIG, OK, fail, note, result, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.bench", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file, e.g. configs/bench-cpu.yaml")
    parser.add_argument("--serve", action="store_true", help="endpoints under load instead of the decoder alone")
    parser.add_argument("--output-json", metavar="FILE", help="write the document there too")
    parser.add_argument("--profile", action="store_true", help="instead: the share of each stage of a decode step")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. shape=opt-1.3b batch_sizes=[16]")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.bench.decoder import load_bench_config, run_bench
    from pipeline.config import ConfigError

    target = Path(arguments.output_json) if arguments.output_json else None
    if target and (target.is_dir() or not target.parent.is_dir()):  # not after an hour of measuring
        return fail(f"--output-json {target}: not a file in an existing folder", BAD_CONFIG)
    try:
        if arguments.serve:
            from pipeline.bench.service import load_serve_bench_config, run_serve_bench

            document = run_serve_bench(load_serve_bench_config(arguments.config, arguments.overrides), note)
        else:
            config = load_bench_config(arguments.config, arguments.overrides)
            document = run_bench(config, note, profile=arguments.profile)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    if target:
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    result(document)
    return OK


if __name__ == "__main__":
    start(main)
