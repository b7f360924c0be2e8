"""Turns generated tokens into text and sets each row's status. `RunSink` (`pipeline.store.row_writer`) calls it in the
task that writes the rows, on CPUs. No torch.
"""

import pyarrow as pa
import pyarrow.compute as pc

from actors.text.reasoning import opens_block, split_answer
from pipeline.openai_format.parameters import asks_for_choice
from pipeline.schema import (
    CHOICE,
    ENGINE_ERROR,
    ID,
    IS_VALID,
    NUM_REASONING_TOKENS,
    OUTPUT_SCHEMA,
    PROMPT_TOKENS,
    REASONING,
    SAMPLING,
    STATUS,
    score_schema,
)
from pipeline.stages.openai_choices import choice_of, found_valid
from pipeline.stages.tokenize import TOKENS, TokenizeConfig, describe, load_tokenizer, row_sampling, with_columns
from skipdecode.checkpoint.detokenizer import answer_text


def detokenize(table: pa.Table, *, config: TokenizeConfig, extra_names: tuple[str, ...]) -> pa.Table:
    """Adds the text and the status, and orders the columns as `OUTPUT_SCHEMA` does.

    `extra_names`: the columns of the input that follow. A row that cannot be turned into text fails.
    """
    tokenizer = load_tokenizer(config.source, config.model)
    names = ("generated_tokens", "layers_run", "ffns_run", "finish_reason", "error_code", "error_message")
    tokens, layers, ffns, reasons, codes, messages = (table[name].to_pylist() for name in names)
    texts = [""] * len(codes)
    reasoning: list[str | None] = [None] * len(codes)
    num_reasoning = [0] * len(codes)
    thinks = [config.reasoning_parser is not None and may_think for may_think in _may_think(table, config)]
    choices: list[str | None] = [None] * len(codes)
    ids = table[ID].to_pylist()
    prompts = table[PROMPT_TOKENS].to_pylist() if config.has_choices or any(thinks) else []
    for row, own in enumerate(table[SAMPLING].to_pylist()):
        try:
            if tokens[row]:
                sampling = row_sampling(config.sampling, own)
                if thinks[row] and sampling.structured_outputs is None:
                    is_open = opens_block(prompts[row], tokenizer.decode)
                    parts = split_answer(tokens[row], sampling, tokenizer.decode, is_open=is_open)
                    reasoning[row], texts[row], num_reasoning[row] = parts
                else:
                    texts[row] = answer_text(tokens[row], reasons[row], sampling, tokenizer.decode)
            if config.has_choices and not codes[row] and asks_for_choice(own):
                choices[row] = choice_of(
                    own,
                    prompts[row],
                    tokens[row],
                    texts[row],
                    tokenizer.decode,
                    id=ids[row],
                    finish_reason=reasons[row],
                    tool_form=config.tool_form,
                )
        except Exception as error:  # whatever one row makes a library raise is that row's failure
            codes[row], messages[row] = ENGINE_ERROR, describe(error)
            tokens[row], layers[row], ffns[row], reasons[row] = [], 0, 0, "error"
            reasoning[row], num_reasoning[row] = None, 0
    scores = score_schema(config.sampling)
    columns = {
        "generated_text": pa.array(texts, pa.string()),
        "generated_tokens": pa.array(tokens, TOKENS),
        "num_generated_tokens": pa.array([len(t) for t in tokens], pa.int32()),
        "finish_reason": pa.array(reasons, pa.string()),
        "layers_run": pa.array(layers, pa.int32()),
        "ffns_run": pa.array(ffns, pa.int32()),
        "error_code": pa.array(codes, pa.string()),
        "error_message": pa.array(messages, pa.string()),
        STATUS: pa.array(["failed" if code else "ok" for code in codes], pa.string()),
    }
    is_good = pa.array([not code for code in codes])
    columns |= {name: pc.if_else(is_good, table[name], None) for name in scores.names}
    if config.has_row_parameters and IS_VALID not in scores.names:
        valid = [
            None if code else found_valid(own) for code, own in zip(codes, table[SAMPLING].to_pylist(), strict=True)
        ]
        columns[IS_VALID] = pa.array(valid, pa.bool_())
    columns |= {CHOICE: pa.array(choices, pa.string())} if config.has_choices else {}
    if config.reasoning_parser is not None:
        columns[REASONING] = pa.array(reasoning, pa.string())
        columns[NUM_REASONING_TOKENS] = pa.array(num_reasoning, pa.int32())
    added = [*config.asked_schema.names, *([CHOICE] if config.has_choices else ())]
    return with_columns(table, columns).select([*OUTPUT_SCHEMA.names, *added, *extra_names, STATUS])


def _may_think(table: pa.Table, config: TokenizeConfig) -> list[bool]:
    """For each row, whether its answer may begin with reasoning: of batch lines those of chats, else all."""
    return [True] * table.num_rows if config.chat_urls is None else config.is_rendered(table)
