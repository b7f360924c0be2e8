"""What every verb shares: its arguments, notes to stderr, one JSON document on stdout, and how it ends."""

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipeline.formatting import Json, mask

OK, ERROR, BAD_CONFIG, TOO_MANY_FAILED = 0, 1, 2, 3
MEANING = {
    ERROR: "failed",
    BAD_CONFIG: "bad configuration or input, nothing was started",
    TOO_MANY_FAILED: "too many failed rows",
}
MAX_ERROR_CHARS = 800  # of the document; stderr has the whole


def start(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a verb as a program. stdout is for the document alone: what libraries print (Ray does) goes to stderr."""
    if {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
        sys.exit(main(argv))  # help is what was asked for: on stdout
    sys.stdout = sys.stderr
    try:
        code = main(argv)
    except SystemExit as error:  # of argparse, which has said why
        if error.code == BAD_CONFIG:
            result({"error": "the command line is wrong; stderr says where", "exit_code": BAD_CONFIG})
        raise
    sys.exit(code)


def run_verb(work: Callable[[], tuple[Mapping[str, Any], int]], interrupted: str = "interrupted") -> int:
    """Does what a verb does, and says how it ended; however that is, a document is the last line of stdout.

    `work` gives back the document and the exit code. What it raises ends the verb with the exception's `exit_code`, if
    it has one of ours: it was foreseen, and its text is all there is to say. Anything else is a traceback and code 1.
    `interrupted`: what is said after Ctrl-C, with what stays and how to go on.
    """
    try:
        document, code = work()
    except KeyboardInterrupt:
        return fail(interrupted, ERROR)
    except Exception as error:
        code = getattr(error, "exit_code", OK)
        if code not in MEANING:
            traceback.print_exc()
            code = ERROR
        return fail(str(error) or type(error).__name__, code)
    result(document)
    return code


def log(text: str) -> None:
    """One line for a human, on stderr, without the credentials of URIs."""
    print(mask(text), file=sys.stderr, flush=True)


def fail(error: str, code: int) -> int:
    """Says what went wrong, in words and as the document on stdout, and gives back the exit code."""
    log(f"error: {error}")
    log(f"exit code {code}: {MEANING[code]}")
    result({"error": shorten(mask(error)), "exit_code": code})
    return code


def shorten(text: str) -> str:
    """Its beginning and its end, where it is long: of a nested traceback the end names the cause."""
    half = MAX_ERROR_CHARS // 2
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]} ... {text[-half:]}"


def result(document: Mapping[str, Any]) -> None:
    """The last line on stdout: one JSON document."""
    is_redirected = sys.stdout is sys.stderr
    print(json.dumps(document), file=sys.__stdout__ if is_redirected else sys.stdout, flush=True)


def program(verb: str) -> str:
    """How a verb was called: by the console script, or as a module."""
    return f"skipdecode {verb}" if Path(sys.argv[0]).stem == "skipdecode" else f"python -m jobs.{verb}"


def make_parser(
    verb: str,
    about: str | None,
    *,
    config: str = "YAML file of a run; configs/ has examples",
    overrides: str = "dotted keys, e.g. decode.speedup=3",
    metavar: str = "key=value",
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """The parser of a verb, with the arguments that all verbs take. `config`, `overrides`: their help."""
    parser = argparse.ArgumentParser(
        prog=program(verb), description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help=config)
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=overrides)
    return parser


def make_folder_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """The same for a verb that works on a run folder; `run_folder` reads what it finds."""
    return make_parser(
        verb,
        about,
        config="YAML file of the run; its output.path stands in for OUT",
        overrides="the run folder; overrides of --config",
        metavar="OUT key=value",
    )


def add_output(parser: argparse.ArgumentParser, folder: str) -> None:
    """What a verb takes that writes into a folder of its own; `folder` is what it is called."""
    parser.add_argument("-o", "--output", metavar="PATH", help=f"the {folder}: output.path")
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument("--resume", action="store_true", help="go on with what the output folder holds")
    exists.add_argument("--overwrite", action="store_true", help="start anew in the output folder")


def output_keys(arguments: argparse.Namespace) -> dict[str, Json]:
    """The keys that `add_output` stands for."""
    exists = "resume" if arguments.resume else "overwrite" if arguments.overwrite else None
    return {"output.path": arguments.output, "output.if_exists": exists}


def read_settings(arguments: argparse.Namespace, flags: Mapping[str, Json]) -> dict[str, Json]:
    """What --config, the overrides and, over both, the flags that were given (not None) say; ConfigError."""
    from pipeline.config.job import read_tree, set_key

    tree = read_tree(arguments.config, arguments.overrides)
    for key, value in flags.items():
        if value is not None:
            set_key(tree, key, value)
    return tree


def run_folder(arguments: argparse.Namespace) -> tuple[str, dict[str, Json], list[str]]:
    """The run folder, what --config and overrides say together (checked), and the overrides; ConfigError."""
    from pipeline.config.job import ConfigError, JobConfig, build_config, read_tree
    from pipeline.config.tree import section_of

    overrides = [word for word in arguments.overrides if re.match(r"[a-z_]+(\.[a-z_]+)+=", word)]
    names = [word for word in arguments.overrides if word not in overrides]
    if len(names) > 1:
        raise ConfigError("", f"one run folder at a time, got {', '.join(names)}")
    tree = read_tree(arguments.config, overrides)
    path = build_config(JobConfig, tree).output.path
    if not names and "path" not in section_of(tree, "output"):
        raise ConfigError("", "name the run folder, or a --config that has its output.path")
    return names[0] if names else path, tree, overrides


def check_target(path: str | None) -> Path | None:
    """Where --output-json goes, before minutes of work; ConfigError where no file can be."""
    from pipeline.config.job import ConfigError

    target = Path(path) if path else None
    if target and (target.is_dir() or not target.parent.is_dir()):
        raise ConfigError("", f"--output-json {target}: not a file in an existing folder")
    return target


def write_target(target: Path | None, document: Mapping[str, Any]) -> None:
    if target:
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
