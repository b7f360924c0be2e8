"""Names of columns: those that the output has otherwise, those that it needs for itself, those that are missing.

Left out: their types (`arrow_types`, `parquet_columns`).
"""

from collections.abc import Collection, Sequence

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.expansion import Expansion
from pipeline.input.files import SourceFile
from pipeline.input.prompt_templates import reads_column
from pipeline.schema import PROMPT, RESERVED_COLUMNS, SOURCE_SCHEMA


def own_columns(config: InputConfig) -> frozenset[str]:
    """Columns that the output has under another name, or that a prompt is made of and replaces."""
    text = {config.text_column} if config.text_column is not None else set()
    return frozenset({config.id_column, *text, *([PROMPT] if reads_column(config, PROMPT) else [])})


def check_source(names: Collection[str], path: str, config: InputConfig) -> None:
    """ConfigError where a file whose columns are known lacks the one that prompts are read from."""
    key = "prompt_column" if config.messages_column is None else "messages_column"
    column = config.text_column or config.messages_column
    if column is not None and column not in names:
        raise ConfigError(f"input.{key}", f"{path} has {unknown_columns(column, names)}")


def check_chosen_id(names: Collection[str], path: str, config: InputConfig) -> None:
    """ConfigError where the column of ids is not there, and somebody chose it: without the default one all is well."""
    is_chosen = config.id_column != InputConfig.model_fields["id_column"].default
    if is_chosen and config.id_column not in names:
        raise ConfigError("input.id_column", f"{path} has {unknown_columns(config.id_column, names)}")


def refuse_reserved(names: Sequence[str], file: SourceFile, expansion: Expansion) -> None:
    """ConfigError for a column of the input with a name that the output uses."""
    reserved = RESERVED_COLUMNS | (set(SOURCE_SCHEMA.names) if expansion.is_on else set())
    for name in names:
        if name in reserved:
            raise ConfigError(
                "input.path",
                f"{file.path} has a column {name!r}, a name that the output uses; "
                "rename or drop it, or make it input.prompt_column or input.id_column",
            )


def unknown_columns(wanted: str, columns: Collection[str]) -> str:
    """The end of a message about a column that is not there."""
    names = sorted(columns)
    shown = names[:20] + (["..."] if len(names) > 20 else [])
    return f"no column {wanted!r}; there are: {', '.join(shown) or 'none'}"
