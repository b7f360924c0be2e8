"""Prompts for the main job, and the rows that it wrote."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

WORDS = ("The Golden Otter is a cheap pub near Willow Station serves Italian food riverside 東京 Köln 🙂 £20").split()


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["", *(" ".join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(count - 1))]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(output: Path, status: str = "ok") -> dict[str, dict[str, Any]]:
    """Rows by id; fails when an id is there twice."""
    files = sorted((output / "data" / f"status={status}").glob("*.parquet"))
    rows = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}
