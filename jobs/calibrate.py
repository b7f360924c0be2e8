"""Measure on sample prompts what a model can skip, and write a checkpoint that carries the answer.

    skipdecode calibrate -i prompts.jsonl -o outputs/calibrated model.source=my-model skip_share=0.3
    skipdecode calibrate -i prompts.jsonl -o outputs/drafting model.source=my-model target=drafts

By default it finds the feed-forward blocks that change predictions least (FFN-SkipLLM); the checkpoint then runs
without them under decode.ffn_skip={mode: calibrated}. With target=drafts it finds the layers that draft best, which
decode.lossless=auto then uses. What was measured, with a heat map, is in the checkpoint's calibration/ folder.
Guides: docs/methods/ffn_skip.md, docs/methods/lossless.md.
"""

import argparse
import json
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_parser, read_settings, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "calibrate",
        __doc__,
        config="YAML file, e.g. configs/calibrate.yaml",
        overrides="configuration keys, e.g. skip_share=0.3 warmup_tokens=10, or target=drafts",
    )
    parser.add_argument(
        "-i", "--input", metavar="PATH", action="append", help="sample prompts; may be repeated (input.path)"
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", help="the checkpoint folder to write (output)")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)))


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.config.job import build_config
    from pipeline.evaluation.calibrate import CalibrateConfig, calibrate

    tree = read_settings(arguments, {"input.path": arguments.input, "output": arguments.output})
    document = {**calibrate(build_config(CalibrateConfig, tree), log)}
    (summarize_drafts if "drafts" in document else summarize)(document)
    return document, OK


def summarize(document: dict[str, Any]) -> None:
    """Prints what was found and how to use it."""
    output = document["config"]["output"]
    for name in ("calibrated", "row"):
        found = document[name]
        log(
            f"{name}: skips {100 * found['skip_share']:.1f} % of the feed-forward blocks; KL divergence "
            f"{found['divergence']:.4f} nats per token, same top token in {100 * found['token_match']:.1f} % of cases"
        )
        log(f"  decode.ffn_skip={json.dumps(found['ffn_skip'])}")
    log(f"checkpoint: {output}   (model.source={output} 'decode.ffn_skip={{mode: calibrated}}')")
    log(f"measured:   {output}/calibration/calibration.json, similarity.parquet, similarity.svg, similarity.png")


def summarize_drafts(document: dict[str, Any]) -> None:
    """Prints a table of the best drafts, whether any pays off, and how to use it."""
    output, sizes = document["config"]["output"], document["config"]["batch_sizes"]
    heads = "".join(f"{f'batch {size}':>13}" for size in sizes)
    log(f"layers  accepted{heads}   draft (expected speedup and draft length)")
    for found in document["candidates"]:
        cells = [f"{gain['speedup']:.2f} ({gain['draft_tokens']})" for gain in found["gains"]]
        line = f"{found['layers_per_token']:>6.1f}{100 * found['acceptance'][0]:>8.1f} %"
        log(f"{line}{''.join(f'{cell:>13}' for cell in cells)}   {json.dumps(found['decode'])}")
    batches = ", ".join(map(str, sizes))
    if document["pays"]:
        log(f"drafts: {json.dumps(document['drafts'])}")
    else:
        nearest = max((found["nearest"] for found in document["candidates"]), default=0.0)
        log(
            f"nothing pays: no draft with fewer layers is expected to gain 2 % over full depth in batches of {batches} "
            f"(the best reaches {nearest:.2f}x); the checkpoint carries decode.method=full, which drafts repeated text "
            "at no extra cost"
        )
    log(f"checkpoint: {output}   (model.source={output} decode.lossless=auto)")
    log(f"measured:   {output}/calibration/calibration.json")


if __name__ == "__main__":
    start(main)
