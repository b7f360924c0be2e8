"""Columns of nulls, inside lists, structs and maps."""

from datetime import datetime

import pyarrow as pa

TURNS = pa.list_(pa.struct([("role", pa.string()), ("tool_calls", pa.null())]))
NULLS: dict[str, pa.Array] = {
    "calls": pa.array([[{"role": "user", "tool_calls": None}] * 3] * 3, TURNS),
    "structs of null": pa.array([[{"a": None}] * 2] * 3),
    "lists of null": pa.array([[None] * 3, None, [None] * 4], pa.list_(pa.null())),
    "null inside": pa.array([{"x": [None] * 3, "when": datetime(2024, 1, 2)}] * 3,
                            pa.struct([("x", pa.large_list(pa.null())), ("when", pa.timestamp("s"))])),
    "fixed null": pa.array([[None] * 2] * 3, pa.list_(pa.null(), 2)),
    "map of null": pa.array([[("k", None), ("l", None)]] * 3, pa.map_(pa.string(), pa.null())),
}  # fmt: skip
"""More null values than rows."""
