"""Score generated text against references, or compare many models and schedules.

    skipdecode evaluate outputs/run --references devset.csv
    skipdecode evaluate --sweep --config configs/quality.yaml
    skipdecode evaluate --tasks gsm8k,arc_easy model.source=models/opt-e2e decode.speedup=2

The first form scores a run folder, or Parquet with `prompt` and `generated_text`: BLEU, chrF, ROUGE, E2E slots, and the
perplexity of the references under the run's own schedule. --sweep decodes one set of prompts with every model and
schedule of the configuration, and writes a table and a plot. --tasks runs tasks of the LM Evaluation Harness under a
schedule. Guide: docs/evaluation.md.
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
        config="YAML file, e.g. configs/quality.yaml",
        overrides="run folder or Parquet (not with --sweep or --tasks), then configuration keys",
        metavar="RUN key=value",
    )
    parser.add_argument("--sweep", action="store_true", help="decode with all models and schedules of --config")
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of the LM Evaluation Harness, with commas")
    parser.add_argument(
        "--references", metavar="FILE", help="CSV, JSON Lines or Parquet with the references (data.path)"
    )
    parser.add_argument(
        "--prompt-column", metavar="NAME", help="its column of prompts, default mr (data.prompt_column)"
    )
    parser.add_argument(
        "--id-column", metavar="NAME", help="match rows by this column of ids and not by prompt (data.id_column)"
    )
    parser.add_argument(
        "--reference-column", metavar="NAME", help="its column of references, default ref (data.reference_column)"
    )
    parser.add_argument("--no-perplexity", action="store_true", help="score the texts only, without loading the model")
    parser.add_argument("--output-json", metavar="FILE", help="also write the JSON document to this file")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.sweep and arguments.tasks:
        parser.error("--sweep and --tasks are two forms: give one")
    is_score = not arguments.sweep and not arguments.tasks
    if is_score and not arguments.overrides:
        parser.error("name a run folder or Parquet, or give --sweep and --config, or --tasks")
    arguments.run = arguments.overrides.pop(0) if is_score else None
    return arguments


def main(argv: list[str] | None = None) -> int:
    command = shlex.join(["python", "-m", "jobs.evaluate", *(sys.argv[1:] if argv is None else argv)])
    return run_verb(partial(work, parse(argv), command))


def work(arguments: argparse.Namespace, command: str) -> tuple[dict[str, Any], int]:
    target = check_target(arguments.output_json)
    form = sweep if arguments.sweep else tasks if arguments.tasks else score
    document = form(arguments, command)
    write_target(target, document)
    return document, OK


def settings(arguments: argparse.Namespace) -> dict[str, Json]:
    flags: dict[str, Json] = {
        "data.path": arguments.references,
        "data.prompt_column": arguments.prompt_column,
        "data.id_column": arguments.id_column,
        "data.reference_column": arguments.reference_column,
        "perplexity_pairs": 0 if arguments.no_perplexity else None,
    }
    return read_settings(arguments, flags)


def sweep(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    from pipeline.config.job import build_config
    from pipeline.evaluation.sweep import SweepConfig, run_sweep

    document = run_sweep(build_config(SweepConfig, settings(arguments)), log, command)
    log(f"table and plot: {document['config']['output']}/quality.md, quality.svg, quality.png, quality.json")
    rows = [{key: value for key, value in row.items() if key != "rougeL_rows"} for row in document["rows"]]
    return {**document, "rows": rows}  # the scores of each prompt are only in the file


def tasks(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    from pipeline.config.job import build_config, read_tree
    from pipeline.evaluation.lm_eval_tasks import TasksConfig, evaluate_tasks

    tree = read_tree(arguments.config, arguments.overrides) | {"tasks": arguments.tasks.split(",")}
    document: dict[str, Any] = {**evaluate_tasks(build_config(TasksConfig, tree), log), "command": command}
    for task, metrics in document["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                log(f"  {task + ' ' + name:<48}{value:8.4f}")
    return document


def score(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
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
