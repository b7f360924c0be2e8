"""What passes of drafts take on this machine, those at full depth over several columns, and steps without any of that.

Rounds of real batches are timed. The cost model alone leaves out the host's work, which is most of what a round of few
rows of a small model takes. No Ray, no files.
"""

from collections.abc import Sequence
from statistics import median

from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch, now
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import FullDepth, Schedule, SkipDecode
from skipdecode.speculative.controller import Decision, Hold
from skipdecode.speculative.draft import Chain
from skipdecode.speculative.draft_length import MOST, SKIPPED, DraftLength
from skipdecode.speculative.draft_vocab import DraftHead, DraftVocabulary
from skipdecode.speculative.latency_model import Prices
from skipdecode.speculative.speculative_batch import SpeculativeBatch

VERIFIED = (1, 2, 3, 5, MOST)  # drafts behind each row's newest token; others are priced by the nearest
# Everything is timed in turns, since other processes may slow one down and not the other; prices are by the least of a
# few times (`skipdecode.speculative.latency_model`).
TURNS = 3
# Of each, in a turn. The first lay calls out, and find nothing in the caches behind prompts: they are in no price.
COLD, ROUNDS = 3, 2
PASSES = 2  # of drafts in a round, where nobody says how many
STEPS = 12  # at full depth, without drafts, of which the first half is in no price either


class Always(DraftLength):
    """Drafts so many tokens by skipped passes, whatever they bring, and none by repetition."""

    def __init__(
        self, schedule: Lossless, prices: Prices, drafted: int, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__(schedule, prices, vocabulary=vocabulary)
        self._decision = Decision(drafted, {})

    def decide(self, rows: int, k: int, context: int) -> Decision:
        return self._decision

    def again(self, hold: Hold, rows: int, k: int, context: int) -> None:
        """It stays."""


class Verifications(SpeculativeBatch):
    """Drafts that cost nothing: each row's newest token again."""

    def _skip(self, chains: Sequence[Chain], short: DraftHead | None) -> bool:
        for chain in chains:
            chain.add([chain.tokens[0]] * chain.wanted, SKIPPED, ())
        return False  # such rounds say nothing of what the host does in others


def time_full_depth(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    most_new: int,
    prices: Prices,
    temperature: float = 0.0,
) -> None:
    """Times passes at full depth of so many rows, with 1 to MOST drafts each, and steps of decoding without drafts, for
    `prices`. `most_new`: tokens that there is room for behind each prompt; `temperature` of every row."""
    num_layers = model.config.num_hidden_layers
    for rows in batch_sizes:
        time_steps(model, prompts, rows, most_new, prices, temperature)
        for drafted in VERIFIED:
            whole = Lossless(num_layers, SkipDecode(num_layers, num_layers, num_layers, 1, 1))  # none of which is run
            batch = Verifications(model, whole, length=Always(whole, prices, drafted))
            _run(batch, _requests(prompts, rows, most_new, temperature), prices)


def time_steps(
    model: Decoder, prompts: Sequence[Sequence[int]], rows: int, most_new: int, prices: Prices, temperature: float
) -> float:
    """The same for steps alone, one by one as passes of drafts are, and as a run without `decode.lossless` does them.
    The seconds that the first ones took more than others."""
    full, took = FullDepth(model.config.num_hidden_layers), list[float]()
    requests = _requests(prompts, rows, min(most_new, STEPS + 1), temperature)
    cohort = StaticBatch(model, requests, full)
    cohort.prefill()
    context = sum(len(request.prompt_tokens) for request in requests) // rows
    while not cohort.is_done:
        start = now(model.device)
        cohort.step()
        took.append(now(model.device) - start)
    cold = len(took) // 2
    for number, took_s in enumerate(took[cold:], start=cold + 1):
        prices.saw("full", full.prefill(), rows, rows, context + number, took_s)
    return _more(took, cold)


def time_drafts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    most_new: int,
    drafts: Schedule,
    prices: Prices,
    listed: frozenset[int] | None = None,
    temperature: float = 0.0,
    drafted: int = PASSES,
) -> dict[int, float]:
    """The same for passes of `drafts`, which choose among the tokens `listed`; None: among all. `drafted`: so many in a
    round. The seconds that a batch's first rounds took more than others, by its rows."""
    schedule, begun = Lossless(drafts.num_layers, drafts), dict[int, float]()
    for rows in batch_sizes:
        vocabulary = DraftVocabulary(model.config.vocab_size, listed or (), learns=False)
        length = Always(schedule, prices, drafted, vocabulary)
        batch = SpeculativeBatch(model, schedule, length=length)
        begun[rows] = _run(batch, _requests(prompts, rows, most_new, temperature), prices)
    return begun


def _requests(prompts: Sequence[Sequence[int]], rows: int, most_new: int, temperature: float) -> list[Request]:
    sampling = Sampling(most_new, temperature, ignore_eos=True)
    return [Request(str(row), list(prompts[row % len(prompts)]), sampling) for row in range(rows)]


def _run(batch: SpeculativeBatch, requests: Sequence[Request], prices: Prices) -> float:
    is_timed, took = prices.is_timed, list[float]()
    batch.join(requests)
    try:
        for number in range(COLD + ROUNDS):
            prices.is_timed = is_timed and number >= COLD
            if not batch.is_done:
                start = now(batch.model.device)
                batch.step()
                took.append(now(batch.model.device) - start)
    finally:
        prices.is_timed = is_timed
    return _more(took, min(COLD, len(took) // 2))


def _more(took: Sequence[float], cold: int) -> float:
    """Seconds that the first `cold` passes took more than as many others."""
    return sum(took[:cold]) - cold * median(took[cold:]) if cold else 0.0
