"""Rebuild the report of a run from its files, or compare runs side by side.

    skipdecode report outputs/run --price-per-hour 2.50
    skipdecode report --compare outputs/run-a outputs/run-b -o compare.html

Writes report.html and report.json into the run folder; while the run is unfinished they show the figures so far. With
a price per hour of all machines together, the report has the cost per million tokens. --compare changes no run folder.
Guide: docs/report.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_folder_parser, run_folder, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_folder_parser("report", __doc__)
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="compare two or more run folders")
    parser.add_argument("--price-per-hour", type=float, metavar="PRICE", help="of all machines together")
    parser.add_argument("-o", "--output-html", metavar="FILE", help="page that --compare writes (compare.html)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.compare and (arguments.overrides or arguments.config):
        parser.error("give either one run folder or --compare with two or more")
    if arguments.compare and len(arguments.compare) < 2:
        parser.error("--compare needs at least two run folders")
    if arguments.output_html and not arguments.compare:
        parser.error("--output-html needs --compare; the page of one run is RUN/report.html")
    if arguments.price_per_hour is not None and not arguments.price_per_hour >= 0:
        parser.error(f"--price-per-hour: {arguments.price_per_hour} is not a price")
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
