"""Which layers draft best for a model at full depth: searched for on texts of its own, by acceptance per cost.

Tried are the schedules that people name, and sets of layers: from all of them the one goes whose loss costs least,
again and again. One half of the texts chooses; the other half says what the best are good for, since what was chosen
for its figures looks better by them than it is. Prices are those that decoding decides by
(`skipdecode.speculative.latency_model`).
The best are priced by the times that their passes take here, where `prices` are those of this machine. No Ray, no
files.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

from actors.measuring.draft_times import TURNS, time_drafts, time_full_depth
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import TeacherBatch, teacher_batch
from skipdecode.schedules.from_config import METHODS, PRESETS, make_schedule, preset
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import ChosenLayers, FullDepth, LayerPlan, Schedule
from skipdecode.speculative.acceptance import Counts, DraftedText
from skipdecode.speculative.draft_length import MARGIN, MOST, SKIPPED, DraftLength
from skipdecode.speculative.draft_vocab import ENOUGH, SHARE
from skipdecode.speculative.latency_model import Prices

Pair = tuple[list[int], list[int]]
"""Prompt tokens and the tokens that the model wrote at full depth."""
Plans = tuple[LayerPlan, ...]
"""Of each decode step."""
Tell = Callable[[str], None]
"""Takes a line about how far the search is."""

# Depths that are tried by each method, of all layers; the presets are in between, and fall.
SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 5 / 6)
# Layers whose loss is measured again once others are gone: those that it cost least to lose before. All of them would
# be some fifty times the work for a deep model, and layers that mattered go on to.
CLOSEST = 8
PATIENCE = 5  # layers that are still taken away behind the best set; acceptance falls in steps
FINALISTS = 8  # measured by the half of the texts that the search has not seen, and timed


@dataclass(frozen=True)
class Gain:
    """Of drafts in batches of one size, as expected."""

    batch_size: int
    draft_tokens: int
    """Drafted at a time; 0: drafts do not pay."""
    tokens_per_pass: float
    """That a row gets from a pass at full depth."""
    speedup: float
    """Over full depth without drafts; 1 where they do not pay."""


@dataclass(frozen=True)
class Candidate:
    """A way to draft, and what it comes to."""

    decode: dict[str, Any]
    """The `decode:` mapping of the schedule."""
    acceptance: tuple[float, ...]
    """By place in a draft: the share of drafts that full depth makes too, where all before them were."""
    gains: tuple[Gain, ...]
    nearest: float
    """The best speedup over full depth at any of the batch sizes, with one draft at least; below 1 where all lose."""

    @property
    def mean_speedup(self) -> float:
        """Geometric, over the batch sizes."""
        return float(prod(gain.speedup for gain in self.gains) ** (1 / len(self.gains)))

    @property
    def pays(self) -> bool:
        """At one of the batch sizes at least."""
        return any(gain.draft_tokens for gain in self.gains)


class DraftSample:
    """Texts that `model` wrote at full depth, in two halves."""

    def __init__(self, model: Decoder, pairs: Sequence[Pair], batch_rows: int) -> None:
        """`pairs`: one at least of two tokens; a single one is both halves."""
        self.model = model
        long = sorted((pair for pair in pairs if len(pair[1]) > 1), key=lambda pair: (len(pair[0]), len(pair[1])))
        assert long, "no text that a decode step went on with"
        self.prompts = [prompt for prompt, _ in long]
        self.num_prompts, self.num_tokens = len(long), sum(len(made) - 1 for _, made in long)
        self.context = sum(len(prompt) + len(made) // 2 for prompt, made in long) // len(long)
        """Columns that a row sees in the middle of its text, in the mean."""
        self.middle = sum(len(made) for _, made in long) // (2 * len(long))
        """The decode step there."""
        pad = model.config.filler_token_id

        def batches(half: Sequence[Pair]) -> list[TeacherBatch]:
            return [
                teacher_batch(half[at : at + batch_rows], pad, model.device) for at in range(0, len(half), batch_rows)
            ]

        self.listed = _listed(model, self.prompts, long[::2], long[1::2] or long)
        """Tokens that drafts choose among; None: all."""
        self._choosing = batches(long[::2])  # alike in lengths, since they are in order
        self._judging = batches(long[1::2] or long)
        self._held: tuple[TeacherBatch, DraftedText] | None = None

    def measure(self, schedules: Sequence[Schedule], places: int) -> list[Counts]:
        """Of each schedule, by the half that chooses."""
        totals = [Counts((0,) * places, (0,) * places)] * len(schedules)
        for text in map(self._drafted, self._choosing):
            totals = [total + text.count(one, places) for total, one in zip(totals, schedules, strict=True)]
        return totals

    def judge(self, schedules: Sequence[Schedule]) -> list[tuple[Counts, list[float]]]:
        """Of each, by the half that judges: drafts by place, and the tokens that a row gets from a pass behind 0, 1, ..
        MOST drafts, up to the ends of the texts."""
        totals = [Counts((0,) * MOST, (0,) * MOST)] * len(schedules)
        rounds, tokens = [[0] * MOST for _ in schedules], 0
        for text in map(self._drafted, self._judging):
            tokens += text.num_tokens
            for i, one in enumerate(schedules):
                totals[i] += text.count(one, MOST)
                rounds[i] = [a + b for a, b in zip(rounds[i], text.rounds(one, MOST), strict=True)]
        return [(own, [1.0, *(tokens / n for n in ran)]) for own, ran in zip(totals, rounds, strict=True)]

    def _drafted(self, batch: TeacherBatch) -> DraftedText:
        if self._held is None or self._held[0] is not batch:
            self._held = None  # one at a time: its keys and values are many
            self._held = batch, DraftedText(self.model, batch, self.listed)
        return self._held[1]


def _listed(
    model: Decoder, prompts: Sequence[Sequence[int]], choosing: Sequence[Pair], judging: Sequence[Pair]
) -> frozenset[int] | None:
    """What drafts of a run will choose among, once it has seen such prompts and texts; None: all tokens."""
    listed = frozenset(token for tokens in [*prompts, *(made for _, made in choosing)] for token in tokens)
    asked = [token for _, made in judging for token in made]
    is_enough = sum(token in listed for token in asked) >= ENOUGH * len(asked)
    is_short = len(listed) <= SHARE * model.config.vocab_size
    return listed if is_enough and is_short and model.has_head_rows else None


class Search:
    """Of one model."""

    def __init__(
        self, sample: DraftSample, prices: Prices, batch_sizes: Sequence[int], max_new_tokens: int, tell: Tell
    ) -> None:
        self.sample, self.prices, self.batch_sizes, self.tell = sample, prices, tuple(batch_sizes), tell
        self.num_layers, self.max_new_tokens = sample.model.config.num_hidden_layers, max_new_tokens

    def run(self) -> list[Candidate]:
        """The finalists, the best one first; none of them pays where nothing does."""
        if self.prices.is_timed:
            self.tell("times of passes at full depth")
            time_full_depth(*self._shape, self.prices)
        found = {self._plans(one.decode): one for one in [*self._try_sets(), *self._try_named()]}  # names are plainer
        tried = sorted(found.values(), key=_merit, reverse=True)
        finalists = [one.decode for one in tried[:FINALISTS]]
        self.tell(f"{len(finalists)} best of {len(tried)} ways to draft, on texts that the search has not seen")
        schedules = [self.schedule(decode) for decode in finalists]
        judged, prices = self.sample.judge(schedules), self._timed(schedules)
        best = [
            self.candidate(decode, counts.rates, own, expected)
            for decode, (counts, expected), own in zip(finalists, judged, prices, strict=True)
        ]
        return sorted(best, key=_merit, reverse=True)

    @property
    def _shape(self) -> tuple[Decoder, list[list[int]], tuple[int, ...], int]:
        """Of the batches that are timed."""
        return self.sample.model, self.sample.prompts, self.batch_sizes, self.max_new_tokens

    def _timed(self, finalists: Sequence[Schedule]) -> list[Prices]:
        """For each, prices that know what its drafts take; of all, what full depth takes at the same time."""
        prices = [deepcopy(self.prices) for _ in finalists]
        for turn in range(TURNS if self.prices.is_timed else 0):
            self.tell(f"times of passes, {turn + 1} of {TURNS}")
            time_full_depth(*self._shape, self.prices)
            for drafts, own in zip(finalists, prices, strict=True):
                time_drafts(*self._shape, drafts, own, self.sample.listed)
        for own in prices:
            own.learn(self.prices)
        return prices

    def schedule(self, decode: dict[str, Any]) -> Schedule:
        return make_schedule(decode, num_layers=self.num_layers, max_new_tokens=self.max_new_tokens)

    def _plans(self, decode: dict[str, Any]) -> Plans:
        """What runs, whatever it is called."""
        schedule = self.schedule(decode)
        return tuple(schedule.step(k) for k in range(self.max_new_tokens))

    def candidate(
        self,
        decode: dict[str, Any],
        acceptance: Sequence[float],
        prices: Prices | None = None,
        expected: Sequence[float] | None = None,
    ) -> Candidate:
        """What drafts that are accepted so often come to; places behind the last known one are like it. `prices`: None
        for those of the search. `expected`: tokens that a pass gives a row behind 0, 1, .. MOST drafts; None: by
        acceptance alone, as if no text ended."""
        drafts = self.schedule(decode)
        length = DraftLength(Lossless(self.num_layers, drafts, adaptive=True), prices or self.prices, acceptance)
        listed = self.sample.listed
        length.listed = None if listed is None else len(listed)
        expected = expected or length.acceptance.expected(SKIPPED, MOST)
        gains, nearest = [], 0.0
        for rows in self.batch_sizes:
            speedups = length.speedups(rows, self.sample.middle, self.sample.context, expected)
            best = max(range(1, MOST + 1), key=speedups.__getitem__)
            nearest = max(nearest, speedups[best])
            pays = speedups[best] >= MARGIN
            gains.append(Gain(rows, best, expected[best], speedups[best]) if pays else Gain(rows, 0, 1.0, 1.0))
        return Candidate(decode, tuple(acceptance), tuple(gains), nearest)

    def _try_named(self) -> list[Candidate]:
        carried, whole = self.sample.model.config.skip_decode, FullDepth(self.num_layers).prefill()
        kept: dict[Plans, dict[str, Any]] = {}
        for decode in named_decodes(carried, self.num_layers, self.max_new_tokens):
            plans = self._plans(decode)
            if set(plans) != {whole}:  # of shallow models several come to the same layers
                kept.setdefault(plans, decode)
        self.tell(f"{len(kept)} schedules by name")
        counts = self.sample.measure([self.schedule(decode) for decode in kept.values()], 1)
        return [self.candidate(decode, own.rates) for decode, own in zip(kept.values(), counts, strict=True)]

    def _try_sets(self) -> Iterator[Candidate]:
        """Sets of layers, one layer fewer each time, until they have been getting worse for a while."""
        layers = frozenset(range(self.num_layers))
        loss = dict.fromkeys(layers, 0.0)  # of acceptance, by the layer that would go; as it was when last measured
        best, since = 0.0, 0
        while len(layers) > 1 and since < PATIENCE:
            asked = sorted(layers, key=lambda layer: (loss[layer], layer))
            if len(layers) < self.num_layers:
                asked = asked[:CLOSEST]
            sets = [ChosenLayers(self.num_layers, tuple(sorted(layers - {layer}))) for layer in asked]
            rates = [own.rates[0] for own in self.sample.measure(sets, 1)]
            loss |= {layer: 1 - rate for layer, rate in zip(asked, rates, strict=True)}
            at = max(range(len(asked)), key=rates.__getitem__)
            layers -= {asked[at]}
            found = self.candidate({"method": "layers", "layers": list(sets[at].layers)}, rates[at : at + 1])
            since = 0 if found.nearest > best else since + 1
            best = max(best, found.nearest)
            self.tell(f"{len(layers)} of {self.num_layers} layers: {_say(found)}")
            yield found


def _merit(candidate: Candidate) -> tuple[float, float]:
    return candidate.mean_speedup, candidate.nearest


def _say(candidate: Candidate) -> str:
    return f"{100 * candidate.acceptance[0]:.1f} % of drafts accepted, expected speedup {candidate.nearest:.2f} at best"


def named_decodes(carried: dict[str, Any] | None, num_layers: int, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """`decode:` mappings to try: what the checkpoint was tuned for, the presets, constant depths. All of their keys are
    there, so that they mean the same layers wherever they are used."""
    horizon = max(max_new_tokens - 1, 1)
    if carried is not None and carried.get("method", "skipdecode") != "full":
        method = str(carried.get("method", "skipdecode"))
        own = {"horizon": horizon} if "horizon" in METHODS[method].keys else {}
        yield {"method": method, **own} | {key: value for key, value in carried.items() if value is not None}
    for method in ("skipdecode", "early_exit"):
        for speedup in PRESETS[24]:
            most, fewest = preset(num_layers, speedup)
            yield {"method": method, "max_layers": most, "min_layers": fewest, "horizon": horizon}
    for depth in sorted({max(1, round(share * num_layers)) for share in SHARES}):
        for method in ("skipdecode", "early_exit"):
            yield {"method": method, "max_layers": depth, "min_layers": depth, "horizon": 1}
        if depth >= 2:
            yield {"method": "unified", "layers": depth}
