"""Finds the layers that draft best for lossless decoding, and writes them down for the checkpoint.

The search is `actors.measuring.draft_search`; `skipdecode.schedules.lossless.stored_drafts` reads what is written.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from actors.ceilings import measure_ceilings
from actors.generator import Generator
from actors.measuring.draft_search import Candidate, DraftSample, Pair, Search, Tell
from pipeline.config.job import ConfigError
from pipeline.evaluation.documents import Decode, DraftGain, DraftProposal
from pipeline.formatting import Json, Log
from pipeline.resolve_model import ResolvedModel
from skipdecode.cost.roofline import Ceilings, cache_bytes_per_row
from skipdecode.model.devices import dtype_name
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth
from skipdecode.speculative.latency_model import LatencyModel

PROGRESS_S = 5.0
FEW = 16  # texts, of which one half chooses and the other half judges
NGRAMS: Decode = {"method": "full"}  # full depth drafts by n-gram matches alone


class DraftFigures(TypedDict):
    """The figures of a `DraftsDocument`."""

    drafts: Decode
    pays: bool
    candidates: list[DraftProposal]
    ceilings: dict[str, float]


@dataclass(frozen=True)
class FoundDrafts:
    """The outcome of a search."""

    sample: DraftSample
    candidates: list[Candidate]
    """The best first."""
    layers: list[float]
    """The layers that a draft of each candidate runs, in the mean."""
    ceilings: Ceilings

    @property
    def pays(self) -> bool:
        return bool(self.candidates) and self.candidates[0].pays

    @property
    def chosen(self) -> Decode:
        return self.candidates[0].decode if self.pays else NGRAMS

    def carried(self) -> dict[str, Json]:
        """What `config.json` says under `drafts`."""
        return {
            "num_layers": self.sample.model.config.num_hidden_layers,
            "decode": self.chosen,
            "acceptance": [self.candidates[0].acceptance] if self.pays else [],
        }

    def figures(self) -> DraftFigures:
        candidates = [_proposal(one, layers) for one, layers in zip(self.candidates, self.layers, strict=True)]
        return {
            "drafts": self.chosen,
            "pays": self.pays,
            "candidates": candidates,
            "ceilings": asdict(self.ceilings),
        }


def check_carried(model: ResolvedModel) -> None:
    """ConfigError if the checkpoint carries a schedule, which would be tried, that does not fit it."""
    if model.config.skip_decode is None:
        return
    try:
        make_schedule(model.config.skip_decode, num_layers=model.config.num_hidden_layers, max_new_tokens=2)
    except ValueError as error:
        raise ConfigError(
            "model.source", f"skip_decode in its config.json: {error}; repair it, or take it out of the file"
        ) from error


def check_sizes(generator: Generator, pairs: Sequence[Pair], batch_sizes: Sequence[int], max_new_tokens: int) -> None:
    """ConfigError for a batch whose keys and values do not fit into this machine's memory."""
    model = generator.model.config
    per_row = cache_bytes_per_row(
        model,
        FullDepth(model.num_hidden_layers),
        prompt_columns=max(len(prompt) for prompt, _ in pairs),
        num_new=max_new_tokens,
        itemsize=generator.model.kv_itemsize,
    )
    most = int(generator.memory.serving_cache_bytes // per_row)
    if wrong := [size for size in batch_sizes if size > most]:
        raise ConfigError("batch_sizes", f"{wrong[0]} rows are too many: there is room for {most} on this machine")


def find_drafts(
    generator: Generator,
    pairs: Sequence[Pair],
    *,
    batch_size: int,
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    log: Log,
) -> FoundDrafts:
    """Searches for drafts that gain the most in batches of `batch_sizes` rows.

    `pairs`: what the generator wrote at full depth, at least one text of two tokens; `batch_size` of them are looked at
    together.
    """
    check_sizes(generator, pairs, batch_sizes, max_new_tokens)
    sample = DraftSample(generator.model, pairs, batch_size)
    log(f"sample: {sample.num_prompts} prompts, {sample.num_tokens} tokens that a decode step made")
    if sample.num_prompts < FEW:
        log(f"warning: {sample.num_prompts} texts say little about how many drafts are accepted; give {FEW} or more")
    ceilings = measure_ceilings(str(generator.device), dtype_name(generator.dtype))
    latency = LatencyModel.of(generator.model, ceilings)
    search = Search(sample, latency, batch_sizes, max_new_tokens, _progress(log))
    candidates = search.run()
    num_steps = max(len(made) for _, made in pairs) - 1
    plans = [[search.schedule(one.decode).step(k) for k in range(num_steps)] for one in candidates]
    layers = [sum(plan.num_layers_run for plan in own) / num_steps for own in plans]
    return FoundDrafts(sample, candidates, layers, ceilings)


def _proposal(candidate: Candidate, layers: float) -> DraftProposal:
    gains: list[DraftGain] = [
        {
            "batch_size": gain.batch_size,
            "draft_tokens": gain.draft_tokens,
            "tokens_per_pass": gain.tokens_per_pass,
            "speedup": gain.speedup,
        }
        for gain in candidate.gains
    ]
    return {
        "decode": candidate.decode,
        "layers_per_token": layers,
        "acceptance": [candidate.acceptance],
        "gains": gains,
        "nearest": candidate.nearest,
    }


def _progress(log: Log) -> Tell:
    """Passes on lines of the search, one every few seconds."""
    last = 0.0

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            log(f"progress: {line}")

    return tell
