"""Which layers draft best for a model at full depth: a search on texts that it wrote, by acceptance and roofline cost.

The candidates are fixed here, whatever schedules exist: what the checkpoint was tuned for, the presets and constant
depths of SkipDecode and early exit, evenly spaced layers (`named_decodes`), and sets of layers: from all layers, the
one whose loss costs the least acceptance is removed, again and again. One half of the texts chooses, and the other half
says what the best are worth, since whatever was chosen for its figures looks better by them than it is. No passes are
timed: how fast drafts are on a machine is for the run to find out (`skipdecode.speculative.controller`). No Ray, no
files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import TeacherBatch, teacher_batch
from skipdecode.schedules.from_config import METHODS, PRESETS, make_schedule, preset
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import ChosenLayers, FullDepth, Schedule
from skipdecode.speculative.controller import MIN_SPEEDUP, SpeculationController
from skipdecode.speculative.draft import LAYERS
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.measure_acceptance import DraftedText

Pair = tuple[list[int], list[int]]
"""Prompt tokens and the tokens that the model wrote at full depth."""
Plans = tuple[LayerPlan, ...]
"""The plan of each decode step."""
Tell = Callable[[str], None]
"""Reports a line of progress."""

# Constant depths that are tried by each method, as shares of all layers; the presets lie between them, and fall.
SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 5 / 6)
# Layers whose loss is measured anew after one was removed: those that it cost least to lose before. To measure all of
# them would be some fifty times the work for a deep model.
CLOSEST = 8
PATIENCE = 5  # layers that are still removed after the best set was found: acceptance falls in steps
FINALISTS = 8


@dataclass(frozen=True)
class Gain:
    """What drafts are expected to gain in batches of one size."""

    batch_size: int
    draft_tokens: int
    """Drafted per round; 0: drafts do not pay."""
    tokens_per_pass: float
    """Tokens that a row gets from a pass at full depth."""
    speedup: float
    """Over full depth without drafts; 1 where they do not pay."""


@dataclass(frozen=True)
class Candidate:
    """A schedule to draft by, and what it is expected to gain."""

    decode: dict[str, Any]
    """The `decode:` mapping of the schedule."""
    acceptance: float
    """The share of drafts that full depth makes too."""
    gains: tuple[Gain, ...]
    nearest: float
    """The best speedup at any of the batch sizes, with one draft at least; below 1 where all lose."""

    @property
    def mean_speedup(self) -> float:
        """The geometric mean over the batch sizes."""
        return float(prod(gain.speedup for gain in self.gains) ** (1 / len(self.gains)))

    @property
    def pays(self) -> bool:
        """True if it pays at one of the batch sizes at least."""
        return any(gain.draft_tokens for gain in self.gains)


class DraftSample:
    """Texts that `model` wrote at full depth, in two halves."""

    def __init__(self, model: Decoder, pairs: Sequence[Pair], batch_rows: int) -> None:
        """`pairs`: at least one text of two tokens; a single one is both halves."""
        self.model = model
        long = sorted((pair for pair in pairs if len(pair[1]) > 1), key=lambda pair: (len(pair[0]), len(pair[1])))
        assert long, "no text with a decode step"
        self.num_prompts, self.num_tokens = len(long), sum(len(made) - 1 for _, made in long)
        self.context = sum(len(prompt) + len(made) // 2 for prompt, made in long) // len(long)
        """Positions that a row sees in the middle of its text, in the mean."""
        self.middle = sum(len(made) for _, made in long) // (2 * len(long))
        """The decode step there."""
        pad = model.config.filler_token_id

        def batches(half: Sequence[Pair]) -> list[TeacherBatch]:
            return [
                teacher_batch(half[at : at + batch_rows], pad, model.device) for at in range(0, len(half), batch_rows)
            ]

        # every other text: the halves are alike in lengths
        self._choosing, self._judging = batches(long[::2]), batches(long[1::2] or long)
        self._held: tuple[TeacherBatch, DraftedText] | None = None

    def acceptance(self, schedules: Sequence[Schedule], *, judging: bool = False) -> list[float]:
        """The share of each schedule's drafts that are accepted, on the half that chooses or on the one that judges."""
        accepted, num_tokens = [0] * len(schedules), 0
        for text in map(self._drafted, self._judging if judging else self._choosing):
            num_tokens += text.num_tokens
            accepted = [a + int(text.hits(one).sum()) for a, one in zip(accepted, schedules, strict=True)]
        return [count / num_tokens for count in accepted]

    def _drafted(self, batch: TeacherBatch) -> DraftedText:
        if self._held is None or self._held[0] is not batch:
            self._held = None  # one at a time: its keys and values are large
            self._held = batch, DraftedText(self.model, batch)
        return self._held[1]


class Search:
    """The search for one model's drafts."""

    def __init__(
        self, sample: DraftSample, latency: LatencyModel, batch_sizes: Sequence[int], max_new_tokens: int, tell: Tell
    ) -> None:
        self.sample, self.latency, self.batch_sizes, self.tell = sample, latency, tuple(batch_sizes), tell
        self.num_layers, self.max_new_tokens = sample.model.config.num_hidden_layers, max_new_tokens

    def run(self) -> list[Candidate]:
        """The finalists, the best one first; none of them pays where nothing does."""
        found = {self._plans(one.decode): one for one in [*self._try_sets(), *self._try_named()]}  # prefers names
        tried = sorted(found.values(), key=_merit, reverse=True)
        finalists = [one.decode for one in tried[:FINALISTS]]
        self.tell(f"the {len(finalists)} best of {len(tried)} ways to draft, on texts that the search has not seen")
        rates = self.sample.acceptance([self.schedule(decode) for decode in finalists], judging=True)
        best = [self.candidate(decode, rate) for decode, rate in zip(finalists, rates, strict=True)]
        return sorted(best, key=_merit, reverse=True)

    def schedule(self, decode: dict[str, Any]) -> Schedule:
        return make_schedule(decode, num_layers=self.num_layers, max_new_tokens=self.max_new_tokens)

    def candidate(self, decode: dict[str, Any], acceptance: float) -> Candidate:
        """What a schedule is expected to gain whose drafts are accepted that often."""
        lossless = Lossless(self.num_layers, self.schedule(decode), adaptive=True)
        controller, gains, nearest = SpeculationController(lossless, self.latency, (acceptance,)), [], 0.0
        for rows in self.batch_sizes:
            speedups = controller.speedups(rows, self.sample.middle, self.sample.context)
            best = max(range(1, len(speedups)), key=speedups.__getitem__)
            nearest = max(nearest, speedups[best])
            if speedups[best] < MIN_SPEEDUP:
                gains.append(Gain(rows, 0, 1.0, 1.0))
            else:
                per_pass = controller.acceptance.expected_tokens(LAYERS, best)
                gains.append(Gain(rows, best, per_pass, speedups[best]))
        return Candidate(decode, acceptance, tuple(gains), nearest)

    def _plans(self, decode: dict[str, Any]) -> Plans:
        """What the schedule runs, whatever it is called."""
        schedule = self.schedule(decode)
        return tuple(schedule.step(k) for k in range(self.max_new_tokens))

    def _try_named(self) -> list[Candidate]:
        carried, whole = self.sample.model.config.skip_decode, FullDepth(self.num_layers).prefill()
        kept: dict[Plans, dict[str, Any]] = {}
        for decode in named_decodes(carried, self.num_layers, self.max_new_tokens):
            plans = self._plans(decode)
            if set(plans) != {whole}:  # in shallow models several run the same layers
                kept.setdefault(plans, decode)
        self.tell(f"{len(kept)} schedules by name")
        rates = self.sample.acceptance([self.schedule(decode) for decode in kept.values()])
        return [self.candidate(decode, rate) for decode, rate in zip(kept.values(), rates, strict=True)]

    def _try_sets(self) -> Iterator[Candidate]:
        """Sets of layers, one layer fewer each time, until they have been getting worse for a while."""
        layers = frozenset(range(self.num_layers))
        loss = dict.fromkeys(layers, 0.0)  # of acceptance, by the layer to remove; as last measured
        best, since = 0.0, 0
        while len(layers) > 1 and since < PATIENCE:
            asked = sorted(layers, key=lambda layer: (loss[layer], layer))
            if len(layers) < self.num_layers:
                asked = asked[:CLOSEST]
            sets = [ChosenLayers(self.num_layers, tuple(sorted(layers - {layer}))) for layer in asked]
            rates = self.sample.acceptance(sets)
            loss |= {layer: 1 - rate for layer, rate in zip(asked, rates, strict=True)}
            at = max(range(len(asked)), key=rates.__getitem__)
            layers -= {asked[at]}
            found = self.candidate({"method": "layers", "layers": list(sets[at].layers)}, rates[at])
            since = 0 if found.nearest > best else since + 1
            best = max(best, found.nearest)
            self.tell(
                f"{len(layers)} of {self.num_layers} layers: {100 * found.acceptance:.1f} % of drafts accepted, "
                f"expected speedup {found.nearest:.2f} at best"
            )
            yield found


def _merit(candidate: Candidate) -> tuple[float, float]:
    return candidate.mean_speedup, candidate.nearest


def named_decodes(carried: dict[str, Any] | None, num_layers: int, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """`decode:` mappings to try: what the checkpoint was tuned for, the presets, constant depths. All of their keys are
    given, so that they mean the same layers wherever they are used."""
    horizon = max(max_new_tokens - 1, 1)
    if carried is not None and carried.get("method", "skipdecode") != "full":
        method = str(carried.get("method", "skipdecode"))
        own = {"horizon": horizon} if "horizon" in METHODS[method].keys else {}
        yield {"method": method, **own} | {key: value for key, value in carried.items() if value is not None}
    keys = {"max_layers", "min_layers", "horizon"}
    falling = [name for name, method in METHODS.items() if keys <= method.keys.keys()]
    for method in falling:
        for speedup in PRESETS[24]:
            most, fewest = preset(num_layers, speedup)
            yield {"method": method, "max_layers": most, "min_layers": fewest, "horizon": horizon}
    for depth in sorted({max(1, round(share * num_layers)) for share in SHARES}):
        for method in falling:
            yield {"method": method, "max_layers": depth, "min_layers": depth, "horizon": 1}
        if depth >= 2:
            yield {"method": "unified", "layers": depth}
