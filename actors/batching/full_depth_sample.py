"""The batches of a worker that are decoded at full depth too, and what is recorded of a batch.

The speedup and the agreement of a report come from these batches.
"""

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from skipdecode.cost.roofline import BatchShape, Ceilings, SharedPrefixShape, predict_s
from skipdecode.engine.results import BatchResult, LosslessStats
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule

FIRST_PAIRS = (0, 2, 4)  # batches of each worker that are always in the sample: two make a useless interval


@dataclass(frozen=True)
class FullDepthSample:
    """How many batches a worker has decoded, and how many of them at full depth too (pairs)."""

    batches: int = 0
    counted: int = 0
    """Batches that are eligible for the sample."""
    pairs: int = 0
    first_row: str = ""
    """The id of the worker's first row: the seed by which workers draw different batches."""

    def is_due(self, fraction: float) -> bool:
        """True if the next counted batch is in a sample of `fraction` of them."""
        return fraction > 0 and (self.counted in FIRST_PAIRS or self.counted == self._drawn(fraction))

    def _drawn(self, fraction: float) -> int:
        """The number of the batch that is drawn from the group of 1 / `fraction` batches that the next one is in.

        It is drawn at random since batches of a shared window come longest first: with equal distances the sample could
        always hit the same length.
        """
        part = int(self.counted * _exact(fraction))
        first, end = (math.ceil(at / _exact(fraction)) for at in (part, part + 1))
        return first + random.Random(f"{self.first_row} {part}").randrange(end - first)

    @property
    def is_full_first(self) -> bool:
        """True if the next pair decodes at full depth first. The order alternates, so that drift cancels out."""
        return self.pairs % 2 == 1

    def after(self, row: str, *, counts_as_sample: bool, is_pair: bool) -> "FullDepthSample":
        """The state after one more batch, where `row` is the id of one of its rows."""
        return FullDepthSample(
            self.batches + 1, self.counted + counts_as_sample, self.pairs + is_pair, self.first_row or row
        )


def paired_batches(batches: int, fraction: float) -> int:
    """How many of a worker's first `batches` are pairs; one more or less by the draw of the last part."""
    if fraction <= 0:
        return 0
    last = FullDepthSample(counted=batches)
    drawn = int(batches * _exact(fraction)) + (last._drawn(fraction) < batches)
    first = (FullDepthSample(counted=number) for number in FIRST_PAIRS if number < batches)
    return drawn + sum(sample.counted != sample._drawn(fraction) for sample in first)


def _exact(fraction: float) -> Fraction:
    return Fraction(str(fraction))  # 0.1 is a tenth, which the float is not


def figures(result: BatchResult) -> dict[str, Any]:
    """The numbers of a batch that go into its record."""
    return {name: value for name, value in vars(result.stats).items() if name not in result.stats.unrecorded}


def agreement(result: BatchResult, full: BatchResult) -> dict[str, int]:
    """How far the tokens are those of full depth: equal rows, and equal tokens position by position."""
    exact = matched = compared = 0
    for ours, theirs in zip(result.completions, full.completions, strict=True):
        exact += ours.tokens == theirs.tokens
        matched += sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
        compared += max(len(ours.tokens), len(theirs.tokens))
    return {"exact_rows": exact, "matched_tokens": matched, "compared_tokens": compared}


def predicted(
    result: BatchResult,
    schedule: Schedule,
    model: Decoder,
    ceilings: Ceilings,
    *,
    itemsize: int,
    num_devices: int,
    shared_prefixes: SharedPrefixShape | None,
    in_graphs: bool,
) -> dict[str, float]:
    """The seconds of a batch by the cost model, under its schedule and at full depth, by the names in its record."""
    record: dict[str, float] = {}
    parts = num_devices  # a batch is split into as many parts, and takes as long as one of them on a single device
    for prefix, chosen in (("predicted", schedule), ("full_predicted", FullDepth(model.config.num_hidden_layers))):
        prefill, decode = predict_s(
            model.config,
            chosen,
            ceilings,
            BatchShape(
                result.stats.prompt_columns,
                [-(-rows // parts) for rows in result.stats.batch_rows],
                rows=-(-result.stats.rows // parts),
                deferred_ffn_rows=result.stats.deferred_ffn_rows if chosen is schedule else None,
                shared_prefixes=shared_prefixes,
            ),
            itemsize=itemsize,
            weight_itemsize=model.weight_itemsize,
            kv_itemsize=model.kv_itemsize,
            in_graphs=in_graphs,
        )
        if isinstance(chosen, Lossless) and isinstance(result.stats, LosslessStats):
            decode = result.stats.model_decode_s  # the number of rounds was not known before
        record |= {f"{prefix}_prefill_s": prefill, f"{prefix}_decode_s": decode}
    return record
