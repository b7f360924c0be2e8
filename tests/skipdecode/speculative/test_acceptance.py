"""What a schedule would draft, measured over a whole text at once, against rows that really draft. Float32."""

from pathlib import Path

import pytest

from skipdecode.checkpoint.weights import load_model
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import LosslessStats
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import FullDepth, Unified
from skipdecode.speculative.acceptance import Counts, DraftedText
from skipdecode.speculative.draft_length import MOST, DraftLength
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.generate import generate_lossless
from skipdecode.speculative.latency_model import Prices
from skipdecode.speculative.ngram import Repeats
from tests.support.cuda_models import random_model, some_requests
from tests.support.lossless_models import DRAFTS as DRAFTS_AND_FULL
from tests.support.lossless_models import is_quiet

L, N = 6, 24
FULL = FullDepth(L)
DRAFTS = DRAFTS_AND_FULL[1:]
MODELS = ["opt", "opt, norms behind", "llama", "qwen3"]


@pytest.fixture
def quiet(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Decoder:
    """A model whose middle layers change so little that drafts without them are often right."""
    model = load_model(tiny_checkpoint) if request.param == "opt" else random_model(request.param, layers=L)
    return is_quiet(model)


def texts(model: Decoder, listed: frozenset[int] | None = None) -> tuple[list[Request], DraftedText]:
    requests = some_requests(N)
    made = generate(model, requests, FULL).completions
    pairs = [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)]
    return requests, DraftedText(model, teacher_batch(pairs, model.config.filler_token_id), listed)


def expected_counts(hits: list[list[bool]], number: int) -> tuple[list[int], list[int]]:
    """Drafted and accepted by place, of a row that drafts `number` tokens a round; `hits`: [place][k]."""
    drafted, accepted, k = [0] * number, [0] * number, 0
    while k < N - 1:
        room = min(number, N - 2 - k)
        good = next((p for p in range(room) if not hits[p][k]), room)
        for place in range(room):
            drafted[place] += 1
            accepted[place] += place < good
        k += good + 1
    return drafted, accepted


@pytest.mark.parametrize("quiet", MODELS, indirect=True)
@pytest.mark.parametrize(
    ("is_packed", "listed"),
    [
        pytest.param(True, None, id="packed"),
        pytest.param(False, range(0, 320, 2), id="parts, few tokens"),
        pytest.param(False, None, id="parts", marks=pytest.mark.slow),
        pytest.param(True, range(0, 320, 2), id="packed, few tokens", marks=pytest.mark.slow),
    ],
)
def test_every_draft_is_the_one_that_rows_make(
    quiet: Decoder, is_packed: bool, listed: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of real rows, one by one: as many drafts as there are, accepted as far as was measured. They choose among
    all tokens, or among those listed."""
    monkeypatch.setattr(Repeats, "find", lambda *_: (0, []))
    model = quiet.pack() if is_packed else quiet
    tokens = None if listed is None else frozenset(listed).intersection(range(model.config.vocab_size))
    requests, text = texts(model, tokens)
    seen = set()
    for drafts in DRAFTS:
        hits = text.hits(drafts, MOST)
        for number in (1, 3, MOST) if listed is None and not is_packed else (3,):
            wanted, got = [0] * number, [0] * number
            for row in range(len(requests)):
                drafted, accepted = expected_counts(hits[:, row].tolist(), number)
                wanted = [a + b for a, b in zip(wanted, drafted, strict=True)]
                got = [a + b for a, b in zip(got, accepted, strict=True)]
            schedule, prices = Lossless(L, drafts, number), Prices(model.config, model.dtype.itemsize)
            vocabulary = DraftVocabulary(model.config.vocab_size, tokens or (), learns=False)
            length = DraftLength(schedule, prices, vocabulary=vocabulary)
            result = generate_lossless(model, requests, schedule, length=length)
            stats = result.stats
            assert isinstance(stats, LosslessStats)
            most = [place for place, count in enumerate(wanted) if count]
            assert stats.drafted_at == [wanted[place] for place in most], (drafts, number)
            assert stats.accepted_at == [got[place] for place in most], (drafts, number)
            assert stats.row_steps == text.rounds(drafts, MOST)[number - 1], (drafts, number)
        seen.add(float(hits[0].float().mean()))
    assert len(seen) > 3, "schedules differ"
    assert min(seen) < 0.9


def test_texts_shorter_than_a_draft_are_counted() -> None:
    """Answers of two or three tokens, of which drafts run out at once."""
    model = random_model("llama", layers=L)
    for length in (1, 2, 3, MOST):
        pairs = [(request.prompt_tokens, list(range(5, 5 + length))) for request in some_requests(N)]
        counts = DraftedText(model, teacher_batch(pairs, model.config.filler_token_id)).count(Unified(L, 3), MOST)
        assert counts.tried[0] == len(pairs) * (length - 1)
        assert all(tried == 0 for tried in counts.tried[length - 1 :])


@pytest.mark.parametrize("quiet", ["opt", "llama"], indirect=True)
def test_the_share_of_a_run_is_near(quiet: Decoder) -> None:
    """A run drafts where its rounds begin, and repeats where it can: within 12 points for the first token."""
    requests, text = texts(quiet)
    for drafts in DRAFTS:
        counts = text.count(drafts, 4)
        stats = generate_lossless(quiet, requests, Lossless(L, drafts, 4)).stats
        assert isinstance(stats, LosslessStats)
        assert stats.accepted_at[0] / stats.drafted_at[0] == pytest.approx(counts.rates[0], abs=0.12), drafts


def test_full_depth_drafts_what_it_makes() -> None:
    """Every draft is accepted, and those that run into the end of the text have no token to be held against."""
    model = random_model("llama", layers=L)
    made = generate(model, some_requests(9), FULL).completions
    requests = some_requests(9)
    pairs = [(r.prompt_tokens, c.tokens[: 9 - i]) for i, (r, c) in enumerate(zip(requests, made, strict=True))]
    counts = DraftedText(model, teacher_batch(pairs, model.config.filler_token_id)).count(FULL, 5)
    lengths = [len(tokens) for _, tokens in pairs]
    assert counts.tried == counts.accepted == tuple(sum(max(n - 1 - p, 0) for n in lengths) for p in range(5))
    assert counts.rates == (1.0,) * 5


def test_counts_add_up() -> None:
    total = Counts((5, 2, 0), (2, 1, 0)) + Counts((3, 2, 0), (2, 1, 0))
    assert total == Counts((8, 4, 0), (4, 2, 0))
    assert total.rates == (0.5, 0.5), "nobody tried the third"
