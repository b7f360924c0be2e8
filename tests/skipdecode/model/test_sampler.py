"""Filters against Hugging Face's logits warpers, draws against the distribution, and the counter-based stream."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skipdecode.backends.torch_sampling import NO_TOKEN, draw, likeliest, pick_by_sort
from skipdecode.config.sampling import Sampling
from skipdecode.model.random_numbers import row_uniforms
from skipdecode.model.sampler import Sampler, argmax, pick
from tests.support.examples import examples

LARGEST = 1.0 - 2.0**-24  # the largest float32 that `row_uniforms` can give
CPU = torch.device("cpu")


def sweep(logits: Tensor, top_k: int, top_p: float, num_uniforms: int) -> Tensor:
    """Tokens [N] drawn from logits [V] by N evenly spaced uniforms, both ends included."""
    u = torch.linspace(0, LARGEST, num_uniforms, dtype=torch.float64).float()[:, None]
    rows = logits.expand(num_uniforms, -1)
    k = torch.full((num_uniforms, 1), top_k or 2**62)
    return draw(rows, k, torch.full((num_uniforms, 1), top_p), u)


def hf_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What transformers samples from: temperature, then top-k, then top-p. [V] float64."""
    scores = TemperatureLogitsWarper(temperature)(None, logits[None]) if temperature != 1.0 else logits[None]
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0].double().softmax(-1)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_kept_set_is_that_of_the_warpers(seed: int, vocab: int, top_k: int, top_p: float, spread: float) -> None:
    """Every kept token that is likely enough to be hit by 4,000 uniforms is drawn; nothing else ever is."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    wanted = hf_probabilities(logits, 1.0, top_k, top_p)
    drawn = sweep(logits, top_k, top_p, 4000)
    assert set(drawn.tolist()) <= set(wanted.nonzero()[:, 0].tolist())
    assert set(drawn.tolist()) >= set((wanted > 3 / 4000).nonzero()[:, 0].tolist())
    # an even sweep of the CDF hits each token as often as it is likely, within one step at either end
    counts = drawn.bincount(minlength=vocab).double()
    torch.testing.assert_close(counts / 4000, wanted, atol=3 / 4000, rtol=0)


def chi_square_is_plausible(counts: Tensor, p: Tensor) -> bool:
    """One-sided test at 1e-4 (Wilson-Hilferty), tokens with fewer than five expected draws put together."""
    n, expected = counts.sum(), p * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts, expected = counts[expected > 0], expected[expected > 0]
    assert int(counts.sum()) == int(n)
    freedom = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    limit = freedom * (1 - 2 / (9 * freedom) + NormalDist().inv_cdf(1 - 1e-4) * (2 / (9 * freedom)) ** 0.5) ** 3
    return value < limit


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.8, 12, 1.0), (1.3, 25, 0.8)]
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Through `Sampler` with the real stream: 40 rows of 1,000 numbers."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2
    row = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=9)
    sampler = Sampler([f"row-{i}" for i in range(40)], [row] * 40, 1000, CPU)
    rows = logits.expand(40, -1)
    drawn = torch.stack([sampler(rows, k) for k in range(1000)])
    counts = drawn.flatten().bincount(minlength=50).double()
    p = hf_probabilities(logits, temperature, top_k, top_p)
    assert counts[p == 0].sum() == 0
    assert chi_square_is_plausible(counts[p > 0], p[p > 0])
    wrong = hf_probabilities(logits, temperature * 1.1, top_k, top_p)
    assert not chi_square_is_plausible(counts[p > 0], wrong[p > 0]), "the test has no power"


def test_uniforms_are_uniform_and_independent() -> None:
    u = np.stack([row_uniforms(3, str(i), 500) for i in range(200)])
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    for values in (u.ravel(), u[:, 0], u[:, 499]):  # over all, and across rows at one step
        counts = torch.from_numpy(np.bincount((values * 20).astype(int), minlength=20)).double()
        assert chi_square_is_plausible(counts, torch.full((20,), 1 / 20, dtype=torch.float64))
    pairs = (u[:, :-1] * 8).astype(int) * 8 + (u[:, 1:] * 8).astype(int)  # neighbours in one stream
    counts = torch.from_numpy(np.bincount(pairs.ravel(), minlength=64)).double()
    assert chi_square_is_plausible(counts, torch.full((64,), 1 / 64, dtype=torch.float64))


def test_uniforms_depend_on_seed_id_and_step_alone() -> None:
    whole = row_uniforms(7, "row", 100)
    assert np.array_equal(row_uniforms(7, "row", 30), whole[:30])  # not on how many are asked for
    assert np.array_equal(row_uniforms(7, "row", 100), whole)
    others = [row_uniforms(8, "row", 100), row_uniforms(7, "row ", 100), row_uniforms(-7, "row", 100)]
    others += [row_uniforms(1, "2", 100), row_uniforms(12, "", 100), row_uniforms(7, "\udcff", 100)]
    assert len({x.tobytes() for x in [whole, *others]}) == 7
    assert all((x != whole).mean() > 0.99 for x in others)


def test_uniforms_are_pinned() -> None:
    """A changed stream changes the output of every sampled run ever made: that must not happen by accident."""
    pinned = [0.9873983263969421, 0.17929953336715698, 0.23939019441604614, 0.6804603338241577]
    assert row_uniforms(0, "row-0", 4).tolist() == pinned


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, LARGEST])
@pytest.mark.parametrize("vocab", [2, 7, 320, 50272])
def test_extreme_uniforms_stay_inside_the_kept_set(uniform: float, vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    u = torch.full((4, 1), uniform)
    for top_k in (1, 2, 5, 2**62):
        for top_p in (0.0, 1e-9, 0.3, 0.999999, 1.0):
            tokens = draw(logits, torch.full((4, 1), top_k), torch.full((4, 1), top_p), u)
            rank = (logits > logits.gather(1, tokens[:, None])).sum(-1)
            assert (rank < top_k).all()
            p = hf_probabilities(logits[0], 1.0, min(top_k, vocab), 1.0)
            likelier = p[p > p[tokens[0]]].sum()
            # float32 sums of 50,272 terms are good to about 1e-6, here as in Hugging Face
            assert likelier < top_p + 1e-5
            assert p[tokens[0]] > 0
            if top_k == 1 or top_p <= 1e-9:
                assert torch.equal(tokens, logits.argmax(-1))


def test_a_token_owns_a_half_open_interval() -> None:
    """[cdf before, cdf behind): two equal tokens share [0, 1) at 0.5 exactly."""
    uniforms = torch.tensor([[0.0], [0.5 - 2.0**-24], [0.5], [LARGEST]])
    ones = torch.ones(4, 1)
    assert draw(torch.zeros(4, 2), 2 * ones, ones, uniforms).tolist() == [0, 0, 1, 1]


def test_rounding_of_logits_rarely_changes_a_draw() -> None:
    """320 nearly equal logits in another order of rank each time: the numbers stand for the same tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 320, generator=generator) * 1e-6
    drawn = [sweep(logits[0] + torch.randn(320, generator=generator) * 1e-6, 0, 1.0, 2000) for _ in range(4)]
    assert all((other == drawn[0]).float().mean() > 0.99 for other in drawn[1:])


def test_top_p_one_cuts_nothing() -> None:
    """A float32 sum over a real vocabulary reaches 1 before its end; the tail must stay all the same."""
    logits = torch.zeros(1, 50272)
    tokens = draw(logits, torch.tensor([[2**62]]), torch.tensor([[1.0]]), torch.tensor([[LARGEST]]))
    assert tokens.item() >= 50272 * (1 - 1e-3)
    last = sweep(torch.tensor([0.0, -9.0, -9.5]), 0, 1.0, 100_000)
    assert set(last.tolist()) == {0, 1, 2}


def sample(logits: Tensor, rows: Sequence[Sampling], k: int = 0) -> list[int]:
    return Sampler([f"row-{i}" for i in range(len(rows))], rows, k + 1, CPU)(logits, k).tolist()


def test_greedy_rows_among_sampled_ones() -> None:
    logits = torch.randn(200, 60, generator=torch.Generator().manual_seed(1))
    hot, cold = Sampling(temperature=1.0), Sampling()
    mixed = sample(logits, [hot, cold] * 100)
    assert mixed[1::2] == logits.argmax(-1).tolist()[1::2]
    assert mixed[0::2] == sample(logits, [hot] * 200)[0::2]
    assert mixed[0::2] != logits.argmax(-1).tolist()[0::2]
    assert sample(logits, [cold] * 200) == logits.argmax(-1).tolist()


def test_parameters_stay_with_their_rows_when_rows_are_dropped() -> None:
    logits = torch.randn(6, 60, generator=torch.Generator().manual_seed(1))
    rows = [
        Sampling(temperature=3.0),
        Sampling(),
        Sampling(temperature=3.0, top_k=2),
        Sampling(temperature=3.0, top_p=0.2),
        Sampling(temperature=0.4, seed=4),
        Sampling(temperature=3.0, seed=5),
    ]
    ids = list("abcdef")
    sampler = Sampler(ids, rows, 50, CPU)
    whole = [sampler(logits, k).tolist() for k in range(50)]
    kept = [5, 1, 3, 2]
    sampler.keep(torch.tensor(kept))
    assert [sampler(logits[kept], k).tolist() for k in range(50)] == [[line[i] for i in kept] for line in whole]


def test_ties_go_to_the_lower_id() -> None:
    """Ties are common in bfloat16; greedy and top_k = 1 must break them alike, and as Hugging Face's argmax does."""
    logits = torch.zeros(3, 50272)
    logits[0, [40000, 7, 123]] = 1.0
    logits[1, [50271, 50000]] = 1.0
    hot = Sampling(temperature=1.0, top_k=1)
    assert sample(logits, [Sampling()] * 3) == [7, 50000, 0]
    assert sample(logits, [hot] * 3) == [7, 50000, 0]
    assert sample(logits, [hot, Sampling(), hot]) == [7, 50000, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-10, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """No overflow to inf - inf: on CUDA an index of -1 would take the whole worker down."""
    logits = torch.randn(8, 60, generator=torch.Generator().manual_seed(1)) * 30
    assert sample(logits, [Sampling(temperature=temperature)] * 8) == logits.argmax(-1).tolist()


def test_huge_temperature_is_uniform() -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(1))
    sampler = Sampler([str(i) for i in range(3000)], [Sampling(temperature=1e6)] * 3000, 1, CPU)
    counts = sampler(logits.expand(3000, -1), 0).bincount(minlength=60).double()
    assert chi_square_is_plausible(counts, torch.full((60,), 1 / 60, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [1e-6, 0.7, 2.0])
def test_a_row_without_cuts_draws_the_same_in_any_company(temperature: float) -> None:
    """Nothing is sorted where no row cuts; one that does changes no bit of the others."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(3))
    plain, cut = Sampling(temperature=temperature, seed=4), Sampling(temperature=temperature, top_k=7, top_p=0.8)
    ids = [f"row-{i}" for i in range(6)]
    alone, beside = Sampler(ids[:5], [plain] * 5, 200, CPU), Sampler(ids, [plain] * 5 + [cut], 200, CPU)
    for k in range(200):
        assert torch.equal(alone(logits[:5], k), beside(logits, k)[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [320, 5003])
def test_cpus_draw_what_sorting_draws(vocab: int, dtype: torch.dtype) -> None:
    rows = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.7, 0, 0.9),
        (1.5, 40, 1.0),
        (0.9, 12, 0.5),
        (1.0, 1, 0.99),
        (1.3, 600, 0.8),
    ]
    temperature, top_k, top_p = (torch.tensor([[row[at]] for row in rows]) for at in range(3))
    top_k = top_k.masked_fill(top_k == 0, 2**62)
    generator, others = torch.Generator().manual_seed(vocab), 0
    for _ in range(40):
        logits = (torch.randn(len(rows), vocab, generator=generator) * 3).to(dtype)
        uniform = torch.rand(len(rows), 1, generator=generator)
        wanted = pick_by_sort(logits.float(), temperature, top_k, top_p, uniform)
        others += int((pick(logits, temperature, top_k, top_p, uniform) != wanted).sum())
    assert others <= 1, "of 280: sums in another order may round to the other side of a top-p edge"


@pytest.mark.parametrize("row", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)])
def test_logits_that_are_no_numbers_give_no_token(row: Sampling) -> None:
    """A row beside them is not touched."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    beside = sample(logits, [row, row])[1]
    for wrong, at in ((torch.nan, slice(None)), (torch.nan, 30), (torch.inf, 7)):
        own = logits.clone()
        own[0, at] = wrong
        assert sample(own, [row, row]) == [NO_TOKEN, beside]
        assert argmax(own).tolist() == likeliest(own).tolist() == [NO_TOKEN, int(logits[1].argmax())]
        limits = [torch.tensor([[value]] * 2) for value in (row.temperature, 2**62, row.top_p, 0.5)]
        assert pick_by_sort(own, *limits)[0] == NO_TOKEN
    logits[0] = -torch.inf
    assert 0 <= sample(logits, [row, row])[0] < 50
