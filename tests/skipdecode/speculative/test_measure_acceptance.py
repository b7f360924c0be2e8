"""The share of drafts that is accepted, measured over whole texts at once, against rows that really draft. Float32."""

from pathlib import Path

import pytest

from skipdecode.checkpoint.weights import load_model
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import LosslessStats
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import ChosenLayers, EarlyExit, FullDepth, Unified
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.generate_lossless import generate_lossless
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.measure_acceptance import DraftedText
from skipdecode.speculative.ngram import NgramProposer
from tests.support.cuda_models import random_model, some_requests
from tests.support.lossless_models import DRAFTS as DRAFTS_AND_FULL
from tests.support.lossless_models import is_quiet

L, N = 6, 24
FULL = FullDepth(L)
DRAFTS = [*DRAFTS_AND_FULL[1:], EarlyExit(L, 4, 1, 1, 9), Unified(L, 3), ChosenLayers(L, (1, 3, 4, 5))]
MODELS = ["opt", "opt, norms behind", "llama", "qwen3", "gemma3"]


@pytest.fixture
def quiet(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Decoder:
    """A model whose middle layers change so little that drafts without them are often right."""
    model = load_model(tiny_checkpoint) if request.param == "opt" else random_model(request.param, layers=L)
    return is_quiet(model)


def texts(model: Decoder, num_new: int = N) -> tuple[list[Request], DraftedText]:
    requests = some_requests(num_new)
    made = generate(model, requests, FullDepth(model.config.num_hidden_layers)).completions
    pairs = [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)]
    return requests, DraftedText(model, teacher_batch(pairs, model.config.filler_token_id))


@pytest.mark.parametrize("quiet", MODELS, indirect=True)
@pytest.mark.parametrize("is_packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_draft_is_the_one_that_rows_make(
    quiet: Decoder, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of real rows that draft one token each: as many are accepted as was measured where their rounds begin."""
    monkeypatch.setattr(NgramProposer, "propose", lambda *_: (0, []))
    model = quiet.pack() if is_packed else quiet
    requests, text = texts(model)
    seen = set()
    for drafts in DRAFTS:
        hits, drafted, accepted = text.hits(drafts), 0, 0
        for row in hits.tolist():
            k = 0
            while k < N - 2:  # the last token of a row is not drafted
                drafted, accepted, k = drafted + 1, accepted + row[k], k + 1 + row[k]
        vocabulary = DraftVocabulary(model.config.vocab_size, learns=False)
        schedule = Lossless(L, drafts, 1)
        controller = SpeculationController(schedule, LatencyModel.of(model), vocabulary=vocabulary)
        stats = generate_lossless(model, requests, schedule, controller=controller).stats
        assert isinstance(stats, LosslessStats)
        assert (stats.drafted_at, stats.accepted_at) == ([drafted], [accepted]), drafts
        seen.add(float(hits.float().mean()))
    assert len(seen) > 3, "schedules differ"
    assert min(seen) < 0.9


@pytest.mark.parametrize("num_new", [2, 3])
def test_short_texts(num_new: int) -> None:
    _, text = texts(random_model("llama", layers=L), num_new)
    hits = text.hits(Unified(L, 3))
    assert hits.shape[1] == num_new - 1
    assert text.num_tokens == hits.numel() >= hits.sum()


def test_full_depth_drafts_what_it_makes() -> None:
    """Every draft is accepted, whatever length the texts of a batch have."""
    model = random_model("llama", layers=L)
    requests = some_requests(9)
    made = generate(model, requests, FULL).completions
    pairs = [(r.prompt_tokens, c.tokens[: 9 - i]) for i, (r, c) in enumerate(zip(requests, made, strict=True))]
    text = DraftedText(model, teacher_batch(pairs, model.config.filler_token_id))
    assert text.num_tokens == sum(len(tokens) - 1 for _, tokens in pairs) == int(text.hits(FULL).sum())
