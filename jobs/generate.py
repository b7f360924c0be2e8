"""Generate text for every prompt of a corpus, and write it as Parquet.

    skipdecode generate -i prompts.jsonl -o outputs/run model.source=my-model
    skipdecode generate --config configs/generate.yaml -o outputs/run decode.speedup=3
    skipdecode generate --config configs/generate.yaml -o outputs/run --resume

The run folder holds the rows in data/, and report.html with throughput, speedup and agreement with full depth. Call
`skipdecode doctor` with the same arguments first to see what would be chosen here. On a cluster:
ray job submit --working-dir . -- python -m jobs.generate ... Guides: docs/quickstart.md, docs/corpus.md,
docs/reliability.md; all keys: docs/configuration.md.
"""

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.cli import OK, TOO_MANY_FAILED, add_output, log, make_parser, output_keys, read_settings, run_verb, start

if TYPE_CHECKING:
    from pipeline.generate.run import RunResult

KEY_FIGURES: dict[str, tuple[str, ...]] = {
    "completed": (),
    "failed": (),
    "books": (),
    "duration_s": (),
    "output_throughput": (),
    "speedup": ("measured", "ci95", "layers", "predicted"),
    "agreement": (),
}
"""Figures of report.json that the document on stdout repeats, and which of their parts; (): all."""
LOW_AGREEMENT = 0.5  # a tuned model is well above it, although its texts differ from some token on
HALF = 0.5  # of the answers
MAX_CHARS = 1000  # of the document


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("generate", __doc__)
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        metavar="PATH",
        help="prompts: a file, folder, glob pattern or URI; may be repeated (input.path)",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="of all machines together, for the report (actors.price_per_hour)",
    )
    add_output(parser, "run folder")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; what was written is kept, and --resume continues the run")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import JobConfig, build_config

    flags = {"input.path": arguments.input, "actors.price_per_hour": arguments.price_per_hour}
    tree = read_settings(arguments, flags | output_keys(arguments))
    config = build_config(JobConfig, tree)
    from pipeline.generate.run import run  # takes seconds; a wrong key is reported before that

    finished = run(config, log)
    log_summary(finished)
    return document_and_exit_code(finished, {"was_finished": finished.was_finished})


def document_and_exit_code(finished: "RunResult", more: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The document of a finished run, extended by `more`, and its exit code; logs why that is not 0."""
    code = TOO_MANY_FAILED if finished.too_many_failed else OK
    if code:
        failed, total = finished.report["failed"], finished.report["books"]["input"]
        log(
            f"exit code {code}: {failed:,} of {total:,} rows failed, and limits.max_failed_rows allows "
            f"{finished.failures_allowed:,} (limits.max_failed_rows={failed} would allow these); good rows are kept, "
            f"failed ones are in {finished.folder.path('data/status=failed')}"
        )
        more = more | {"exit_code": code}
    return key_figures(finished, more), code


def key_figures(finished: "RunResult", more: dict[str, Any]) -> dict[str, Any]:
    """The key figures in at most MAX_CHARS of JSON; parts are dropped if the path is long. report.json has all."""
    report = finished.report
    document = {"output": finished.folder.root} | more
    for name, parts in KEY_FIGURES.items():
        if name in report:
            document[name] = {part: report[name][part] for part in parts} if parts else report[name]
    if "speedup" in report:  # otherwise making the report failed
        document["report"] = finished.folder.path("report.json")
    for name in ("report", "agreement", "speedup", "output"):
        if len(json.dumps(document)) > MAX_CHARS:
            document.pop(name, None)
    return document


def log_summary(finished: "RunResult") -> None:
    """Prints what a run produced, what skipping gained and what went wrong."""
    report, folder = finished.report, finished.folder
    if "speedup" not in report:  # making the report failed
        log(f"done: {report['completed']} rows ok, {report['failed']} failed\ndata: {folder.path('data')}")
        return
    log(
        f"done: {report['completed']} rows ok, {report['failed']} failed, "
        f"{report['output_throughput']:.0f} output tokens/s over the whole run, "
        f"{report['decode_output_throughput'] or 0:.0f} while decoding"
    )
    if speedup := speedup_in_words(report):
        log(speedup)
    if remark := low_agreement(report):
        log(remark)
    for line in kernels_in_words(report):
        log(line)
    if cut := report["finish_reasons"].get("length"):
        log(f"{cut} of {report['completed']} answers were cut off at sampling.max_new_tokens")
    if loops := report["finish_reasons"].get("repetition"):
        log(f"{loops} of {report['completed']} answers were loops, and ended by sampling.repetition_detection")
    reasoning = report["reasoning"]
    if reasoning["tokens"] is not None:
        log(f"{reasoning['tokens']} of {report['total_output_tokens']} output tokens were reasoning")
    if remark := unfinished_reasoning(reasoning["unfinished"]):
        log(remark)
    if errors := report.get("errors"):
        most_first = sorted(errors, key=lambda code: -errors[code])
        counts = ", ".join(f"{errors[code]} {code}" for code in most_first)
        examples = report.get("error_examples", {}).get(most_first[0], [])
        shown = "".join(f"; e.g. {one['id']}: {one['message']}" for one in examples[:1])
        log("failed rows: " + counts + "".join(c if c.isprintable() else " " for c in shown))
    if split := report["split_batches"]["count"]:
        log(f"{split} batches had to be split after a failure: {report['split_batches']['first']}")
    log(f"data: {folder.path('data')}\nreport: {folder.path('report.html')}")


def kernels_in_words(report: dict[str, Any]) -> list[str]:
    """Lines for `log_summary`: with what workers decoded, and which of them were slower than they could be."""
    from pipeline.report.rendering import backends, slow_workers  # takes seconds, as in `work`

    used, slow = backends(report["actors"]), slow_workers(report["actors"])
    lines = [f"kernels: {used}"] if used else []
    return [*lines, f"warning: decoding was slower than it could be: {slow}"] if slow else lines


def unfinished_reasoning(share: float) -> str:
    """One line for `log_summary` where most answers are reasoning alone; else empty."""
    if share <= HALF:
        return ""
    return (
        f"{100 * share:.0f} % of the answers were cut off while the model was thinking, and hold nothing else: set "
        "input.chat_template_kwargs={enable_thinking: false}, where the chat template reads it, or a larger "
        "sampling.max_new_tokens"
    )


def low_agreement(report: dict[str, Any]) -> str:
    """One line for `log_summary` where skipping has changed most tokens; else empty."""
    agreement = report["agreement"]["token_match"]
    if agreement is None or agreement >= LOW_AGREEMENT:
        return ""
    return (
        f"low agreement: only {100 * agreement:.1f} % of the tokens are those of full depth, so the texts may be "
        "nonsense; tune the model on such prompts (skipdecode finetune), skip less (decode.speedup), or take "
        "decode.method=full or decode.lossless=true"
    )


def speedup_in_words(report: dict[str, Any]) -> str:
    """One line for `log_summary`; empty for a run at full depth, which skips nothing."""
    s, agreement = report["speedup"], report["agreement"]["token_match"]
    decode = report.get("decode", {})
    if decode.get("method") == "full" and not decode.get("lossless"):
        return ""
    if s["measured"] is None:
        measured = "not measured"
    elif s["ci95"] is None:
        batches = "one batch" if s["batches"] == 1 else "two batches"
        measured = f"{_times(s['measured'])} measured ({batches}, too few for an interval)"
    else:
        low, high = s["ci95"]
        measured = f"{_times(s['measured'])} measured (95 % CI {low:.2f} to {high:.2f}, {s['batches']} batches)"
    return (
        f"speedup over full depth: {measured}, {_times(s['layers'])} by layers run, {_times(s['predicted'])} predicted"
        f"; tokens equal to full depth: {'not measured' if agreement is None else f'{100 * agreement:.1f} %'}"
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    start(main)
