"""A verb called in the process of the test, as its users call it in one of its own."""

import json
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from pipeline.store.run_folder import RunFolder

Job = Callable[..., tuple[int, dict[str, Any], str]]
"""A verb with arguments of its own: exit code, JSON document, stderr."""


class Verb(Protocol):
    def main(self, argv: list[str], /) -> int: ...


class Call:
    """`call(verb, *arguments)`: exit code, JSON document ({}: none) with the report that it names, stderr.

    The fixture `call` is one.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, verb: Verb, *arguments: object) -> tuple[int, dict[str, Any], str]:
        self._capsys.readouterr()
        code = verb.main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        lines = captured.out.splitlines()
        document = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}  # Ray prints to stdout too
        if "report" in document:  # its key figures; the whole is report.json
            root, _, name = str(document["report"]).rpartition("/")
            stores = [one for one in map(str, arguments) if "://" in one]  # of which the document names the path alone
            root = next((one for one in stores if root in one), root)
            report = json.loads(RunFolder.open(root).read_text(name) or "")
            for name in document.keys() & report.keys():  # a figure may be shown in part, and never otherwise
                shown, whole = document[name], report[name]
                assert shown == ({key: whole[key] for key in shown} if isinstance(shown, dict) else whole), name
            document |= report
        return code, document, captured.err
