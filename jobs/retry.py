"""`python -m jobs.retry OUT [key=value ...]`: generates the failed rows of a finished run again.

Tried are rows that failed of something that can change: prompt_too_long, bad_parameters, poison_row, engine_error. What
may differ from the run: input.too_long, sampling.max_new_tokens, and whatever does not decide what a row becomes (paths
of the same files, actors.*, limits.*, baseline.*). It is said by `key=value`, or by a `--config FILE`, which may name
OUT too (output.path). The last line on stdout is one JSON document with the key figures, all of them are in
report.json. Exit codes: 0 done, or nothing to retry; 2 nothing was changed; 3 more rows failed than
limits.max_failed_rows; 1 anything else.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import log, make_folder_parser, run_folder, run_verb, start
from jobs.generate import ending


def main(argv: list[str] | None = None) -> int:
    arguments = make_folder_parser("retry", __doc__).parse_intermixed_args(argv)
    stays = "the failed rows stay as they were, or the next jobs.retry ends the exchange"
    return run_verb(partial(work, arguments), f"interrupted; {stays}")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.generate.retry import retry

    output, tree, overrides = run_folder(arguments)
    done = retry(output, tree, overrides, log)
    report = done.run.report
    log(
        f"retry: {done.tried} rows tried again, {done.recovered} of them good now; "
        f"{report['completed']} rows ok, {report['failed']} failed"
    )
    return ending(done.run, {"tried": done.tried, "recovered": done.recovered})


if __name__ == "__main__":
    start(main)
