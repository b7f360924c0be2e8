"""What all verbs share: their arguments, progress on stderr, one JSON document on stdout, and exit codes."""

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pipeline.formatting import Json, mask, printable
from pipeline.standard_streams import discard, open_closed_streams, tolerant_stderr

OK, ERROR, BAD_CONFIG, TOO_MANY_FAILED = 0, 1, 2, 3
MEANING = {
    ERROR: "failed",
    BAD_CONFIG: "bad configuration or input, nothing was started",
    TOO_MANY_FAILED: "too many failed rows",
}
MAX_ERROR_CHARS = 800  # in the document; stderr has all of it
EPILOG = """\
Progress goes to stderr, and the last line on stdout is one JSON document. Exit codes: 0 success; 1 failure; 2 bad
configuration or input, nothing was started{}.
"""
ROWS_MAY_FAIL = frozenset({"generate", "retry", "demo"})


def start(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a verb as a program and exits with its code.

    Only help and the JSON document go to stdout; whatever libraries print (Ray does) is redirected to stderr. A closed
    stream, or a reader that goes away, does not stop the work.
    """
    open_closed_streams()
    with tolerate_closed_pipe():
        if {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
            sys.exit(main(argv))
        if sys.stderr is sys.__stderr__:  # no test has put its own in place
            sys.stderr = tolerant_stderr()
        sys.stdout = sys.stderr
        try:
            code = main(argv)
        except SystemExit as error:  # raised by argparse, which has printed the reason
            if error.code == BAD_CONFIG:
                result({"error": "the command line is wrong; stderr says where", "exit_code": BAD_CONFIG})
            raise
        sys.exit(code)


@contextmanager
def tolerate_closed_pipe() -> Iterator[None]:
    """Exits without a traceback when the reader of our help has gone, as in `skipdecode | head -3`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        for stream in (1, 2):  # the interpreter flushes both at exit, which would fail once more
            discard(stream)
        sys.exit(ERROR)


def run_verb(work: Callable[[], tuple[Mapping[str, Any], int]], interrupted: str = "interrupted") -> int:
    """Calls `work`, prints the document it returns as the last line on stdout, and returns the exit code.

    An exception with an `exit_code` of ours is an expected failure, reported by its message alone; any other is a
    traceback and exit code 1. Either way the document says what went wrong. `interrupted` is the message after Ctrl-C.
    """
    try:
        document, code = work()
    except KeyboardInterrupt:
        return fail(interrupted, ERROR)
    except Exception as error:
        code = getattr(error, "exit_code", OK)
        if code not in MEANING:
            log(traceback.format_exc())
            code = ERROR
        return fail(str(error) or type(error).__name__, code)
    result(document)
    return code


def log(text: str) -> None:
    """Prints to stderr, with the credentials in URIs masked and control characters escaped."""
    print(printable(mask(text)), file=sys.stderr, flush=True)


def fail(error: str, code: int) -> int:
    """Reports an error on stderr and as the document on stdout; returns the exit code."""
    log(f"error: {error}")
    log(f"exit code {code}: {MEANING[code]}")
    result({"error": shorten(mask(error)), "exit_code": code})
    return code


def shorten(text: str) -> str:
    """The beginning and the end of a long message: the end of a nested traceback names its cause."""
    half = MAX_ERROR_CHARS // 2
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]} ... {text[-half:]}"


def result(document: Mapping[str, Any]) -> None:
    """Prints the JSON document to the real stdout; to stderr if stdout is closed or cannot be written."""
    is_redirected = sys.stdout is sys.stderr
    text = json.dumps(document)
    try:
        print(text, file=sys.__stdout__ if is_redirected else sys.stdout, flush=True)
    except OSError:
        discard(1)  # the interpreter flushes it once more at exit
        log(text)


def program(verb: str) -> str:
    """How the verb was called: through the console script or as a module."""
    return f"skipdecode {verb}" if Path(sys.argv[0]).stem == "skipdecode" else f"python -m jobs.{verb}"


def make_parser(
    verb: str,
    about: str | None,
    *,
    config: str = "YAML file with the configuration; see configs/ for examples",
    overrides: str = "configuration keys, e.g. decode.speedup=3; they override --config",
    metavar: str = "key=value",
) -> argparse.ArgumentParser:
    """The parser of a verb with the arguments that all verbs take; `config` and `overrides` are their help texts."""
    epilog = EPILOG.format("; 3 more rows failed than limits.max_failed_rows allows" if verb in ROWS_MAY_FAIL else "")
    parser = argparse.ArgumentParser(
        prog=program(verb), description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help=config)
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=overrides)
    return parser


def make_folder_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a verb that works on a run folder; `run_folder` evaluates its arguments."""
    return make_parser(
        verb,
        about,
        config="YAML file of the run; its output.path may take the place of RUN",
        overrides="the run folder, then configuration keys, e.g. input.path=prompts.jsonl",
        metavar="RUN key=value",
    )


def add_output(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds the arguments of a verb that writes a folder; `folder` names that kind of folder in the help."""
    parser.add_argument("-o", "--output", metavar="PATH", help=f"the {folder} to write (output.path)")
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument("--resume", action="store_true", help="continue what is in that folder")
    exists.add_argument("--overwrite", action="store_true", help="delete what is in that folder and start over")


def output_keys(arguments: argparse.Namespace) -> dict[str, Json]:
    """The configuration keys that the arguments of `add_output` set."""
    exists = "resume" if arguments.resume else "overwrite" if arguments.overwrite else None
    return {"output.path": arguments.output, "output.if_exists": exists}


def read_settings(arguments: argparse.Namespace, flags: Mapping[str, Json]) -> dict[str, Json]:
    """The tree of --config, overridden by key=value, overridden by those flags that are not None; ConfigError."""
    from pipeline.config.job import read_tree, set_key

    tree = read_tree(arguments.config, arguments.overrides)
    for key, value in flags.items():
        if value is not None:
            set_key(tree, key, value)
    return tree


def run_folder(arguments: argparse.Namespace) -> tuple[str, dict[str, Json], list[str]]:
    """The run folder, the checked configuration tree of --config and overrides, and the overrides; ConfigError."""
    from pipeline.config.job import ConfigError, JobConfig, build_config, read_tree
    from pipeline.config.tree import section_of

    overrides = [word for word in arguments.overrides if re.match(r"[a-z_]+(\.[a-z_]+)+=", word)]
    names = [word for word in arguments.overrides if word not in overrides]
    if len(names) > 1:
        raise ConfigError("", f"one run folder at a time, got {', '.join(names)}")
    tree = read_tree(arguments.config, overrides)
    path = build_config(JobConfig, tree).output.path
    if not names and "path" not in section_of(tree, "output"):
        raise ConfigError("", "name the run folder, or give a --config with its output.path")
    return names[0] if names else path, tree, overrides


def check_target(path: str | None) -> Path | None:
    """The path of --output-json, checked before minutes of work; ConfigError where no file can be written."""
    from pipeline.config.job import ConfigError

    target = Path(path) if path else None
    if target and (target.is_dir() or not target.parent.is_dir()):
        raise ConfigError("", f"--output-json {target}: not a file in an existing folder")
    return target


def write_target(target: Path | None, document: Mapping[str, Any]) -> None:
    if target:
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
