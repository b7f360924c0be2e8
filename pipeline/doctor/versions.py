"""Checks that the packages of pyproject.toml are installed in allowed versions.

Imports none of them but `packaging`, so that `doctor` can name a missing package before an import fails.
"""

import importlib.metadata
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
NAME = "skipdecode-ray"


@dataclass
class Versions:
    """Problems, each with its remedy."""

    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def check_versions() -> Versions:
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return Versions(missing=["packaging is not installed; pip install --editable ."])
    found = Versions()
    for requirement in map(Requirement, _wanted()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.missing.append(f"{requirement.name} is not installed; pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(there.partition("+")[0], prereleases=True):
            wanted_text = f"wanted {requirement.specifier}; pip install '{requirement}'"
            found.wrong.append(f"{requirement.name} is {there}, {wanted_text}")
    return found


def _wanted() -> list[str]:
    """The requirements in the checkout's pyproject.toml; without a checkout, those of the installed package."""
    if PROJECT.is_file():
        wanted: list[str] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
        return wanted
    return importlib.metadata.requires(NAME) or []
