"""The main job as the files of this folder run it."""

from pathlib import Path
from typing import Any

import pytest

from jobs import generate as verb
from tests.support.verbs import Call, Job


@pytest.fixture
def job(call: Call, tiny_checkpoint: Path, tmp_path: Path) -> Job:
    """`job(*arguments)` runs `jobs.generate` into tmp_path/run: exit code, the JSON document, stderr."""

    def run(*arguments: str, model: Path = tiny_checkpoint) -> tuple[int, dict[str, Any], str]:
        fixed = [
            f"model.source={model}",
            "model.dtype=float32",
            "sampling.max_new_tokens=12",
            "-o",
            str(tmp_path / "run"),
        ]
        own = {argument.split("=")[0] for argument in arguments}
        return call(verb, *(a for a in fixed if a.split("=")[0] not in own), *arguments)

    return run
