"""Full depth beside a schedule: which batches of a worker are decoded at both, and what the cost model says of them.

Reports have their speed-up and agreement from these batches. Left out: decoding, and records of one pass (`records`).
"""

import math
import random
from dataclasses import dataclass
from fractions import Fraction

from skipdecode.cost.roofline import Ceilings, SharedShape, predict_s
from skipdecode.engine.batch_stats import LosslessStats
from skipdecode.engine.generate import BatchResult
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import FullDepth, Schedule

FIRST_PAIRS = (0, 2, 4)  # own batches of each worker always measured at full depth too: two give a useless interval


@dataclass(frozen=True)
class Turns:
    """How many batches a worker has decoded."""

    batches: int = 0
    counted: int = 0
    """Of these, those that count for the share."""
    pairs: int = 0
    """Of these, those that were decoded at full depth too."""
    first_row: str = ""
    """Id of its first row, by which workers draw other places."""

    def is_next(self, fraction: float) -> bool:
        """Whether the next batch that counts is decoded at full depth too, as `fraction` of them are."""
        return fraction > 0 and (self.counted in FIRST_PAIRS or self.counted == self._drawn(fraction))

    def _drawn(self, fraction: float) -> int:
        """Place of the pair in the part that the next batch falls into. One batch is `fraction` of a part.

        By chance: a worker that shares what is left has the batches of a window longest first, so places at even
        distances may all have about one length.
        """
        part = int(self.counted * _share(fraction))
        first, end = (math.ceil(at / _share(fraction)) for at in (part, part + 1))
        return first + random.Random(f"{self.first_row} {part}").randrange(end - first)

    @property
    def is_full_first(self) -> bool:
        """Of the next pair. A B B A: drift of the machine cancels out."""
        return self.pairs % 2 == 1

    def after(self, row: str, *, counts: bool, is_pair: bool) -> "Turns":
        """With one batch more, `row` the id of one of its rows."""
        return Turns(self.batches + 1, self.counted + counts, self.pairs + is_pair, self.first_row or row)


def paired_batches(batches: int, fraction: float) -> int:
    """Of a worker's first `batches`, those decoded at full depth too; one more or less by the draw of the last part."""
    if fraction <= 0:
        return 0
    last = Turns(counted=batches)
    drawn = int(batches * _share(fraction)) + (last._drawn(fraction) < batches)
    places = (Turns(counted=place) for place in FIRST_PAIRS if place < batches)
    return drawn + sum(turns.counted != turns._drawn(fraction) for turns in places)


def _share(fraction: float) -> Fraction:
    return Fraction(str(fraction))  # 0.1 is a tenth, which the float is not


def predicted(
    result: BatchResult,
    schedule: Schedule,
    model: Decoder,
    ceilings: Ceilings,
    *,
    itemsize: int,
    num_devices: int,
    sharing: SharedShape | None,
    in_graphs: bool,
) -> dict[str, float]:
    """Seconds of a batch by the cost model, under its schedule and at full depth, as its record has them."""
    record: dict[str, float] = {}
    parts = num_devices  # all of them take as long as one part alone would on one device
    for prefix, chosen in (("predicted", schedule), ("full_predicted", FullDepth(model.config.num_hidden_layers))):
        prefill, decode = predict_s(
            model.config,
            chosen,
            ceilings,
            prompt_columns=result.stats.prompt_columns,
            rows=-(-result.stats.rows // parts),
            batch_rows=[-(-rows // parts) for rows in result.stats.batch_rows],
            itemsize=itemsize,
            weight_itemsize=model.weight_itemsize,
            apart=result.stats.deferred_ffn_rows if chosen is schedule else None,
            sharing=sharing,
            in_graphs=in_graphs,
        )
        if isinstance(chosen, Lossless) and isinstance(result.stats, LosslessStats):
            decode = result.stats.model_decode_s  # how many rounds there were nobody knew before
        record |= {f"{prefix}_prefill_s": prefill, f"{prefix}_decode_s": decode}
    return record
