"""Serve a model over HTTP with OpenAI's completions and chat API, until Ctrl-C or SIGTERM.

    skipdecode serve model.source=my-model
    skipdecode serve --config configs/serve.yaml --port 9000 engine.batch_size=16

Starts Ray on this machine, or uses the cluster that RAY_ADDRESS names. --config is a Ray Serve file with one
application (`serve deploy` takes the same file); key=value sets keys of its `args`. At the end, requests in progress
are answered and new ones get 503. SKIPDECODE_API_KEYS has the API keys; without any, one is made and printed. Guide:
docs/serving.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_parser, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "serve",
        __doc__,
        config="Ray Serve configuration file, e.g. configs/serve.yaml",
        overrides="keys of the application's args, e.g. engine.batch_size=16",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1); 0.0.0.0 answers other machines too")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted before the server was up")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.service.serve import serve_until_stopped

    document = serve_until_stopped(
        arguments.config, arguments.overrides, host=arguments.host, port=arguments.port, log=log
    )
    return document, OK


if __name__ == "__main__":
    start(main)
