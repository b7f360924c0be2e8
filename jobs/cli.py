"""What every verb shares: notes to stderr, failures with their exit code, one JSON document on stdout."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from pipeline.units import mask

OK, ERROR, BAD_CONFIG, TOO_MANY_FAILED = 0, 1, 2, 3


def start(main: Callable[[], int]) -> None:
    """Runs a verb as a program. stdout is for the document alone: what libraries print (Ray does) goes to stderr."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(main())  # help is what was asked for: on stdout
    sys.stdout = sys.stderr
    try:
        code = main()
    except SystemExit as error:  # of argparse, which has said why
        if error.code == BAD_CONFIG:
            result({"error": "the command line is wrong; stderr says where", "exit_code": BAD_CONFIG})
        raise
    sys.exit(code)


def note(text: str) -> None:
    """One line for a human, on stderr, without the credentials of URIs."""
    print(mask(text), file=sys.stderr, flush=True)


def fail(error: BaseException | str, code: int) -> int:
    """Says what went wrong, in words and as the document on stdout, and gives back the exit code."""
    note(f"error: {error}")
    meaning = {1: "failed", 2: "bad configuration or input, nothing was started", 3: "too many failed rows"}
    note(f"exit code {code}: {meaning[code]}")
    result({"error": mask(str(error)), "exit_code": code})
    return code


def result(document: dict[str, Any]) -> None:
    """The last line on stdout: one JSON document."""
    is_redirected = sys.stdout is sys.stderr
    print(json.dumps(document), file=sys.__stdout__ if is_redirected else sys.stdout, flush=True)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verbs that work on a run folder; `run_folder` reads them."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of the run; its output.path stands in for OUT")
    parser.add_argument("words", nargs="*", metavar="OUT key=value", help="the run folder; overrides of --config")


def run_folder(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[str, dict[str, Any], list[str]]:
    """The run folder, what --config and overrides say together (checked), and the overrides; ConfigError."""
    from pipeline.config import JobConfig, build_config, read_tree

    overrides = [word for word in arguments.words if re.match(r"[a-z_]+(\.[a-z_]+)+=", word)]
    names = [word for word in arguments.words if word not in overrides]
    if len(names) > 1:
        parser.error(f"one run folder at a time, got {', '.join(names)}")
    tree = read_tree(arguments.config, overrides)
    path = build_config(JobConfig, tree).output.path
    if not names and "path" not in (tree.get("output") or {}):
        parser.error("name the run folder, or a --config that has its output.path")
    return names[0] if names else path, tree, overrides
