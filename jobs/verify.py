"""`python -m jobs.verify OUT`: proves from the files alone that a run lost no row and doubled none.

Every row of the input once, good or failed; nothing else there; files whole; counts equal to run.json and report.json.
In place of OUT and -i a configuration may name them (`--config FILE`, `output.path=OUT`, `input.path=IN`).
The last line on stdout is one JSON document. Exit codes: 0 all of it holds; 1 something does not (the list is on
stderr, the first 20 of each kind); 2 OUT is no run folder.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import ERROR, OK, log, make_folder_parser, run_folder, run_verb, start


def main(argv: list[str] | None = None) -> int:
    parser = make_folder_parser("verify", __doc__)
    parser.add_argument("-i", "--input", action="append", metavar="PATH", help="where the input lies now (repeatable)")
    parser.add_argument("--no-input", action="store_true", help="check the output alone; the input may be gone")
    return run_verb(partial(work, parser.parse_intermixed_args(argv)), "interrupted; nothing is proven")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import JobConfig, build_config
    from pipeline.config.tree import section_of
    from pipeline.generate.verify import verify

    output, tree, _ = run_folder(arguments)
    inputs = arguments.input
    if not inputs and section_of(tree, "input").get("path"):
        inputs = list(build_config(JobConfig, tree).input.path)
    verdict = verify(output, log, inputs, read_input=not arguments.no_input)
    counts, first = verdict.problems.counts, verdict.problems.first
    for kind, count in counts.items():
        log(f"{kind}: {count}")
        for text in first[kind]:
            log(f"  {text}")
    proof = "every row of the input is there once" if verdict.input == "read" else "no id is there twice"
    log(f"verified: {proof}" if verdict.is_proven else f"not verified: {sum(counts.values())} problems")
    document = {
        "output": verdict.folder.root,
        "verified": verdict.is_proven,
        "input": verdict.input,
        "rows": verdict.rows,
        "problems": {kind: {"count": count, "first": first[kind]} for kind, count in counts.items()},
    }
    return document, OK if verdict.is_proven else ERROR


if __name__ == "__main__":
    start(main)
