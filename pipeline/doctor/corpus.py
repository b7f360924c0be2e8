"""What the corpus will take on this machine, before the run: a sample of it is decoded."""

from dataclasses import dataclass

from actors.generator import Generator
from pipeline.checkpoint import ResolvedModel
from pipeline.config import ConfigError, JobConfig
from pipeline.estimate.forecast import Estimate, Shape, count_tokens, forecast, window_rows
from pipeline.estimate.measure import MAX_DECODED_ROWS, measure
from pipeline.estimate.sample import sample_rows
from pipeline.estimate.words import lines
from pipeline.input.files import Listing
from pipeline.input.plan import plan_input
from pipeline.input.scan import scan_file
from pipeline.stages.tokens import TokenizeConfig
from pipeline.units import Note
from skipdecode.hub import resolve_source
from skipdecode.sampling import Sampling

SAMPLED_ROWS = 2048


@dataclass
class Worker:
    """What `examine` loads on the way."""

    model: ResolvedModel | None = None
    generator: Generator | None = None
    """None: this machine cannot load the model."""


def estimate(config: JobConfig, listing: Listing, worker: Worker, actors: int, note: Note) -> Estimate:
    """Reads the input once, as a run does. ConfigError for an input that a run would refuse, or of which no row is
    good."""
    assert worker.model is not None
    scans = [scan_file(listing, index, config.input)[0] for index in range(len(listing.files))]
    plan = plan_input(listing, scans, config.input)
    s = config.sampling
    sampling = Sampling(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos)
    source, own = str(worker.model.folder), config.model.tokenizer
    tokenizer = source if own is None else str(resolve_source(own, "model.tokenizer"))
    tokens = TokenizeConfig(tokenizer, worker.model.config, sampling, config.input.too_long)
    wide = sample_rows(plan, config.input, tokens, sampling, SAMPLED_ROWS)
    if not wide.requests:
        raise ConfigError("input.path", f"none of the first {wide.num_rows} rows can be decoded")
    generator = worker.generator
    has_gpu = generator is not None and generator.device.type == "cuda"
    shape = Shape(
        rows=plan.num_rows,
        window_rows=window_rows(config, actors, plan.num_rows, has_gpu=has_gpu),
        actors=actors,
        baseline_fraction=config.baseline.fraction,
        max_new_tokens=s.max_new_tokens,
    )
    price = config.actors.price_per_hour
    if generator is None:
        found = count_tokens(wide, shape, price)
    else:
        few = sample_rows(plan, config.input, tokens, sampling, MAX_DECODED_ROWS)
        note(f"estimate: decoding {len(few.requests) or MAX_DECODED_ROWS} rows of the input at most")
        found = forecast(generator, wide, measure(generator, few.requests or wide.requests), shape, price)
    for line in lines(found):
        note(line)
    return found
