"""The sample of an estimate: rows from all over the input, and at most 64 of them decoded, in little time."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from actors.generator import Generator
from pipeline.config.job import InputConfig
from pipeline.estimate import sample as sample_module
from pipeline.estimate.measure import MAX_DECODED_ROWS, measure
from pipeline.estimate.sample import Sample, sample_rows
from pipeline.input.prompt_templates import Prompter
from pipeline.stages.tokenize import TokenizeConfig
from skipdecode.engine.request import Request
from tests.support.estimate_helpers import FIXED, requests
from tests.support.input_helpers import make_plan, write_jsonl


@pytest.mark.parametrize("num_files", [1, 3, 40])
def test_a_sample_is_of_neighbours_from_all_over_the_input(
    tmp_path: Path, tiny_checkpoint: Path, generator: Generator, num_files: int
) -> None:
    for number in range(num_files):
        rows = [{"id": f"{number:02d}-{i:04d}", "prompt": "word " * (1 + number % 5)} for i in range(400)]
        write_jsonl(tmp_path / f"in/{number:02d}.jsonl", [*rows, {"id": f"{number}-bad", "prompt": None}])
    config = InputConfig(path=(str(tmp_path / "in"),))
    tokens = TokenizeConfig(str(tiny_checkpoint), generator.model.config, FIXED, "fail_row")
    sample = sample_rows(make_plan(config), config, None, tokens, FIXED, 64)
    assert 40 <= sample.num_rows <= 64
    assert len(sample.requests) == sample.num_rows, "bad rows are at the end of these files"
    files = {request.id[:2] for request in sample.requests}
    assert len(files) == min(num_files, 16)
    spots = {int(request.id[3:]) // 100 for request in sample.requests}
    assert len(spots) == (4 if num_files == 1 else 1)
    assert sample.requests[1].id == f"{sample.requests[0].id[:3]}0001"
    wide = sample_rows(make_plan(config), config, None, tokens, FIXED, 100_000)
    read = min(num_files, 16)
    assert (wide.num_rows, len(wide.requests)) == (401 * read, 400 * read), "whole files, with the bad row of each"


def test_a_sample_makes_few_prompts_and_waits_for_none(
    tmp_path: Path, tiny_checkpoint: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow template must not hold up the start for minutes."""
    rows = [{"id": f"{i:04d}", "n": i % 1000, "q": f"word {i}"} for i in range(3000)]
    for number in range(4):
        write_jsonl(tmp_path / f"in/{number}.jsonl", [row | {"id": f"{number}-{row['id']}"} for row in rows])
    tokens = TokenizeConfig(str(tiny_checkpoint), generator.model.config, FIXED, "fail_row")
    now = datetime(2026, 7, 4, tzinfo=UTC)

    def look(template: str, max_rows: int, max_files: int = 4) -> Sample:
        config = InputConfig(path=(str(tmp_path / "in"),), template=template)
        prompter = Prompter.of(config, "jsonl", None, now)
        return sample_rows(make_plan(config), config, prompter, tokens, FIXED, max_rows, max_files)

    sample = look("{{ q }}", 512)
    assert (sample.num_rows, len(sample.requests)) == (512, 512)
    assert [request.id for request in sample.requests[127:129]] == ["0-0127", "1-0000"]
    sample = look("{{ q }}", 512, max_files=1)
    assert [request.id for request in sample.requests[127:129]] == ["0-0127", "0-0750"]
    monkeypatch.setattr(sample_module, "PROMPTS_S", 0.01)
    sample = look("{{ q }}{% for i in range(50000) %}{% endfor %}", 512)
    assert (sample.num_rows, len(sample.requests)) == (64, 64), "the first block is finished"
    monkeypatch.setattr(sample_module, "PROMPTS_S", 0.0)
    assert look("{{ q }}", 512).num_rows == 64
    nothing = look("{{ q }} {{ missing }}", 512)
    assert (nothing.num_rows, nothing.requests) == (64, [])
    assert "missing" in nothing.problem


def test_a_file_that_is_slow_to_read_leaves_time_for_templates(
    tmp_path: Path, tiny_checkpoint: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its price was: none of 0 rows can be decoded."""
    write_jsonl(tmp_path / "in.jsonl", [{"id": f"{i}", "q": f"word {i}"} for i in range(60)])
    config = InputConfig(path=(str(tmp_path),), template="{{ q }}")
    tokens = TokenizeConfig(str(tiny_checkpoint), generator.model.config, FIXED, "fail_row")
    prompter = Prompter.of(config, "jsonl", None, datetime(2026, 7, 4, tzinfo=UTC))
    read_file = sample_module.read_file

    def slow(*arguments: Any) -> Any:
        for block in read_file(*arguments):
            time.sleep(0.3)
            yield block

    monkeypatch.setattr(sample_module, "read_file", slow)
    monkeypatch.setattr(sample_module, "PROMPTS_S", 0.1)
    sample = sample_rows(make_plan(config), config, prompter, tokens, FIXED, 512)
    assert (sample.num_rows, len(sample.requests)) == (60, 60)


def test_no_more_than_64_rows_are_decoded(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    decode = Generator.decode_batches

    def spy(self: Generator, chosen: Sequence[Request]) -> Any:
        seen.extend(request.id for request in chosen)
        return decode(self, chosen)

    monkeypatch.setattr(Generator, "decode_batches", spy)
    measured = measure(generator, requests(500))
    assert sum(not id.startswith("probe-") for id in seen) == MAX_DECODED_ROWS == 64
    assert len(measured.lengths) == 64
    probes = [id for id in seen if id.startswith("probe-")]
    assert len(set(probes)) == generator.batch_size(32, 20)
    assert all(level.prefill > 0 and level.decode > 0 for level in measured.levels)
