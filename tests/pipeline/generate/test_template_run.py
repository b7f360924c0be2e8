"""Runs of templates through `jobs.generate`: one that was begun before the newline of a template stayed goes on so."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.generate import main as generate
from tests.support.processes import row_list

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_begun_before_goes_on_without_the_newline_of_its_template(ending_checkpoint: Any, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "Best Answer": f"word {i}"} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = tmp_path / "run"
    arguments = [
        f"model.source={ending_checkpoint('1.3b')}", "-i", str(tmp_path / "in.jsonl"), "-o", str(output),
        "sampling.max_new_tokens=4", "actors.num_actors=1", "decode.method=full", "--resume",
        "input.template={{ row['Best Answer'] }}\nA:\n",
    ]  # fmt: skip

    def prompts() -> set[str]:
        assert generate(arguments) == 0
        return {row["prompt"] for row in row_list(output, "ok")}

    kept = {f"word {i}\nA:\n" for i in range(4)}
    assert prompts() == kept
    for begun_before in (False, True):
        for path in output.glob("data/*/*.parquet"):
            path.unlink()
        state = json.loads((output / "run.json").read_text(encoding="utf-8"))
        if begun_before:
            del state["fingerprint"]["input.template_newline"]
        (output / "run.json").write_text(json.dumps(state), encoding="utf-8")
        assert prompts() == ({prompt[:-1] for prompt in kept} if begun_before else kept)
    assert "input.template_newline" not in json.loads((output / "run.json").read_text(encoding="utf-8"))["fingerprint"]
