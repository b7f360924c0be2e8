"""Drafts that choose among few tokens: the list, the head for it, and rows that stay those of full depth."""

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest
import torch

from skipdecode.backends import choice
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request, Row
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, SkipDecode
from skipdecode.speculative.controller import Decision, SpeculationController
from skipdecode.speculative.draft_vocab import HALVED_EVERY, SEEN, SHARE, TOO_FEW, DraftHead, DraftVocabulary
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.cpu_backends import forced
from tests.support.cuda_models import random_model, some_requests

LAYERS, VOCAB = 4, 200
BACKENDS = ["torch", *(["kernels"] if choice.choose().name != "torch" else [])]


def wrote(vocabulary: DraftVocabulary, tokens: Iterable[int]) -> None:
    """As rounds tell it: a few tokens at a time, asked for the list before each."""
    for token in tokens:
        vocabulary.tokens()
        vocabulary.wrote([token])


def test_a_list_needs_texts_first_and_covers_them() -> None:
    vocabulary = DraftVocabulary(1000)
    vocabulary.read([500, 501])
    assert vocabulary.tokens() is None, "nothing was made yet"
    wrote(vocabulary, [1, 2, 3, 4] * (SEEN // 4))
    assert vocabulary.tokens() is None, "nothing that a list was held against"
    wrote(vocabulary, [1, 2, 3, 4] * SEEN)
    listed = vocabulary.tokens()
    assert listed == {1, 2, 3, 4, 500, 501}
    assert vocabulary.tokens() is listed, "the same object"
    vocabulary.read([7])
    assert vocabulary.tokens() == {1, 2, 3, 4, 7, 500, 501}, "words of a new prompt are listed, rare as they are"


def test_texts_of_other_words_give_it_up_and_get_another() -> None:
    vocabulary, others = DraftVocabulary(4000), list(range(100, 700))
    wrote(vocabulary, [1, 2, 3] * SEEN)
    assert vocabulary.tokens() == {1, 2, 3}
    wrote(vocabulary, others)
    assert vocabulary.coverage < TOO_FEW
    assert vocabulary.tokens() is None
    wrote(vocabulary, others * 3)
    listed = vocabulary.tokens()
    assert listed is not None
    assert listed.issuperset(others)


def test_it_is_given_up_later_than_it_begins() -> None:
    """Else it would come and go with every other word."""
    vocabulary, rng = DraftVocabulary(100_000), random.Random(0)
    wrote(vocabulary, [1, 2, 3] * SEEN)
    new = iter(range(10, 100_000))
    used = []
    for _ in range(3000):
        wrote(vocabulary, [next(new) if rng.random() < 0.04 else 1])
        used.append(vocabulary.tokens() is not None)
    assert sum(used) > 0.7 * len(used)
    assert sum(a != b for a, b in itertools.pairwise(used)) < 20


def test_it_stays_small_and_keeps_what_comes_often() -> None:
    vocabulary, often = DraftVocabulary(400), [1, 2, 3]
    for token in range(10, 400):
        vocabulary.read(range(token, min(token + 60, 400)))
        wrote(vocabulary, [*often * 12, token])
        listed = vocabulary.tokens()
        assert listed is None or (len(listed) <= SHARE * 400 and listed.issuperset(often))
    assert listed is not None


def test_it_forgets() -> None:
    vocabulary = DraftVocabulary(8000)
    vocabulary.wrote(list(range(1000, 3000)) * 2)
    for _ in range(6):
        vocabulary.wrote([1, 2, 3] * (HALVED_EVERY // 3 + 1))
    assert len(vocabulary._counts) == 3


def test_a_fixed_list_stays() -> None:
    for tokens in ([5, 6], []):
        vocabulary = DraftVocabulary(100, tokens, learns=False)
        wrote(vocabulary, [1, 2, 3] * SEEN)
        assert vocabulary.tokens() == (set(tokens) or None)


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    """OPT's shape, whose head is the embedding."""
    with forced("torch" if request.param == "torch" else choice.choose().name):
        yield random_model("opt", layers=LAYERS).pack()


@pytest.mark.parametrize("count", [1, 7, 40, 129])
def test_the_head_for_some_tokens(model: Decoder, count: int) -> None:
    """Against the logits of all, cut to these: the same choices, the lower one of equals."""
    rng = torch.Generator().manual_seed(count)
    listed = frozenset(torch.randperm(VOCAB, generator=rng)[:count].tolist())
    vocabulary = DraftVocabulary(VOCAB, listed, learns=False)
    head, ids = vocabulary.head(model), torch.tensor(sorted(listed))
    assert head is not None
    assert head is vocabulary.head(model), "kept"
    h = torch.randn(9, 128, generator=rng)
    weight = model.embed_tokens.weight.data
    logits = model.head_states(h) @ weight.T
    assert head.argmax(model.head_states(h)).tolist() == ids[logits[:, ids].argmax(dim=-1)].tolist()
    model.embed_tokens.weight.data[ids] = model.embed_tokens.weight.data[ids[0]].clone()
    again = DraftHead.of(listed, model)
    assert again.argmax(model.head_states(h)).tolist() == [min(listed)] * 9, "all are equal"


def test_no_head_where_its_weights_are_gone() -> None:
    llama = random_model("llama", layers=LAYERS)
    assert llama.lm_head is not None
    assert llama.has_unpacked_head
    if choice.choose().name != "torch":
        assert not random_model("llama", layers=LAYERS).pack().has_unpacked_head


class LayersAlone(SpeculationController):
    """Drafts three tokens by skipped layers, and none by n-grams."""

    def decide(self, rows: int, k: int, context: int) -> Decision:
        return Decision("drafted", 3)


def lossless(
    model: Decoder, requests: list[Request], drafts: SkipDecode, listed: frozenset[int] | None
) -> tuple[list[Row], float]:
    """Rows whose drafts choose among those tokens (None: among all), and the share accepted."""
    schedule = Lossless(LAYERS, drafts, 3)
    vocabulary = None if listed is None else DraftVocabulary(VOCAB, listed, learns=False)
    controller = LayersAlone(schedule, LatencyModel(model.config, 4), vocabulary=vocabulary)
    batch = SpeculativeBatch(model, schedule, controller=controller)
    rows = batch.join(requests)
    while not batch.is_done:
        batch.step()
    return rows, batch.stats.accepted_at[0] / batch.stats.drafted_at[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_are_those_of_full_depth_whatever_is_listed(model: Decoder, temperature: float) -> None:
    """Drafts of all layers are right wherever the next token is listed, and never elsewhere. Rows that draw: where what
    is left out weighs little."""
    requests = some_requests(20, temperature=temperature)
    wanted = [one.tokens for one in generate(model, requests, FullDepth(LAYERS)).completions]
    made = frozenset(token for tokens in wanted for token in tokens)
    drafts = SkipDecode(LAYERS, LAYERS, LAYERS, 1, 1)
    rates = []
    for listed in (None, made, frozenset(list(made)[::2]), frozenset(range(VOCAB)) - made):
        rows, rate = lossless(model, requests, drafts, listed)
        assert [row.tokens for row in rows] == wanted
        rates.append(rate)
    assert rates[0] == 1.0
    assert rates[1] == 1.0 if temperature == 0 else rates[1] > 0.9
    assert 0 < rates[2] < 0.9
    assert rates[3] == 0


def test_a_run_learns_its_list_and_prices_know_it(model: Decoder) -> None:
    """Texts of few words: from then on drafts choose among these, and are as good."""
    schedule = Lossless(LAYERS, SkipDecode(LAYERS, 3, 3, 1, 1), 3)
    controller = LayersAlone(schedule, LatencyModel(model.config, 4))
    plan, latency = schedule.drafts.step(0), controller.latency
    whole_s = latency.seconds("draft", plan, 4, 4, 10, controller.num_draft_outputs)
    requests = [Request(str(i), [2, 5 + i % 3, 9], r.sampling) for i, r in enumerate(some_requests(80) * 3)]
    wanted = [one.tokens for one in generate(model, requests, FullDepth(LAYERS)).completions]
    rates, listed = [], []
    for _ in range(2):
        batch = SpeculativeBatch(model, schedule, controller=controller)
        rows = batch.join(requests)
        while not batch.is_done:
            batch.step()
        assert [row.tokens for row in rows] == wanted
        rates.append(sum(batch.stats.accepted_at) / sum(batch.stats.drafted_at))
        listed.append(controller.num_draft_outputs)
    assert listed[-1] is not None
    assert listed[-1] <= SHARE * VOCAB
    assert rates[1] == pytest.approx(rates[0], abs=0.05)
    assert latency.seconds("draft", plan, 4, 4, 10, controller.num_draft_outputs) < whole_s
