"""The stage of Ray Data before decoding: adds the tokens of each prompt, on CPUs.

It takes and returns an Arrow table with the same rows; a row that cannot be decoded is marked as failed. Columns of the
input pass through untouched; our own are `pipeline.schema`. Not here: turning tokens back into text (`detokenize`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import pyarrow as pa

from actors.text.tool_calls import ToolForm, tool_grammar
from pipeline.openai_format.parameters import TOOLS, ToolCalls
from pipeline.schema import (
    BAD_PARAMETERS,
    ENGINE_ERROR,
    PROMPT,
    PROMPT_MISSING,
    PROMPT_NOT_TEXT,
    PROMPT_TOKENS,
    PROMPT_TOO_LONG,
    SAMPLING,
    asked_schema,
)
from pipeline.stages.openai_choices import ECHO, NOT_SAMPLING
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling

TOKENS = pa.list_(pa.int32())
Encode: TypeAlias = Callable[[Sequence[str]], list[list[int]]]


def row_sampling(base: Sampling, overrides: str | None) -> Sampling:
    """The run's sampling, overridden by the row's own parameters (a JSON object with keys of `Sampling`)."""
    if overrides is None:
        return base
    own = json.loads(overrides)
    return base.with_parameters({name: value for name, value in own.items() if name not in NOT_SAMPLING})


def with_forced_calls(own: str | None, form: ToolForm) -> str | None:
    """A row's own parameters, with the grammar of its calls where its answer must be calls of tools."""
    if own is None or f'"{TOOLS}"' not in own:
        return own
    parameters = json.loads(own)
    calls: ToolCalls | None = parameters.get(TOOLS)
    if calls is None or calls["schemas"] is None:
        return own
    grammar = tool_grammar(form, calls["schemas"], is_single=calls["is_single"])
    calls["schemas"] = None
    return json.dumps(parameters | {"structured_outputs": {"grammar": grammar}}, ensure_ascii=False)


def check_sampling(
    config: "TokenizeConfig", overrides: str | None, tokenizer: Tokenizer
) -> tuple[Sampling, tuple[str, str] | None]:
    """A row's sampling, and the error code and message if its own parameters cannot be used."""
    try:
        sampling = row_sampling(config.sampling, overrides)
        if overrides is not None:
            sampling.check_vocabulary(config.model.vocab_size)
            if sampling.max_new_tokens == 0 and not (sampling.prompt_logprobs or json.loads(overrides).get(ECHO)):
                raise ValueError("max_new_tokens: must be at least 1, got 0")
            if (asked := sampling.structured_outputs) is not None and asked != config.sampling.structured_outputs:
                tokenizer.grammars.compile(asked)
    except ValueError as error:
        return config.sampling, (BAD_PARAMETERS, str(error))
    return sampling, None


@dataclass(frozen=True)
class TokenizeConfig:
    source: str
    model: DecoderConfig
    sampling: Sampling
    too_long: str
    chat: bool = False
    """Whether prompts were rendered by a chat template, and so contain their special tokens."""
    chat_urls: frozenset[str] | None = None
    """The values of the column `url` in rows that were rendered by a chat template; None if `chat` tells for all."""
    has_choices: bool = False
    """Whether some rows ask for more than text (`schema.CHOICE`)."""
    has_row_parameters: bool = False
    """Whether rows may bring parameters of their own in `input.sampling_column`."""
    reasoning_parser: str | None = None
    """`output.reasoning_parser`."""
    tool_form: ToolForm = "hermes"
    """The form in which the model calls tools, where rows have some."""

    @property
    def asked_schema(self) -> pa.Schema:
        """The columns after `OUTPUT_SCHEMA` that the run asks for."""
        return asked_schema(self.sampling, self.reasoning_parser, has_row_parameters=self.has_row_parameters)

    def is_rendered(self, table: pa.Table) -> list[bool]:
        """For each row, whether its prompt contains its special tokens already."""
        if self.chat_urls is None:
            return [self.chat] * table.num_rows
        return [url in self.chat_urls for url in table["url"].to_pylist()]


@lru_cache(maxsize=2)
def load_tokenizer(source: str, model: DecoderConfig) -> Tokenizer:
    """Built once per worker process, not once per block."""
    return Tokenizer(source, model)


@dataclass
class PromptRow:
    """A row of the table on its way to the tokens of its prompt."""

    prompt: str | None
    given_tokens: list[int] | None
    """Tokens that the input has in place of a text, or beside it."""
    parameters: str | None
    """Its own sampling parameters, a JSON object."""
    is_rendered: bool
    """Whether a chat template has put the special tokens into the prompt."""
    error_code: str | None
    error_message: str | None
    tokens: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Of the prompt, also where the row fails since they do not fit."""
    is_cut: bool = False
    """Whether `cut_text` has left out some of the prompt."""

    def fail(self, code: str, message: str) -> None:
        self.error_code, self.error_message, self.tokens = code, message, []


def tokenize(table: pa.Table, *, config: TokenizeConfig) -> pa.Table:
    """Adds the prompt's tokens and their number; marks rows that cannot be decoded."""
    tokenizer = load_tokenizer(config.source, config.model)
    given = (table[name].to_pylist() for name in (PROMPT, PROMPT_TOKENS, SAMPLING))
    errors = (table[name].to_pylist() for name in ("error_code", "error_message"))
    rows = [PromptRow(*values) for values in zip(*given, config.is_rendered(table), *errors, strict=True)]
    for row in rows:
        force_calls(row, config.tool_form)
    encode_texts([row for row in rows if not row.error_code and row.given_tokens is None], tokenizer, config)
    for row in rows:
        if not row.error_code:
            try:
                check_row(row, tokenizer, config)
            except Exception as error:  # whatever one row makes a library raise is that row's failure
                row.num_tokens = len(row.tokens)
                row.fail(ENGINE_ERROR, describe(error))
    columns = {
        PROMPT: pa.array([row.prompt for row in rows], pa.string()),
        PROMPT_TOKENS: pa.array([row.tokens for row in rows], TOKENS),
        "error_code": pa.array([row.error_code for row in rows], pa.string()),
        "error_message": pa.array([row.error_message for row in rows], pa.string()),
        "num_input_tokens": pa.array([row.num_tokens for row in rows], pa.int32()),
        SAMPLING: pa.array([row.parameters for row in rows], pa.string()),
    }
    return with_columns(table, columns)


def force_calls(row: PromptRow, form: ToolForm) -> None:
    """Puts the grammar of its calls into the row's parameters, where its answer must be calls of tools."""
    try:
        row.parameters = with_forced_calls(row.parameters, form)
    except RecursionError:
        if not row.error_code:
            row.fail(BAD_PARAMETERS, row.error_message or "tools: are nested too deeply")


def encode_texts(rows: Sequence[PromptRow], tokenizer: Tokenizer, config: TokenizeConfig) -> None:
    """Gives these rows the tokens of their prompts, cut to what can fit into the model."""
    texts = [row.prompt or "" for row in rows]
    parts = [cut_text(text, tokenizer.max_token_chars, config) for text in texts]
    encoded = encode_each(tokenizer, parts, [row.is_rendered for row in rows])
    for row, text, part, tokens in zip(rows, texts, parts, encoded, strict=True):
        row.is_cut = len(part) < len(text)
        if isinstance(tokens, str):
            row.fail(ENGINE_ERROR, tokens)
        else:
            row.tokens = tokens


def check_row(row: PromptRow, tokenizer: Tokenizer, config: TokenizeConfig) -> None:
    """Fails the row if its parameters are bad or its tokens do not fit; shortens them if the run says so."""
    if row.given_tokens is not None:
        row.tokens = row.given_tokens or list(tokenizer.bos_tokens)
        known = [token for token in row.given_tokens if token < config.model.vocab_size]
        row.prompt = row.prompt or tokenizer.decode(known)
    sampling, problem = check_sampling(config, row.parameters, tokenizer)
    if problem is None:
        begins_with_bos = row.tokens[: len(tokenizer.bos_tokens)] == list(tokenizer.bos_tokens)
        # a chat template may begin with another token
        bos_tokens = tokenizer.bos_tokens if begins_with_bos or not row.is_rendered else ()
        row.tokens, problem = fit_prompt(
            row.tokens,
            bos_tokens,
            sampling.max_new_tokens,
            config,
            is_cut=row.is_cut,
            is_chat=row.is_rendered,
        )
    row.num_tokens = len(row.tokens)
    if problem is not None:
        row.fail(*problem)


def cut_text(text: str, max_token_chars: int, config: TokenizeConfig) -> str:
    """The part of `text` that can fit into the model. Tokens take a hundred times the memory of their text, so a prompt
    that is a whole file could exhaust it."""
    limit = 2 * max_token_chars * config.model.max_position_embeddings
    return text[-limit:] if config.too_long == "truncate_left" else text[:limit]


def encode_each(tokenizer: Tokenizer, texts: list[str], is_rendered: list[bool]) -> list[list[int] | str]:
    """The tokens of each text, or the error message. `is_rendered`: by a chat template, with its special tokens."""
    made: list[list[int] | str] = [[]] * len(texts)
    for encode, wanted in ((tokenizer.encode, False), (tokenizer.encode_rendered, True)):
        rows = [row for row, rendered in enumerate(is_rendered) if rendered == wanted]
        for row, ids in zip(rows, _encode_all(encode, [texts[row] for row in rows]), strict=True):
            made[row] = ids
    return made


def _encode_all(encode: Encode, texts: list[str]) -> list[list[int] | str]:
    """Encodes all texts at once, or one by one if that fails."""
    try:
        return list(encode(texts)) if texts else []
    except Exception as error:
        if len(texts) == 1:
            return [describe(error)]
    return [_encode_all(encode, [text])[0] for text in texts]


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def fit_prompt(
    ids: list[int],
    bos_tokens: Sequence[int],
    max_new_tokens: int,
    config: TokenizeConfig,
    *,
    is_cut: bool,
    is_chat: bool,
) -> tuple[list[int], tuple[str, str] | None]:
    """The tokens, truncated if the run says so, and the error code and message if they cannot be decoded.

    `bos_tokens`: the tokens that the tokenizer puts before every prompt. `is_cut`: the text was cut by `cut_text`. A
    chat ends with the prompt for its answer, so it is never truncated on the right.
    """
    if not ids:
        return ids, (PROMPT_MISSING, "the prompt has no tokens, and this model has none that begins a text")
    limit, vocabulary = config.model.max_position_embeddings, config.model.vocab_size
    if max(ids) >= vocabulary:
        return ids, (PROMPT_NOT_TEXT, f"prompt token {max(ids)} is not in the vocabulary of {vocabulary} tokens")
    max_prompt_tokens = limit - max_new_tokens
    if max_prompt_tokens < 1:
        message = f"max_tokens {max_new_tokens} leaves no room for a prompt in {limit} positions"
        return ids, (BAD_PARAMETERS, message)
    if len(ids) <= max_prompt_tokens:
        return ids, None
    if config.too_long == "fail_row" or (is_chat and config.too_long == "truncate_right"):
        remedy = "truncate_left" if is_chat else "truncate_left or truncate_right"
        count = f"more than {len(ids)}" if is_cut else len(ids)
        message = (
            f"{count} prompt tokens and {max_new_tokens} new ones do not fit the model's {limit} positions; "
            f"set input.too_long to {remedy}, or lower sampling.max_new_tokens"
        )
        return ids, (PROMPT_TOO_LONG, message)
    if config.too_long == "truncate_right":
        return ids[:max_prompt_tokens], None
    kept = ids[: min(len(bos_tokens), max_prompt_tokens)]  # BOS stays first whichever side is cut
    return [*kept, *ids[len(ids) - max_prompt_tokens + len(kept) :]], None


def with_columns(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    """`table` with these columns replaced or appended."""
    for name, column in columns.items():
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    return table
