"""`python -m jobs.serve`: the endpoint, alone or on the cluster that RAY_ADDRESS names, until SIGTERM or Ctrl-C.

Takes a Ray Serve configuration file with one application, and `key=value` overrides of its `args`. On SIGTERM requests
that are being answered are answered, new ones get 503, and then it ends. `serve deploy FILE` takes the same file.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_parser, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "serve",
        __doc__,
        config="a Ray Serve file, e.g. configs/serve.yaml",
        overrides="dotted keys of args: engine.batch_size=16",
    )
    parser.add_argument("--host", help="http_options.host; another than loopback needs API keys (SKIPDECODE_API_KEYS)")
    parser.add_argument("--port", type=int, help="http_options.port")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted before the endpoint was up")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.service.run import serve_until_stopped

    document = serve_until_stopped(
        arguments.config, arguments.overrides, host=arguments.host, port=arguments.port, log=log
    )
    return document, OK


if __name__ == "__main__":
    start(main)
