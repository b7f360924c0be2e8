"""(prompt, response) pairs from a CSV, JSONL or Parquet file, as text and as tokens: what training and evaluation read.

Everything is held in memory. Prompt corpora are another matter (`pipeline.input`).
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from actors.tokenizer import OPTTokenizer
from pipeline.config import ConfigError

DATA_KEYS = ("data", "data.prompt_column", "data.response_column")


def read_pairs(
    path: str, prompt_column: str, response_column: str, keys: tuple[str, str, str] = DATA_KEYS
) -> list[tuple[str, str]]:
    """All pairs of a file; ConfigError names what is wrong, file and columns as the user calls them: `keys`."""
    table = _read_table(path, (prompt_column, response_column), keys[0])
    for key, name in zip(keys[1:], (prompt_column, response_column), strict=True):
        if name not in table.column_names:
            raise ConfigError(f"{key}: {path} has no column {name!r}; it has: {', '.join(table.column_names)}")
    pairs = list(zip(table[prompt_column].to_pylist(), table[response_column].to_pylist(), strict=True))
    for row, (prompt, response) in enumerate(pairs):
        for name, text in ((prompt_column, prompt), (response_column, response)):
            if not text:
                raise ConfigError(f"{keys[0]}: {path}: row {row} has an empty {name}")
            if not isinstance(text, str):
                raise ConfigError(f"{keys[0]}: {path}: row {row} has {text!r} as {name}, which is no text")
    if not pairs:
        raise ConfigError(f"{keys[0]}: {path}: no rows")
    return pairs


def _read_table(path: str, text_columns: Sequence[str], key: str) -> pa.Table:
    try:
        if path.endswith(".csv"):
            return pa.csv.read_csv(
                path,
                parse_options=pa.csv.ParseOptions(newlines_in_values=True),
                convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(text_columns, pa.string())),
            )
        if path.endswith((".jsonl", ".json")):
            return pa.json.read_json(path)
        return pa.parquet.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{key}: {path}: {error}") from error


def encode_pairs(
    tokenizer: OPTTokenizer, pairs: Sequence[tuple[str, str]], eos_token_id: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens with BOS, response tokens with EOS) of each pair."""
    prompts = tokenizer.encode([prompt for prompt, _ in pairs])
    responses = tokenizer.encode([response for _, response in pairs])
    return [(p, [*r[1:], eos_token_id]) for p, r in zip(prompts, responses, strict=True)]
