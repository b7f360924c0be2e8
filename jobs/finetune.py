"""`python -m jobs.finetune`: trains an OPT under skip schedules, so that one checkpoint serves every speed.

First form: one process on one device. Pairs come from JSONL, CSV or Parquet; the result is a Hugging Face OPT folder
whose config.json carries the schedule that `jobs.generate` takes by default.
"""

import argparse
import json

from jobs.cli import BAD_CONFIG, fail, note, start
from jobs.cli import result as print_result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.finetune", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. configs/finetune-opt-e2e.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys, e.g. train.epochs=2")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError
    from pipeline.finetune import finetune, load_finetune_config

    try:
        config = load_finetune_config(arguments.config, arguments.overrides)
        result = finetune(config, report=lambda record: note(json.dumps(record)))
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    print_result(result)
    return 0


if __name__ == "__main__":
    start(main)
