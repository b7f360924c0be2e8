"""The row contract: names and types of the columns that a run writes, and its error codes. Data only."""

import re
from typing import Final, Protocol, TypedDict

import pyarrow as pa

ID: Final = "id"
PROMPT: Final = "prompt"
STATUS: Final = "status"  # the partition folder: "ok" or "failed"; never a column inside a file

OUTPUT_SCHEMA: Final = pa.schema(
    [
        pa.field(ID, pa.string()),
        pa.field(PROMPT, pa.string()),  # null when the input had no usable prompt
        pa.field("generated_text", pa.string()),  # no special tokens, ends before a stop string
        pa.field("generated_tokens", pa.list_(pa.int32())),  # with the EOS that ended the row
        pa.field("num_input_tokens", pa.int32()),  # with BOS
        pa.field("num_generated_tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),  # stop | length | repetition | error
        pa.field("layers_run", pa.int32()),  # layers, summed over the row's decode steps
        pa.field("ffns_run", pa.int32()),  # feed-forward blocks, likewise; fewer under FFN-SkipLLM only
        pa.field("error_code", pa.string()),  # "" when fine, never null
        pa.field("error_message", pa.string()),  # "" when fine, never null
    ]
)
"""The columns of every output row, in order. Every other input column follows unchanged."""


SOURCE_ID: Final = "source_id"
TEMPLATE: Final = "template"
SAMPLE: Final = "sample"
SOURCE_SCHEMA: Final = pa.schema(
    [
        pa.field(SOURCE_ID, pa.string()),  # the id of the document
        pa.field(TEMPLATE, pa.string()),  # the name of the template; null where it has none
        pa.field(SAMPLE, pa.int32()),  # from 0
    ]
)
"""Where a row comes from: columns after those above, in runs that make several rows of a document."""

LOGPROBS: Final = "logprobs"
TOP_LOGPROBS: Final = "top_logprobs"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
PROMPT_TOP_LOGPROBS: Final = "prompt_top_logprobs"
LOGPROBS_TYPE: Final = pa.list_(pa.float32())
TOP_TYPE: Final = pa.list_(pa.list_(pa.struct([("token", pa.int32()), ("logprob", pa.float32())])))


IS_VALID: Final = "is_valid"


class Asked(Protocol):
    """What a run asks for besides tokens (`sampling`)."""

    @property
    def logprobs(self) -> int | None: ...
    @property
    def prompt_logprobs(self) -> bool: ...
    @property
    def structured_outputs(self) -> object | None: ...


def score_schema(asked: Asked) -> pa.Schema:
    """The columns of log-probabilities, and of whether an answer has its structure, after those above, in runs that ask
    for them; null in failed rows."""
    has_top = bool(asked.logprobs)
    fields = [
        (LOGPROBS, LOGPROBS_TYPE, asked.logprobs is not None),  # one per generated token
        (TOP_LOGPROBS, TOP_TYPE, has_top),  # the likeliest tokens in its place
        (PROMPT_LOGPROBS, LOGPROBS_TYPE, asked.prompt_logprobs),  # one per token of the prompt; null for the first
        (PROMPT_TOP_LOGPROBS, TOP_TYPE, has_top and asked.prompt_logprobs),
        (IS_VALID, pa.bool_(), asked.structured_outputs is not None),  # false where the limit cut an answer off
    ]
    return pa.schema([pa.field(name, type_) for name, type_, is_on in fields if is_on])


REASONING: Final = "reasoning"
NUM_REASONING_TOKENS: Final = "num_reasoning_tokens"
REASONING_SCHEMA: Final = pa.schema(
    [
        pa.field(REASONING, pa.string()),  # null in rows without any
        pa.field(NUM_REASONING_TOKENS, pa.int32()),  # of num_generated_tokens, with the marks
    ]
)
"""Columns after those above in runs with `output.reasoning_parser`; `generated_text` is then without the reasoning."""


def asked_schema(asked: Asked, reasoning_parser: str | None, *, has_row_parameters: bool = False) -> pa.Schema:
    """The columns after `OUTPUT_SCHEMA` that the configuration asks for. `has_row_parameters`: rows may bring their own
    in `input.sampling_column`, structured outputs among them; `IS_VALID` is then null for those that do not."""
    scores = score_schema(asked)
    if has_row_parameters and IS_VALID not in scores.names:
        scores = scores.append(pa.field(IS_VALID, pa.bool_()))
    return pa.schema([*scores, *(REASONING_SCHEMA if reasoning_parser else ())])


CHOICE: Final = "openai_choice"
"""Text, `logprobs` and `is_valid` of the answer to an OpenAI batch line, as JSON. The column is there if some line asks
for more than text, and null for lines that do not."""


class OutputRow(TypedDict):
    """A row that was read back, with the columns of `OUTPUT_SCHEMA` that the caller asked for."""

    id: str
    prompt: str | None
    generated_text: str
    generated_tokens: list[int]
    num_input_tokens: int
    num_generated_tokens: int
    finish_reason: str
    layers_run: int
    ffns_run: int
    error_code: str
    error_message: str


def list_columns(schema: pa.Schema) -> list[list[str]]:
    """The names and types of columns as strings, as `run.json` stores them."""
    return [[field.name, type_words(str(field.type))] for field in schema]


def type_words(text: str) -> str:
    """The string of a type without the names that Parquet changes: it calls the items of lists "element", and those of
    maps like the column."""
    text = text.replace("<item: ", "<element: ")
    return re.sub(r" \('.*?'\)", "", text) if "map<" in text else text


# What `pipeline.input` hands to the stages besides the columns above; dropped before writing.
PROMPT_TOKENS: Final = "_prompt_tokens"  # list<int32>: a prompt given as token ids (OpenAI batch), else null
SAMPLING: Final = "_sampling"  # string: JSON object with this row's own sampling parameters, else null

RESERVED_COLUMNS: Final = frozenset(OUTPUT_SCHEMA.names) | {STATUS, PROMPT_TOKENS, SAMPLING}
"""An input column with one of these names is refused before the start, as are those of `SOURCE_SCHEMA` and
`asked_schema` in runs that have them."""

PROMPT_MISSING: Final = "prompt_missing"
PROMPT_NOT_TEXT: Final = "prompt_not_text"
PROMPT_TOO_LONG: Final = "prompt_too_long"
DUPLICATE_ID: Final = "duplicate_id"
BAD_LINE: Final = "bad_line"
BAD_PARAMETERS: Final = "bad_parameters"
BAD_TEMPLATE: Final = "bad_template"
BAD_MESSAGES: Final = "bad_messages"
POISON_ROW: Final = "poison_row"
ENGINE_ERROR: Final = "engine_error"
ERROR_CODES: Final = frozenset(
    {
        PROMPT_MISSING,
        PROMPT_NOT_TEXT,
        PROMPT_TOO_LONG,
        DUPLICATE_ID,
        BAD_LINE,
        BAD_PARAMETERS,
        BAD_TEMPLATE,
        BAD_MESSAGES,
        POISON_ROW,
        ENGINE_ERROR,
    }
)
