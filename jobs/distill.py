"""`python -m jobs.distill --init-only`: a checkpoint with SwiftKV's weights, taken from the model itself.

`prefill.method=swiftkv` then runs it. Distillation, which makes its texts good, is to come; until then `--init-only`
must be given. One JSON document on stdout. Exit codes: 0 done; 2 bad configuration or input; 1 anything else.
"""

import argparse
import traceback

from jobs.cli import BAD_CONFIG, ERROR, OK, fail, note, result, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("--init-only", action="store_true", required=True, help="the weights to start from")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="the checkpoint to write: output")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. swiftkv.kv_layers=12")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError, build_config, read_tree, set_key
    from pipeline.distill import DistillConfig, init_swiftkv

    try:
        tree = read_tree(arguments.config, arguments.overrides)
        if arguments.output is not None:
            set_key(tree, "output", arguments.output)
        document = init_swiftkv(build_config(DistillConfig, tree))
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except KeyboardInterrupt:
        return fail("interrupted", ERROR)
    except Exception as error:
        traceback.print_exc()
        return fail(error, ERROR)
    shape = document["swiftkv"]
    note(
        f"{document['output']}: layers from {shape['kv_layers']} on take K/V from below, by {shape['group_size']}; "
        f"{document['new_parameters']:,} new parameters of {document['parameters']:,}, not trained"
    )
    result(document)
    return OK


if __name__ == "__main__":
    start(main)
