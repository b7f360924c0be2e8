"""What the tests of prompts made of columns share: rows read with their prompts, and what is refused."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from actors.templates.chat_template import ChatTemplate
from pipeline.config.job import ConfigError, SamplingConfig
from pipeline.input.expansion import Expansion
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_file
from pipeline.input.scan import scan_file
from tests.support.input_helpers import make_config, make_plan

DROPPED = {"not_utf8"}
NOW = datetime(2026, 7, 4, 5, 6, tzinfo=UTC)


def read(path: Path, by: ChatTemplate | None = None, sampling: SamplingConfig | None = None, **keys: Any) -> Any:
    """All rows, with their prompts."""
    config = make_config(path, **keys)
    plan = make_plan(config, Expansion.of(config, sampling or SamplingConfig()))
    columns = {name for i in range(len(plan.listing.files)) for name in scan_file(plan.listing, i, config)[0].columns}
    prompter = Prompter.of(config, plan.listing.format, by, NOW, columns=columns)
    blocks = [block for i in range(len(plan.listing.files)) for block in read_file(plan, i, config, prompter=prompter)]
    assert all(block.schema == plan.schema for block in blocks)
    return [row for block in blocks for row in block.drop_columns(DROPPED & set(block.schema.names)).to_pylist()]


def texts(rows: Sequence[dict[str, Any]]) -> list[str]:
    assert not any(row["error_code"] for row in rows), rows
    return [row["prompt"] for row in rows]


def refuse(path: Path, match: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        read(path, **keys)
