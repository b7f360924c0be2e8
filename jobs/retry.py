"""`python -m jobs.retry OUT [key=value ...]`: generates the failed rows of a finished run again.

Tried are rows that failed of something that can change: prompt_too_long, bad_parameters, poison_row, engine_error. What
may differ from the run: input.too_long, sampling.max_new_tokens, and whatever does not decide what a row becomes (paths
of the same files, actors.*, limits.*, baseline.*). It is said by `key=value`, or by a `--config FILE`, which may name
OUT too (output.path). The last line on stdout is one JSON document. Exit codes: 0 done, or nothing to retry; 2 nothing
was changed; 3 more rows failed than limits.max_failed_rows; 1 anything else.
"""

import argparse
import traceback

from jobs.cli import BAD_CONFIG, ERROR, OK, TOO_MANY_FAILED, add_run_folder, fail, note, result, run_folder, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.retry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_folder(parser)
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError
    from pipeline.generate.retry import retry

    try:
        output, tree, overrides = run_folder(parser, arguments)
        done = retry(output, tree, overrides, note)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted; the failed rows stay as they were, or the next jobs.retry ends the exchange", ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    report = done.run.report
    note(
        f"retry: {done.tried} rows tried again, {done.recovered} of them good now; "
        f"{report['completed']} rows ok, {report['failed']} failed"
    )
    result({"output": done.run.folder.root, "tried": done.tried, "recovered": done.recovered} | report)
    return TOO_MANY_FAILED if done.run.too_many_failed else OK


if __name__ == "__main__":
    start(main)
