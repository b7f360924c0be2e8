"""`python -m jobs.serve`: the endpoint, alone or on the cluster that RAY_ADDRESS names, until SIGTERM or Ctrl-C.

Takes a Ray Serve configuration file with one application, and `key=value` overrides of its `args`. On SIGTERM requests
that are being answered are answered, new ones get 503, and then it ends. `serve deploy FILE` takes the same file.
"""

import argparse

from jobs.cli import BAD_CONFIG, ERROR, OK, fail, note, result, start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="a Ray Serve file, e.g. configs/serve.yaml")
    parser.add_argument("--host", help="http_options.host; another than loopback needs API keys (SKIPDECODE_API_KEYS)")
    parser.add_argument("--port", type=int, help="http_options.port")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of args: engine.batch_size=16")
    arguments = parser.parse_intermixed_args(argv)
    from pipeline.config import ConfigError
    from pipeline.service.run import serve_until_stopped

    try:
        document = serve_until_stopped(
            arguments.config, arguments.overrides, host=arguments.host, port=arguments.port, note=note
        )
    except ConfigError as error:
        return fail(error, BAD_CONFIG)
    except Exception as error:
        return fail(error, ERROR)
    result(document)
    return OK


if __name__ == "__main__":
    start(main)
