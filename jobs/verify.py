"""`python -m jobs.verify OUT`: proves from the files alone that a run lost no row and doubled none.

Every row of the input once, good or failed; nothing else there; files whole; counts equal to run.json and report.json.
In place of OUT and -i a configuration may name them (`--config FILE`, `output.path=OUT`, `input.path=IN`).
The last line on stdout is one JSON document. Exit codes: 0 all of it holds; 1 something does not (the list is on
stderr, the first 20 of each kind); 2 OUT is no run folder.
"""

import argparse
import traceback

from jobs.cli import BAD_CONFIG, ERROR, OK, add_run_folder, fail, note, result, run_folder, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_folder(parser)
    parser.add_argument("-i", "--input", action="append", metavar="PATH", help="where the input lies now (repeatable)")
    parser.add_argument("--no-input", action="store_true", help="check the output alone; the input may be gone")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError
    from pipeline.generate.verify import verify

    try:
        output, tree, _ = run_folder(parser, arguments)
        given = (tree.get("input") or {}).get("path")
        inputs = arguments.input or ([given] if isinstance(given, str) else given)
        verdict = verify(output, note, inputs, read_input=not arguments.no_input)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    for kind, count in verdict.problems.counts.items():
        note(f"{kind}: {count}")
        for text in verdict.problems.first[kind]:
            note(f"  {text}")
    problems = {
        kind: {"count": count, "first": verdict.problems.first[kind]} for kind, count in verdict.problems.counts.items()
    }
    proof = "every row of the input is there once" if verdict.input == "read" else "no id is there twice"
    note(
        f"verified: {proof}" if verdict.is_proven else f"not verified: {sum(verdict.problems.counts.values())} problems"
    )
    result(
        {
            "output": verdict.folder.root,
            "verified": verdict.is_proven,
            "input": verdict.input,
            "rows": verdict.rows,
            "problems": problems,
        }
    )
    return OK if verdict.is_proven else ERROR


if __name__ == "__main__":
    start(main)
