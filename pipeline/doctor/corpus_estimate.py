"""Estimates what a corpus will take on this machine by decoding a sample of it."""

from dataclasses import dataclass
from datetime import UTC, datetime

from actors.generator import Generator
from pipeline.config.job import ConfigError, JobConfig
from pipeline.estimate.forecast import Estimate, Shape, count_tokens, forecast, lines, window_rows
from pipeline.estimate.measure import MAX_DECODED_ROWS, measure
from pipeline.estimate.sample import sample_rows
from pipeline.formatting import Log
from pipeline.generate.plan import check_asked_columns, find_chat_template, unused_chat_template, used_chat_template
from pipeline.generate.stage_config import make_sampling, make_tokenize_config
from pipeline.input.files import Listing
from pipeline.input.input_plan import columns_of, plan_input
from pipeline.input.prompt_templates import Prompter, unknown_names
from pipeline.input.sample_prompts import remark_on_last_messages
from pipeline.input.scan import scan_file
from pipeline.resolve_model import ResolvedModel
from skipdecode.checkpoint.hub import resolve_source

SAMPLED_ROWS = 2048


@dataclass
class Worker:
    """What `examine` has loaded."""

    model: ResolvedModel | None = None
    generator: Generator | None = None
    """None if this machine cannot load the model."""


def estimate(config: JobConfig, listing: Listing, worker: Worker, actors: int, log: Log) -> Estimate:
    """Reads the input once, as a run does; ConfigError if a run would refuse it, or no row can be decoded."""
    assert worker.model is not None
    scans = [scan_file(listing, index, config.input)[0] for index in range(len(listing.files))]
    plan = plan_input(listing, scans, config.input)
    check_asked_columns(plan, config)
    chat = find_chat_template(config, worker.model)
    if remark := unused_chat_template(chat, config, listing.format):
        log(remark)
    chat = used_chat_template(chat, config, listing.format, scans, log)
    if chat is not None and (remark := remark_on_last_messages(plan, config.input)):
        log(remark)
    columns = columns_of(scans, listing.format)
    for text in unknown_names(config.input, columns):
        log(text)
    prompter = Prompter.of(config.input, listing.format, chat, datetime.now(UTC), columns=columns)
    sampling = make_sampling(config)
    source, own = str(worker.model.folder), config.model.tokenizer
    tokenizer = source if own is None else str(resolve_source(own, "model.tokenizer"))
    tokens = make_tokenize_config(config, tokenizer, worker.model.config, sampling, listing.format)
    wide = sample_rows(plan, config.input, prompter, tokens, sampling, SAMPLED_ROWS)
    if not wide.requests:
        raise ConfigError("input.path", f"none of the first {wide.num_rows} rows can be decoded: {wide.problem}")
    generator = worker.generator
    has_gpu = generator is not None and generator.device.type == "cuda"
    shape = Shape(
        rows=plan.num_rows,
        window_rows=window_rows(config, actors, plan.num_rows, has_gpu=has_gpu),
        actors=actors,
        baseline_fraction=config.baseline.fraction,
        max_new_tokens=sampling.max_new_tokens,
    )
    price = config.actors.price_per_hour
    if generator is None:
        found = count_tokens(wide, shape, price)
    else:
        few = sample_rows(plan, config.input, prompter, tokens, sampling, MAX_DECODED_ROWS)
        log(f"estimate: decoding {len(few.requests) or MAX_DECODED_ROWS} rows of the input at most")
        found = forecast(generator, wide, measure(generator, few.requests or wide.requests), shape, price)
    for line in lines(found):
        log(line)
    return found
