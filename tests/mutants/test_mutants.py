"""Mutants fit the code as it is, and tests find them. The runner: `python -m tests.mutants`."""

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, Mutant, is_killed, main, read_mutants

ALL = [*read_mutants(), *read_mutants("equivalent")]


@pytest.mark.parametrize("mutant", ALL, ids=[mutant.name for mutant in ALL])
def test_a_mutant_fits_the_code_and_is_valid_python(mutant: Mutant) -> None:
    """A mutant that cannot be compiled would be killed by any test."""
    ast.parse(mutant.text(ROOT))
    assert bool(mutant.tests) != bool(mutant.reason)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        functions = [node.name for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
                     if isinstance(node, ast.FunctionDef)]  # fmt: skip
        assert name.partition("[")[0] in functions, f"{test}: no such test"


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_a_mutant_is_killed_survives_or_its_tests_do_not_run(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text("def one():\n    return 1\n")
    (tmp_path / "test_it.py").write_text("from own_code import one\n\ndef test_one():\n    assert one()\n")
    killed = Mutant("killed", "own_code.py", "return 1", "return 0", ("test_it.py::test_one",), with_conftest=True)
    assert is_killed(tmp_path, killed)
    assert not is_killed(tmp_path, Mutant("survives", "own_code.py", "return 1", "return 2", killed.tests, True))
    assert (tmp_path / "own_code.py").read_text() == "def one():\n    return 1\n"
    for broken in (
        Mutant("broken", "own_code.py", "return 1", "return (", killed.tests, True),
        Mutant("no test", "own_code.py", "return 1", "return 0", ("test_it.py::test_two",), True),
    ):
        with pytest.raises(RuntimeError, match="its tests do not run"):
            is_killed(tmp_path, broken)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
