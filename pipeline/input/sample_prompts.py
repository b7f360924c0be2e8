"""A few prompts of an input for measurements on a sample: the first distinct ones that are fit to run."""

from datetime import UTC, datetime
from itertools import islice

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.files import list_input
from pipeline.input.input_plan import columns_of, plan_input
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_file
from pipeline.input.scan import scan_file
from pipeline.schema import PROMPT


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
