"""The first rows of an input: prompts for measurements on a sample, and what a run says about its conversations."""

import json
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.files import list_input
from pipeline.input.input_plan import InputPlan, columns_of, plan_input
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_file
from pipeline.input.scan import scan_file
from pipeline.schema import PROMPT

NUM_LOOKED_AT = 256  # rows, for a remark


def read_prompts(config: InputConfig, count: int) -> list[str]:
    """The first `count` distinct prompts that are fit to run, rendered if need be; ConfigError for conversations."""
    if config.is_chat:
        key = "chat" if config.chat else "messages_column"
        raise ConfigError(
            f"input.{key}", "a sample is of prompts as they are; render conversations first, or leave it out"
        )
    listing = list_input(config)
    scans = [scan_file(listing, index, config)[0] for index in range(len(listing.files))]
    columns = columns_of(scans, listing.format)
    prompter = Prompter.of(config, listing.format, None, datetime.now(UTC), columns=columns)
    plan = plan_input(listing, scans, config)
    found: dict[str, None] = {}
    for index in range(len(listing.files)):
        for block in read_file(plan, index, config, prompter=prompter):
            texts, codes = block[PROMPT].to_pylist(), block["error_code"].to_pylist()
            found |= dict.fromkeys(text for text, code in zip(texts, codes, strict=True) if text and not code)
            if len(found) >= count:
                return list(islice(found, count))
    if not found:
        raise ConfigError("input.path", f"no usable prompt in {', '.join(config.path)}")
    return list(found)


def remark_on_last_messages(plan: InputPlan, config: InputConfig) -> str | None:
    """A remark if some of the first conversations end with the assistant's message, and are not to be continued."""
    is_batch = plan.listing.format == "openai_batch"
    column = "body" if is_batch else config.messages_column
    if column is None or config.continue_final_message:
        return None
    first = next(index for index, rows in enumerate(plan.num_rows_per_file) if rows)
    with closing(read_file(plan, first, config, NUM_LOOKED_AT)) as blocks:
        values = next(blocks)[column].to_pylist()
    if (num_open := sum(_ends_with_answer(value, is_batch) for value in values)) == 0:
        return None
    how = "continue_final_message in a line" if is_batch else "input.continue_final_message=true"
    return (
        f"{num_open} of the first {len(values)} rows end with a message of the assistant, and get another one after "
        f"it; {how} continues it instead"
    )


def remark_on_bos(plan: InputPlan, config: InputConfig, prompter: Prompter | None, bos_text: str) -> str | None:
    """A remark if some of the first prompts begin with `bos_text`, which the tokenizer puts before every prompt."""
    if not bos_text:
        return None
    first = next(index for index, rows in enumerate(plan.num_rows_per_file) if rows)
    with closing(read_file(plan, first, config, NUM_LOOKED_AT, prompter=prompter)) as blocks:
        prompts = next(blocks)[PROMPT].to_pylist()
    if (num_twice := sum(text is not None and text.startswith(bos_text) for text in prompts)) == 0:
        return None
    return (
        f"{num_twice} of the first {len(prompts)} prompts begin with {bos_text}, which the tokenizer puts before every "
        "prompt: the model sees it twice; take it out of the prompts"
    )


def _ends_with_answer(value: Any, is_batch: bool) -> bool:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        parsed = json.loads(parsed) if isinstance(parsed, str) else parsed  # of a column that has lists and texts
        messages = parsed["messages"] if is_batch else parsed
        continues = is_batch and parsed.get("continue_final_message")
        return bool(messages[-1]["role"] == "assistant" and not continues)
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):  # the row fails, and says why
        return False
