"""`python -m jobs.report OUT`: makes report.html and report.json again from the files of a run.

At any time: of a run that is not finished, the figures so far. With `--price-per-hour` (of all machines of the run
together) the report has the cost per million tokens. `--compare A B ...` sets runs side by side in one page, and leaves
their folders alone. In place of OUT a configuration may name the run folder (`--config FILE`, `output.path=OUT`). The
last line on stdout is one JSON document. Exit codes: 0 done; 2 not a run folder; 1 anything else.
"""

import argparse
import traceback

from jobs.cli import BAD_CONFIG, ERROR, OK, add_run_folder, fail, note, result, run_folder, start


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_folder(parser)
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="two run folders or more, side by side")
    parser.add_argument("--price-per-hour", type=float, metavar="PRICE", help="what the run's machines cost per hour")
    parser.add_argument("-o", "--output-html", metavar="FILE", help="with --compare: the page to write (compare.html)")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.compare and (arguments.words or arguments.config):
        parser.error("name one run folder, or --compare with two or more")
    if arguments.compare and len(arguments.compare) < 2:
        parser.error("--compare needs two run folders or more")
    if arguments.output_html and not arguments.compare:
        parser.error("--output-html goes with --compare; the page of one run is OUT/report.html")
    if arguments.price_per_hour is not None and not arguments.price_per_hour >= 0:
        parser.error(f"--price-per-hour: {arguments.price_per_hour} is no price")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)
    check(parser, arguments)
    from pipeline.config import ConfigError
    from pipeline.report.compare import compare_runs
    from pipeline.report.figures import rebuild_report

    try:
        if arguments.compare:
            target = arguments.output_html or "compare.html"
            document = compare_runs(arguments.compare, target, arguments.price_per_hour, note)
            note(f"page: {target}")
        else:
            output, _, _ = run_folder(parser, arguments)
            folder, report = rebuild_report(output, arguments.price_per_hour)
            document = {"output": folder.root} | report
            note(f"report: {folder.path('report.html')}\nfigures: {folder.path('report.json')}")
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    result(document)
    return OK


if __name__ == "__main__":
    start(main)
