"""`python -m jobs.generate`: a prompt corpus in, generated Parquet out.

Alone, or under `ray job submit --working-dir . -- python -m jobs.generate ...`. Progress goes to stderr; the last line on
stdout is one JSON document. Exit codes: 0 done; 2 bad configuration or input, nothing was started; 3 finished, but more
rows failed than limits.max_failed_rows; 1 anything else.
"""

import argparse
import sys

from jobs.cli import BAD_CONFIG, ERROR, OK, TOO_MANY_FAILED, fail, note, result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; configs/ has examples")
    parser.add_argument(
        "-i", "--input", action="append", metavar="PATH", help="file, folder, pattern or URI (repeatable): input.path"
    )
    parser.add_argument("-o", "--output", metavar="PATH", help="the run folder: output.path")
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    exists.add_argument("--overwrite", action="store_true", help="start anew in the output folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys, e.g. decode.speedup=3")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    from pipeline.config import ConfigError, JobConfig, build_config, read_tree
    from pipeline.run import run

    try:
        tree = read_tree(arguments.config, arguments.overrides)
        for section, key, value in (
            ("input", "path", arguments.input),
            ("output", "path", arguments.output),
            ("output", "if_exists", "resume" if arguments.resume else "overwrite" if arguments.overwrite else None),
        ):
            if value is not None:
                tree[section] = {**(tree.get(section) or {}), key: value}
        finished = run(build_config(JobConfig, tree), note)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt as error:
        return fail(error, ERROR)
    except Exception as error:
        return fail(error, ERROR)
    report = finished.report
    s = report["speedup"]
    note(
        f"done: {report['completed']} ok, {report['failed']} failed, {report['output_throughput']:.0f} output tokens/s; "
        f"speedup measured {_times(s['measured'])}, layers {_times(s['layers'])}, predicted {_times(s['predicted'])}"
    )
    note(f"data: {finished.folder.path('data')}   report: {finished.folder.path('report.html')}")
    result({"output": finished.folder.root, "was_finished": finished.was_finished} | report)
    if finished.too_many_failed:
        note(
            f"exit code 3: {report['failed']} rows failed, more than limits.max_failed_rows allows; the good rows stay"
        )
        return TOO_MANY_FAILED
    return OK


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    sys.exit(main())
