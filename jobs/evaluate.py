"""`python -m jobs.evaluate`: how good generated text is, and what it costs to make it faster.

`jobs.evaluate RUN --references FILE` scores a run of `jobs.generate` (or a Parquet file or folder with `prompt` and
`generated_text`): BLEU, chrF, ROUGE, E2E slots, and the perplexity of the references under the run's own policy.
`jobs.evaluate --sweep --config FILE` decodes one set of prompts with many models and schedules; table and plot.
A table on stderr, one JSON document on stdout. Exit codes: 0 done; 2 bad configuration or input; 1 anything else.
"""

import argparse
import json
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

from jobs.cli import BAD_CONFIG, ERROR, OK, fail, note, result, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="models x schedules, as --config says")
    parser.add_argument("--config", metavar="FILE", help="YAML file, e.g. configs/quality-e2e.yaml")
    parser.add_argument("--references", metavar="FILE", help="CSV, JSONL or Parquet: data.path")
    parser.add_argument("--prompt-column", metavar="NAME", help="its prompts (mr): data.prompt_column")
    parser.add_argument("--reference-column", metavar="NAME", help="its references (ref): data.reference_column")
    parser.add_argument("--no-perplexity", action="store_true", help="texts only; no model is loaded")
    parser.add_argument("--output-json", metavar="FILE", help="write the document there too")
    parser.add_argument(
        "words", nargs="*", metavar="RUN key=value", help="run folder or Parquet (not with --sweep), then dotted keys"
    )
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.sweep and not arguments.words:
        parser.error("name a run folder or Parquet, or give --sweep and --config")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    from pipeline.config import ConfigError

    target = Path(arguments.output_json) if arguments.output_json else None
    if target and (target.is_dir() or not target.parent.is_dir()):  # not after minutes of decoding
        return fail(f"--output-json {target}: not a file in an existing folder", BAD_CONFIG)
    command = shlex.join(["python", "-m", "jobs.evaluate", *(sys.argv[1:] if argv is None else argv)])
    try:
        document = sweep(arguments, command) if arguments.sweep else score(arguments, command)
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted", ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    if target:
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    result(document)
    return OK


def settings(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The nested dict that the configuration file, the overrides and the flags stand for."""
    from pipeline.config import read_tree, set_key

    tree = read_tree(arguments.config, overrides)
    for key, value in (
        ("data.path", arguments.references),
        ("data.prompt_column", arguments.prompt_column),
        ("data.reference_column", arguments.reference_column),
        ("perplexity_pairs", 0 if arguments.no_perplexity else None),
    ):
        if value is not None:
            set_key(tree, key, value)
    return tree


def sweep(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Models x schedules on one set of prompts."""
    from pipeline.config import build_config
    from pipeline.evaluation.sweep import SweepConfig, run_sweep

    document = run_sweep(build_config(SweepConfig, settings(arguments, arguments.words)), note, command)
    note(f"table and plot: {document['config']['output']}/quality.md, quality.svg, quality.png, quality.json")
    rows = [{key: value for key, value in row.items() if key != "rougeL_rows"} for row in document["rows"]]
    return {**document, "rows": rows}  # the figures of every prompt are in the file


def score(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """One corpus against references."""
    from pipeline.config import build_config
    from pipeline.evaluation.score import EvaluateConfig, evaluate

    tree = settings(arguments, arguments.words[1:]) | {"generated": arguments.words[0]}
    document: dict[str, Any] = {**evaluate(build_config(EvaluateConfig, tree), note), "command": command}
    note(f"{document['prompts']} prompts of {document['generated']} against {document['references']}")
    for name, key, digits in FIGURES:
        if document[key] is not None:
            note(f"  {name:<38}{document[key]:8.{digits}f}")
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
