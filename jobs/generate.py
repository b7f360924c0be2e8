"""`python -m jobs.generate`: a prompt corpus in, generated Parquet out.

Alone, or under `ray job submit --working-dir . -- python -m jobs.generate ...`. Progress goes to stderr; the last line
on stdout is one JSON document. Exit codes: 0 done; 2 bad configuration or input, nothing was started; 3 more rows
failed than limits.max_failed_rows allows, and the run ended there or at its end; 1 anything else.
"""

import argparse
import traceback
from typing import TYPE_CHECKING

from jobs.cli import BAD_CONFIG, ERROR, OK, TOO_MANY_FAILED, fail, note, result, start

if TYPE_CHECKING:
    from pipeline.generate.run import RunResult

EPILOG = """\
example: python -m jobs.generate --config configs/generate-cpu.yaml -i prompts/ -o outputs/run decode.speedup=3
sections of keys: model decode prefill sampling input output actors baseline limits; a wrong key is answered with the
known ones. `python -m jobs.doctor` with the same arguments says what would be chosen here, and what is wrong.
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.generate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    from pipeline.config import ConfigError, JobConfig, build_config, read_tree, set_key
    from pipeline.generate.ending import RunStopped, TooManyFailed
    from pipeline.generate.run import run

    try:
        tree = read_tree(arguments.config, arguments.overrides)
        for section, key, value in (
            ("input", "path", arguments.input),
            ("output", "path", arguments.output),
            ("output", "if_exists", "resume" if arguments.resume else "overwrite" if arguments.overwrite else None),
        ):
            if value is not None:
                set_key(tree, f"{section}.{key}", value)
        finished = run(build_config(JobConfig, tree), note)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted; what is written stays, --resume goes on with the run", ERROR)
    except TooManyFailed as error:
        return fail(f"{error}; good rows stay, --resume with a larger limit goes on with the run", TOO_MANY_FAILED)
    except RunStopped as error:
        return fail(error, ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    summarize(finished)
    result({"output": finished.folder.root, "was_finished": finished.was_finished} | finished.report)
    if finished.too_many_failed:
        note(
            f"exit code {TOO_MANY_FAILED}: {finished.report['failed']} rows failed, more than limits.max_failed_rows "
            f"allows; the good rows stay, the failed ones are in {finished.folder.path('data/status=failed')}"
        )
        return TOO_MANY_FAILED
    return OK


def summarize(finished: "RunResult") -> None:
    """The figures of a run in three lines, on stderr."""
    report, folder = finished.report, finished.folder
    if "speedup" not in report:  # the run is finished, its report could not be made
        note(f"done: {report['completed']} rows ok, {report['failed']} failed\ndata: {folder.path('data')}")
        return
    s, agreement = report["speedup"], report["agreement"]["token_match"]
    interval = f" (95 %: {s['ci95'][0]:.2f} to {s['ci95'][1]:.2f})" if s["ci95"] else ""
    note(
        f"done: {report['completed']} rows ok, {report['failed']} failed, "
        f"{report['output_throughput']:.0f} output tokens/s over the whole run, "
        f"{report['decode_output_throughput'] or 0:.0f} per second of decoding"
    )
    note(
        f"speedup over full depth: measured {_times(s['measured'])}{interval}, by layers {_times(s['layers'])}, "
        f"predicted {_times(s['predicted'])}; tokens as at full depth: "
        + ("not measured" if agreement is None else f"{100 * agreement:.1f} %")
    )
    if split := report["split_batches"]["count"]:
        note(f"{split} batches are parts of larger ones that failed: {report['split_batches']['first']}")
    note(f"data: {folder.path('data')}\nreport: {folder.path('report.html')}")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    start(main)
