"""`input.sampling_column`: the sampling parameters that a row brings in a column, as a struct, a map or JSON.

Here is their form. Their values are checked where the run's own parameters are known (`pipeline.stages.tokenize`).
OpenAI batch lines bring theirs in the body instead (`openai_rows`).
"""

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from pipeline.config.job import ConfigError, InputConfig, SamplingConfig
from pipeline.input.columns import unknown_columns
from pipeline.input.expansion import Expansion
from pipeline.input.json_rows import to_json
from pipeline.input.line_reader import RowError
from pipeline.json_size import MAX_MARKS, count_marks
from pipeline.openai_format.parameters import shown, whole
from pipeline.schema import BAD_PARAMETERS

OF_RUNS: Final = frozenset({"n", "deterministic", "logprobs", "prompt_logprobs"})
"""Keys of `sampling` that decide the rows and columns of a whole run."""
ROW_KEYS: Final = frozenset(SamplingConfig.model_fields) - OF_RUNS
WHOLE_KEYS: Final = frozenset({"max_new_tokens", "min_new_tokens", "top_k", "seed"})


def check_sampling_column(names: Collection[str], config: InputConfig) -> None:
    """ConfigError where the input lacks the column."""
    if (column := config.sampling_column) is not None and column not in names:
        raise ConfigError("input.sampling_column", f"the input has {unknown_columns(column, names)}")


def row_parameters(value: object, expansion: Expansion) -> str | None:
    """The parameters as JSON, None where a row has none; RowError for what they cannot be. Null values count as
    absent."""
    if isinstance(value, str):
        value = _parsed(value)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RowError(BAD_PARAMETERS, f"must be an object of sampling parameters, or its JSON, got {shown(value)}")
    own = {str(name): given for name, given in value.items() if given is not None}
    own |= {name: whole(own[name]) for name in WHOLE_KEYS & own.keys()}  # a map's values are of one type
    for name in own:
        if name in OF_RUNS:
            raise RowError(BAD_PARAMETERS, f"{name} is the same for all rows of a run; set sampling.{name}")
        if name not in ROW_KEYS:
            close = difflib.get_close_matches(name, ROW_KEYS, n=1) if len(name) < 64 else []
            hint = f" (or is it {close[0]}?)" if close else ""
            raise RowError(BAD_PARAMETERS, f"{shown(name)} is no key of sampling{hint}")
    if expansion.samples > 1 and own.get("temperature") == 0:
        raise RowError(BAD_PARAMETERS, f"temperature must be above 0: {expansion.samples} answers at 0 are the same")
    try:
        return to_json(own) if own else None
    except (TypeError, ValueError) as error:
        raise RowError(BAD_PARAMETERS, f"has a value that JSON does not have: {error}") from error


def arrow_parameters(value: object, expansion: Expansion) -> str | None:
    """`row_parameters` of a struct or map, whose nulls stand for keys that other rows have, at any depth."""
    return row_parameters(_without_nulls(value) if isinstance(value, Mapping) else value, expansion)


def _without_nulls(value: Mapping[object, Any]) -> dict[str, Any]:
    kept = {str(name): given for name, given in value.items() if given is not None}
    return {name: _without_nulls(given) if isinstance(given, Mapping) else given for name, given in kept.items()}


def _parsed(text: str) -> object:
    """A text's JSON; an empty cell of a CSV file says nothing."""
    if not text.strip():
        return None
    if (num_marks := count_marks(text.encode("utf-8", "surrogatepass"))) > MAX_MARKS:
        raise RowError(BAD_PARAMETERS, f"has {num_marks} commas and brackets, more than the {MAX_MARKS} allowed here")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(BAD_PARAMETERS, f"is not valid JSON: {error}") from error
