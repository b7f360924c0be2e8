"""`make mutants`: makes one line of the code wrong, in a copy of the tree; the tests that are named with it must fail.

    python -m tests.mutants                     # all of mutants.toml
    python -m tests.mutants --only fence        # those with this word in their name or file

First the tests must pass without any mutant. Exit code 1 if a mutant survives. What a mutant says, and those that no
test can find: `mutants.toml`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

ROOT: Final = Path(__file__).parents[2]
COPIED: Final = ("skipdecode", "actors", "pipeline", "jobs", "tests", "configs", "pyproject.toml")
MOST_TREES: Final = 4
FAILED, PASSED = 1, 0
"""Exit codes of pytest. Any other means that tests did not run, which proves nothing."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    """Text that is in the file once."""
    new: str
    tests: tuple[str, ...] = ()
    """As pytest takes them."""
    with_conftest: bool = False
    """The tests need fixtures of `conftest`, which imports torch and transformers, several seconds each time."""
    reason: str = ""
    """Why no test can find it, of an equivalent one."""

    def text(self, root: Path) -> str:
        """The mutated file. ValueError if the text to replace is not there once."""
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: {self.file} has the text {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


def read_mutants(kind: str = "mutant") -> list[Mutant]:
    """`kind`: mutant or equivalent."""
    found = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in found[kind]]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the code and its tests."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        for path in COPIED:
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, Path(name) / path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / path, name)
        yield Path(name)


def run_tests(root: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Exit code and output of pytest in `root`."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=120", *options]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([*command, *tests], cwd=root, env=env, text=True, capture_output=True)
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


def write_new(path: Path, text: str) -> None:
    """Writes a file whose time of change, in seconds, is no former one of it, so that no bytecode of it is stale."""
    later_s = int(path.stat().st_mtime) + 1
    path.write_text(text, encoding="utf-8")
    os.utime(path, (later_s, later_s))


def is_killed(root: Path, mutant: Mutant) -> bool:
    """Whether a test fails with it; RuntimeError if the tests do not run."""
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    write_new(path, mutant.text(root))
    try:
        without = () if mutant.with_conftest else ("--noconftest", "-p", "tests.support.profiles")
        code, output = run_tests(root, mutant.tests, "-x", *without)
    finally:
        write_new(path, text)
    if code not in (FAILED, PASSED) and code >= 0:
        raise RuntimeError(f"{mutant.name}: its tests do not run, exit code {code}:\n{output}")
    return code != PASSED  # below 0 a signal has ended them, as a lost lease does


def survivors_of(mutants: Sequence[Mutant], trees: Sequence[Path]) -> list[str]:
    """Their names; one mutant at a time in each of the trees. Prints the result of each."""
    free = SimpleQueue[Path]()
    for root in trees:
        free.put(root)

    def check(mutant: Mutant) -> tuple[bool, float]:
        root, began_s = free.get(), time.monotonic()
        try:
            return is_killed(root, mutant), time.monotonic() - began_s
        finally:
            free.put(root)

    survivors = []
    with ThreadPoolExecutor(len(trees)) as pool:
        for number, (mutant, (killed, seconds)) in enumerate(zip(mutants, pool.map(check, mutants), strict=True), 1):
            found = "killed" if killed else "SURVIVES"
            print(f"{number}/{len(mutants)} {mutant.name}: {found}, {seconds:.0f} s", flush=True)
            if not killed:
                survivors.append(mutant.name)
    return survivors


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants with this in their name or file")
    only = parser.parse_args(argv).only
    mutants = [mutant for mutant in read_mutants() if only in mutant.name or only in mutant.file]
    if not mutants:
        parser.error(f"--only {only}: no such mutant")
    with ExitStack() as stack:
        trees = [stack.enter_context(copied_tree()) for _ in range(min(os.cpu_count() or 1, MOST_TREES))]
        code, output = run_tests(trees[0], sorted({test for mutant in mutants for test in mutant.tests}))
        if code != PASSED:
            print(output)
            print("the tests fail without any mutant")
            return 1
        survivors = survivors_of(mutants, trees)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
