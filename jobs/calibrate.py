"""`python -m jobs.calibrate`: which feed-forward blocks a model can do without (FFN-SkipLLM), measured on prompts.

Writes a checkpoint that carries the answer: `decode.ffn_skip={mode: calibrated}` then runs it without those blocks. The
proposal for the paper's row rule, the similarities per layer and step and their heat map lie beside it. A summary on
stderr, one JSON document on stdout. Exit codes: 0 done; 2 bad configuration or input; 1 anything else.
"""

import argparse
import json
import traceback
from typing import Any

from jobs.cli import BAD_CONFIG, ERROR, OK, fail, note, result, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, e.g. configs/calibrate-e2e.yaml")
    parser.add_argument("-i", "--input", metavar="PATH", action="append", help="sample prompts: input.path")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="the checkpoint to write: output")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. skip_share=0.3 warmup_tokens=10")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError, build_config, read_tree, set_key
    from pipeline.evaluation.calibrate import CalibrateConfig, calibrate

    try:
        tree = read_tree(arguments.config, arguments.overrides)
        for key, value in (("input.path", arguments.input), ("output", arguments.output)):
            if value is not None:
                set_key(tree, key, value)
        document = {**calibrate(build_config(CalibrateConfig, tree), note)}
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted", ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    summarise(document)
    result(document)
    return OK


def summarise(document: dict[str, Any]) -> None:
    """What was found, and how to use it."""
    output = document["config"]["output"]
    for name in ("calibrated", "row"):
        found = document[name]
        note(
            f"{name}: {100 * found['skip_share']:.1f} % of the blocks skipped, predictions moved by "
            f"{found['divergence']:.4f} nats per token, {100 * found['token_match']:.1f} % of tokens stay likeliest"
        )
        note(f"  decode.ffn_skip={json.dumps(found['ffn_skip'])}")
    note(f"checkpoint: {output}   (model.source={output} 'decode.ffn_skip={{mode: calibrated}}')")
    note(f"measured:   {output}/calibration/calibration.json, similarity.parquet, similarity.svg, similarity.png")


if __name__ == "__main__":
    start(main)
