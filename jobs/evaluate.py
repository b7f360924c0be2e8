"""`python -m jobs.evaluate`: how good generated text is, and what it costs to make it faster.

`jobs.evaluate RUN --references FILE` scores a run of `jobs.generate` (or a Parquet file or folder with `prompt` and
`generated_text`): BLEU, chrF, ROUGE, E2E slots, and the perplexity of the references under the run's own policy.
`jobs.evaluate --sweep --config FILE` decodes one set of prompts with many models and schedules; table and plot.
A table on stderr, one JSON document on stdout. Exit codes: 0 done; 2 bad configuration or input; 1 anything else.
"""

import argparse
import shlex
import sys
from functools import partial
from typing import Any

from jobs.cli import OK, check_target, log, make_parser, read_settings, run_verb, start, write_target
from pipeline.formatting import Json


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "evaluate",
        __doc__,
        config="YAML file, e.g. configs/quality-e2e.yaml",
        overrides="run folder or Parquet (not with --sweep), then dotted keys",
        metavar="RUN key=value",
    )
    parser.add_argument("--sweep", action="store_true", help="models x schedules, as --config says")
    parser.add_argument("--references", metavar="FILE", help="CSV, JSONL or Parquet: data.path")
    parser.add_argument("--prompt-column", metavar="NAME", help="its prompts (mr): data.prompt_column")
    parser.add_argument("--id-column", metavar="NAME", help="ids of the input, in place of prompts: data.id_column")
    parser.add_argument("--reference-column", metavar="NAME", help="its references (ref): data.reference_column")
    parser.add_argument("--no-perplexity", action="store_true", help="texts only; no model is loaded")
    parser.add_argument("--output-json", metavar="FILE", help="write the document there too")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.sweep and not arguments.overrides:
        parser.error("name a run folder or Parquet, or give --sweep and --config")
    arguments.run = None if arguments.sweep else arguments.overrides.pop(0)
    return arguments


def main(argv: list[str] | None = None) -> int:
    command = shlex.join(["python", "-m", "jobs.evaluate", *(sys.argv[1:] if argv is None else argv)])
    return run_verb(partial(work, parse(argv), command))


def work(arguments: argparse.Namespace, command: str) -> tuple[dict[str, Any], int]:
    target = check_target(arguments.output_json)
    document = sweep(arguments, command) if arguments.sweep else score(arguments, command)
    write_target(target, document)
    return document, OK


def settings(arguments: argparse.Namespace) -> dict[str, Json]:
    """The nested dict that the configuration file, the overrides and the flags stand for."""
    flags: dict[str, Json] = {
        "data.path": arguments.references,
        "data.prompt_column": arguments.prompt_column,
        "data.id_column": arguments.id_column,
        "data.reference_column": arguments.reference_column,
        "perplexity_pairs": 0 if arguments.no_perplexity else None,
    }
    return read_settings(arguments, flags)


def sweep(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Models x schedules on one set of prompts."""
    from pipeline.config.job import build_config
    from pipeline.evaluation.sweep import SweepConfig, run_sweep

    document = run_sweep(build_config(SweepConfig, settings(arguments)), log, command)
    log(f"table and plot: {document['config']['output']}/quality.md, quality.svg, quality.png, quality.json")
    rows = [{key: value for key, value in row.items() if key != "rougeL_rows"} for row in document["rows"]]
    return {**document, "rows": rows}  # the figures of every prompt are in the file


def score(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """One corpus against references."""
    from pipeline.config.job import build_config
    from pipeline.evaluation.score import EvaluateConfig, evaluate

    tree = settings(arguments) | {"generated": arguments.run}
    document: dict[str, Any] = {**evaluate(build_config(EvaluateConfig, tree), log), "command": command}
    log(f"{document['prompts']} prompts of {document['generated']} against {document['references']}")
    for name, key, digits in FIGURES:
        if document[key] is not None:
            log(f"  {name:<38}{document[key]:8.{digits}f}")
    return document


FIGURES = (
    ("BLEU", "bleu", 1),
    ("chrF", "chrf", 1),
    ("ROUGE-1", "rouge1", 1),
    ("ROUGE-2", "rouge2", 1),
    ("ROUGE-L", "rougeL", 1),
    ("slot values found, %", "slot_share", 1),
    ("loss of the references, nats per token", "loss", 3),
    ("perplexity of the references", "perplexity", 3),
    ("layers per token", "layers_per_token", 1),
)


if __name__ == "__main__":
    start(main)
