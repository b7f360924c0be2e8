"""Prove from the files alone that a run lost no row and duplicated none.

    skipdecode verify outputs/run
    skipdecode verify outputs/run -i /mnt/moved/prompts.jsonl

Checks that every input row is present exactly once, generated or failed, that nothing else is there, that files are
whole, and that counts equal those of run.json and report.json. Exit code 1 means that something does not hold; stderr
lists the first 20 problems of each kind. Guide: docs/reliability.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import ERROR, OK, log, make_folder_parser, run_folder, run_verb, start


def main(argv: list[str] | None = None) -> int:
    parser = make_folder_parser("verify", __doc__)
    parser.add_argument(
        "-i", "--input", action="append", metavar="PATH", help="where the input is now; may be repeated (input.path)"
    )
    parser.add_argument("--no-input", action="store_true", help="check the output only, e.g. if the input is gone")
    return run_verb(partial(work, parser.parse_intermixed_args(argv)), "interrupted before verification was complete")


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
    proof = "every input row is present exactly once" if verdict.input == "read" else "no id is present twice"
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
