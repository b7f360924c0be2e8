"""When an endpoint may decode the rows of a run: what its digest of a model tells apart."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.job import JobConfig, build_config
from pipeline.generate.sharing import model_digest
from pipeline.resolve_model import check_model


def digest(source: Path, **sections: Any) -> str:
    model = {"source": str(source), **sections.pop("model", {})}
    config = build_config(JobConfig, {"model": model, **sections})
    return model_digest(config.model, check_model(config, lambda _: None))


@pytest.mark.parametrize(
    "other",
    [
        {"decode": {"method": "skipdecode", "speedup": 2}},
        {"model": {"quantization": "int8"}},
        {"model": {"kv_cache_dtype": "fp8"}},
    ],
)
def test_whatever_changes_tokens_changes_the_digest(tiny_checkpoint: Path, other: dict[str, Any]) -> None:
    assert digest(tiny_checkpoint) == digest(tiny_checkpoint)
    assert digest(tiny_checkpoint, **other) != digest(tiny_checkpoint)
