"""`python -m jobs.report OUT`: makes report.html and report.json again from the files of a run.

At any time: of a run that is not finished, the figures so far. With `--price-per-hour` (of all machines of the run
together) the report has the cost per million tokens. `--compare A B ...` sets runs side by side in one page, and leaves
their folders alone. In place of OUT a configuration may name the run folder (`--config FILE`, `output.path=OUT`). The
last line on stdout is one JSON document. Exit codes: 0 done; 2 not a run folder; 1 anything else.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_folder_parser, run_folder, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_folder_parser("report", __doc__)
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="two run folders or more, side by side")
    parser.add_argument("--price-per-hour", type=float, metavar="PRICE", help="what the run's machines cost per hour")
    parser.add_argument("-o", "--output-html", metavar="FILE", help="with --compare: the page to write (compare.html)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.compare and (arguments.overrides or arguments.config):
        parser.error("name one run folder, or --compare with two or more")
    if arguments.compare and len(arguments.compare) < 2:
        parser.error("--compare needs two run folders or more")
    if arguments.output_html and not arguments.compare:
        parser.error("--output-html goes with --compare; the page of one run is OUT/report.html")
    if arguments.price_per_hour is not None and not arguments.price_per_hour >= 0:
        parser.error(f"--price-per-hour: {arguments.price_per_hour} is no price")
    return arguments


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)))


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.report.compare import compare_runs
    from pipeline.report.figures import rebuild_report

    if arguments.compare:
        target = arguments.output_html or "compare.html"
        document = compare_runs(arguments.compare, target, arguments.price_per_hour, log)
        log(f"page: {target}")
        return document, OK
    output, _, _ = run_folder(arguments)
    folder, report = rebuild_report(output, arguments.price_per_hour)
    log(f"report: {folder.path('report.html')}\nfigures: {folder.path('report.json')}")
    return {"output": folder.root} | report, OK


if __name__ == "__main__":
    start(main)
