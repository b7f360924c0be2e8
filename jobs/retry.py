"""Generate the failed rows of a finished run again.

    skipdecode retry outputs/run
    skipdecode retry outputs/run input.too_long=truncate_left

Only rows that could succeed this time are tried: prompt_too_long, bad_parameters, poison_row and engine_error. You may
change input.too_long, sampling.max_new_tokens and whatever does not affect the text of a row (paths of the same files,
actors.*, limits.*, baseline.*). Guide: docs/reliability.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import log, make_folder_parser, run_folder, run_verb, start
from jobs.generate import document_and_exit_code


def main(argv: list[str] | None = None) -> int:
    arguments = make_folder_parser("retry", __doc__).parse_intermixed_args(argv)
    return run_verb(partial(work, arguments), "interrupted; no row is lost, call retry again")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.generate.retry import retry

    output, tree, overrides = run_folder(arguments)
    done = retry(output, tree, overrides, log)
    report = done.run.report
    log(
        f"retry: {done.recovered} of {done.tried} rows recovered; the run now has {report['completed']} rows ok and "
        f"{report['failed']} failed"
    )
    return document_and_exit_code(done.run, {"tried": done.tried, "recovered": done.recovered})


if __name__ == "__main__":
    start(main)
