"""`python -m jobs.generate`: a prompt corpus in, generated Parquet out.

Alone, or under `ray job submit --working-dir . -- python -m jobs.generate ...`. Progress goes to stderr; the last line
on stdout is one JSON document with the key figures, all of them are in report.json. Exit codes: 0 done; 2 bad
configuration or input, nothing was started; 3 more rows failed than limits.max_failed_rows allows, and the run ended
there or at its end; 1 anything else.
"""

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.cli import OK, TOO_MANY_FAILED, add_output, log, make_parser, output_keys, read_settings, run_verb, start

if TYPE_CHECKING:
    from pipeline.generate.run import RunResult

EPILOG = """\
example: python -m jobs.generate --config configs/generate-cpu.yaml -i prompts/ -o outputs/run decode.speedup=3
sections of keys: model decode prefill sampling input output actors baseline limits; a wrong key is answered with the
known ones. `python -m jobs.doctor` with the same arguments says what would be chosen here, and what is wrong.
"""
KEY_FIGURES: dict[str, tuple[str, ...]] = {
    "completed": (),
    "failed": (),
    "books": (),
    "duration_s": (),
    "output_throughput": (),
    "speedup": ("measured", "ci95", "layers", "predicted"),
    "agreement": (),
}
"""What stdout has of report.json, and which parts of a figure; none: all of it."""
MAX_CHARS = 1000  # of that line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("generate", __doc__, epilog=EPILOG)
    parser.add_argument(
        "-i", "--input", action="append", metavar="PATH", help="file, folder, pattern or URI (repeatable): input.path"
    )
    parser.add_argument(
        "--price-per-hour", type=float, metavar="PRICE", help="of all machines together: actors.price_per_hour"
    )
    add_output(parser, "run folder")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; what is written stays, --resume goes on with the run")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import JobConfig, build_config

    flags = {"input.path": arguments.input, "actors.price_per_hour": arguments.price_per_hour}
    tree = read_settings(arguments, flags | output_keys(arguments))
    config = build_config(JobConfig, tree)
    from pipeline.generate.run import run  # seconds, which a wrong key needs not

    finished = run(config, log)
    summarize(finished)
    return ending(finished, {"was_finished": finished.was_finished})


def ending(finished: "RunResult", more: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The document of a run that has ended, with what else there is to say of it, and its exit code."""
    code = TOO_MANY_FAILED if finished.too_many_failed else OK
    if code:
        log(
            f"exit code {code}: {finished.report['failed']} rows failed, and limits.max_failed_rows allows "
            f"{finished.failures_allowed:g}; the good rows stay, the failed ones are in "
            f"{finished.folder.path('data/status=failed')}"
        )
        more = more | {"exit_code": code}
    return key_figures(finished, more), code


def key_figures(finished: "RunResult", more: dict[str, Any]) -> dict[str, Any]:
    """At most MAX_CHARS as JSON: where the path is long, something gives way. All of it is in report.json."""
    report = finished.report
    document = {"output": finished.folder.root} | more
    for name, parts in KEY_FIGURES.items():
        if name in report:
            document[name] = {part: report[name][part] for part in parts} if parts else report[name]
    if "speedup" in report:  # else it could not be made
        document["report"] = finished.folder.path("report.json")
    for name in ("report", "agreement", "speedup", "output"):
        if len(json.dumps(document)) > MAX_CHARS:
            document.pop(name, None)
    return document


def summarize(finished: "RunResult") -> None:
    """The figures of a run in a few lines, on stderr: what it made, what it gained, what went wrong."""
    report, folder = finished.report, finished.folder
    if "speedup" not in report:  # the run is finished, its report could not be made
        log(f"done: {report['completed']} rows ok, {report['failed']} failed\ndata: {folder.path('data')}")
        return
    log(
        f"done: {report['completed']} rows ok, {report['failed']} failed, "
        f"{report['output_throughput']:.0f} output tokens/s over the whole run, "
        f"{report['decode_output_throughput'] or 0:.0f} per second of decoding"
    )
    if speedup := speedup_in_words(report):
        log(speedup)
    if cut := report.get("finish_reasons", {}).get("length"):  # a run of an earlier version may not say
        log(f"{cut} of {report['completed']} answers ended at their limit of new tokens (sampling.max_new_tokens)")
    if errors := report.get("errors"):
        most_first = sorted(errors, key=lambda code: -errors[code])
        counts = ", ".join(f"{errors[code]} {code}" for code in most_first)
        examples = report.get("error_examples", {}).get(most_first[0], [])
        shown = "".join(f"; e.g. {one['id']}: {one['message']}" for one in examples[:1])
        log("failed rows: " + counts + "".join(c if c.isprintable() else " " for c in shown))
    if split := report["split_batches"]["count"]:
        log(f"{split} batches are parts of larger ones that failed: {report['split_batches']['first']}")
    log(f"data: {folder.path('data')}\nreport: {folder.path('report.html')}")


def speedup_in_words(report: dict[str, Any]) -> str:
    """Empty for a run at full depth, which has nothing to gain."""
    s, agreement = report["speedup"], report["agreement"]["token_match"]
    decode = report.get("decode", {})
    if decode.get("method") == "full" and not decode.get("lossless"):
        return ""
    if s["measured"] is None:
        measured = "not measured"
    elif s["ci95"] is None:
        measured = f"{_times(s['measured'])} in the one batch that was decoded both ways, which says little"
    else:
        low, high = s["ci95"]
        measured = f"measured {_times(s['measured'])} (95 %: {low:.2f} to {high:.2f}, {s['batches']} batches)"
    return (
        f"speedup over full depth: {measured}, by layers {_times(s['layers'])}, predicted {_times(s['predicted'])}; "
        f"tokens as at full depth: {'not measured' if agreement is None else f'{100 * agreement:.1f} %'}"
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    start(main)
