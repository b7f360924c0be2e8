"""Which prompts share, against the plain definition of it; batches in which they meet; a window decoded both ways."""

import itertools
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actors.generator
from actors.batching.shared_prefixes import (
    MIN_PREFIX_TOKENS,
    NOMINAL_CEILINGS,
    PrefillCosts,
    Prefixes,
    cut_by_prefix,
    cut_with_shared_prefixes,
    find_prefixes,
)
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.serving.engine import Engine
from actors.serving.scheduler import EngineConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.prefix_sharing import PrefixSharing, share_prefixes
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import FullDepth, Schedule
from tests.support.shared_prompts import grouped_prompts, llama, opt
from tests.support.tiny_models import save_model, save_tokenizer

COSTS = PrefillCosts(token_s=1e-3, pass_s=2e-3, column_s=1e-6)


def common(a: list[int], b: list[int]) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    most = min(sum(1 for _ in same), len(a) - 1, len(b) - 1)
    return most - most % 2


WINDOWS = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=5)), min_size=1, max_size=6
)


@given(groups=WINDOWS, seed=st.integers(0, 2**31), copies=st.integers(1, 3))
def test_a_row_shares_with_whom_it_agrees_longest(groups: list[tuple[int, list[int]]], seed: int, copies: int) -> None:
    """Groups of random tokens: where answers are short, whoever agrees with any other row on enough tokens shares."""
    prompts = grouped_prompts(groups, seed) * copies
    prefixes = find_prefixes(prompts, COSTS, 0)
    for row, own in enumerate(prefixes):
        best = max((common(prompts[row], other) for at, other in enumerate(prompts) if at != row), default=0)
        assert own.length <= best
        if best >= MIN_PREFIX_TOKENS:
            assert own.length > best - MIN_PREFIX_TOKENS
        for other, theirs in zip(prompts, prefixes, strict=True):
            if theirs.ids[-1:] == own.ids[-1:]:
                assert other[: own.length] == prompts[row][: own.length]
    assert share_prefixes(prompts, [own.ends for own in prefixes]) is not None or not any(own.ends for own in prefixes)


def test_samples_share_the_whole_prompt_and_templates_their_prefix() -> None:
    template = grouped_prompts([(0, [400])], 1)[0]
    documents = [template + end for end in grouped_prompts([(0, [60] * 16)], 2)]
    prompts = [document for document in documents for _ in range(8)]
    prefixes = find_prefixes(prompts, COSTS, 63)
    assert {own.ends for own in prefixes} == {(400, 458)}
    assert len({own.ids[-1] for own in prefixes}) == 16
    sharing = share_prefixes(prompts, [own.ends for own in prefixes])
    assert sharing is not None
    assert len(prompts) * 460 - sharing.tokens_saved == 400 + 16 * 58 + 128 * 2


def test_a_few_tokens_more_are_not_worth_a_copy_of_the_rest() -> None:
    """Two documents of one template that begin with the same words read the template with all others."""
    template = grouped_prompts([(0, [400])], 1)[0]
    prompts = [template + end for end in [*grouped_prompts([(18, [9, 9])], 3), *grouped_prompts([(0, [27] * 9)], 4)]]
    expensive = PrefillCosts(token_s=1e-4, pass_s=1e-3, column_s=1e-6)
    assert {own.ends for own in find_prefixes(prompts, expensive, 64)} == {(400,)}
    assert sorted({own.ends for own in find_prefixes(prompts, expensive, 0)}) == [(400,), (400, 418)]


@given(groups=WINDOWS, seed=st.integers(0, 2**31), size=st.integers(1, 9))
def test_batches_are_a_partition(groups: list[tuple[int, list[int]]], seed: int, size: int) -> None:
    prompts = grouped_prompts(groups, seed)
    prefixes = find_prefixes(prompts, COSTS, 0)
    batches = cut_by_prefix([len(p) for p in prompts], prefixes, (8, 16, 32, 64), lambda bucket, rows: size)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(prompts)))
    for batch in batches:
        assert len(batch.rows) <= size
        assert len(batch.prefix_lengths) in (0, len(batch.rows))
        for row, ends in zip(batch.rows, batch.prefix_lengths or [()] * size, strict=False):
            assert ends == prefixes[row].ends
            assert len(prompts[row]) - prefixes[row].length <= batch.bucket
    buckets = {batch.bucket for batch in batches}
    for bucket in buckets:
        rows = sum(len(batch.rows) for batch in batches if batch.bucket == bucket)
        assert sum(batch.bucket == bucket for batch in batches) == -(-rows // size)  # no more than there must be


def test_batches_are_cut_between_prefixes_where_that_is_near() -> None:
    prefixes = [Prefixes((32,), (row // 5,)) for row in range(20)]
    batches = cut_by_prefix([40] * 20, prefixes, (16, 64), lambda bucket, rows: 12)
    assert [len(batch.rows) for batch in batches] == [10, 10]
    batches = cut_by_prefix([40] * 15, prefixes[:15], (16, 64), lambda bucket, rows: 10)
    assert [len(batch.rows) for batch in batches] == [10, 5]


def test_where_nothing_is_shared_nothing_changes() -> None:
    prompts = grouped_prompts([(0, [30] * 9)], 1)
    assert (
        cut_with_shared_prefixes(prompts, COSTS, 63, (32, 64), lambda bucket, prefix_columns=0: 4, copies=False) is None
    )


def test_what_does_not_pay_is_not_shared() -> None:
    """One pair of many rows, and batches that would be more."""
    prompts = [*grouped_prompts([(20, [9, 9])], 1), *grouped_prompts([(0, [30] * 30)], 2)]
    assert (
        cut_with_shared_prefixes(prompts, COSTS, 63, (16, 64), lambda bucket, prefix_columns=0: 32, copies=False)
        is None
    )


@pytest.mark.parametrize("config", [opt(), llama()], ids=["opt", "llama"])
def test_prices_are_of_the_model(config: object) -> None:
    full = FullDepth(config.num_hidden_layers)  # type: ignore[attr-defined]
    costs = PrefillCosts.of(config, full, NOMINAL_CEILINGS["cpu"], itemsize=2, weight_itemsize=2)  # type: ignore[arg-type]
    assert 0 < costs.token_s < costs.pass_s
    assert costs.column_s == 2 * 6 * config.kv_dim * 2 / NOMINAL_CEILINGS["cpu"].bytes_per_s  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    return save_model(root / "model", save_tokenizer(root / "tokenizer"), "1.3b")


def window(num_new: int = 8) -> list[Request]:
    """Three templates over some documents, and two that stand alone."""
    prompts = [*grouped_prompts([(60, [9, 12, 7, 3, 9, 9]), (44, [5] * 5), (30, [20, 2, 2])], 1), [5], [8, 9, 7]]
    order = sorted(range(len(prompts)), key=lambda row: (row * 7) % len(prompts))
    return [Request(str(at), prompts[row], Sampling(max_new_tokens=num_new)) for at, row in enumerate(order)]


def config(source: Path, **keys: object) -> GeneratorConfig:
    decode = {"method": "skipdecode", "max_layers": 4, "min_layers": 2}
    return GeneratorConfig(str(source), decode, dtype="float32", **keys)  # type: ignore[arg-type]


def test_a_window_says_the_same_with_fewer_tokens_run(source: Path) -> None:
    alone, shared = (Generator(config(source, shares_prefixes=share)) for share in (False, True))
    wanted, made = alone(window()), shared(window())
    assert made.answers == wanted.answers
    assert sum(record["prefix_tokens_saved"] for record in wanted.batches) == 0
    assert sum(record["prefix_tokens_saved"] for record in made.batches) == 60 * 5 + 44 * 4 + 30 * 2
    assert sum(record["input_tokens"] for record in made.batches) == sum(len(r.prompt_tokens) for r in window())


def test_a_batch_of_a_window_shares_by_itself_too(source: Path) -> None:
    """Workers decode a window's batches one by one."""
    generator = Generator(config(source, shares_prefixes=True))
    requests = window()
    for batch in generator.cut(requests):
        own = [requests[row] for row in batch.rows]
        (again,) = generator.cut(own)
        assert sorted(again.rows) == list(range(len(own)))
        assert sorted(again.prefix_lengths) == sorted(batch.prefix_lengths)


def test_deterministic_windows_do_not_share_prefixes(source: Path) -> None:
    generator = Generator(config(source, shares_prefixes=True, deterministic=True))
    made = generator(window())
    assert all(record["prefix_tokens_saved"] == 0 for record in made.batches)


def test_both_depths_share_and_are_predicted(source: Path) -> None:
    generator = Generator(config(source, shares_prefixes=True, baseline_fraction=1.0))
    records = generator(window()).batches
    shared = [record for record in records if record["prefix_tokens_saved"]]
    assert shared
    for record in shared:
        assert record["full_prefix_tokens_saved"] == record["prefix_tokens_saved"]
        assert record["predicted_prefill_s"] == record["full_predicted_prefill_s"]


def test_a_failing_batch_is_halved_with_what_it_shares(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(config(source, shares_prefixes=True))
    wanted, run = generator(window()).answers, Generator._run

    def fails_when_large(self: Generator, batch: object, requests: list[Request], *others: object) -> object:
        if len(requests) > 3:
            raise RuntimeError("no memory")
        return run(self, batch, requests, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "_run", fails_when_large)
    made = generator(window())
    assert made.answers == wanted
    assert any(record["prefix_tokens_saved"] for record in made.batches)


def test_more_rows_fit_where_heads_lie_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(config(source, shares_prefixes=True, length_buckets=(16, 64, 128)))
    if not generator.model.supports_shared_prefix:
        pytest.skip("no kernels that read a shared copy")
    prompts = grouped_prompts([(90, [9] * 64)], 1)
    requests = [Request(str(at), prompt, Sampling(max_new_tokens=8)) for at, prompt in enumerate(prompts)]
    monkeypatch.setattr(actors.memory, "free_bytes", lambda device: 4 << 20)
    alone = Generator(config(source, length_buckets=(16, 64, 128)))
    sizes = [max(len(batch.rows) for batch in one.cut(requests)) for one in (alone, generator)]
    assert sizes[1] > 3 * sizes[0]
    assert torch.get_num_threads() > 0


@pytest.mark.parametrize("scheduler", ["cohort", "continuous"])
def test_requests_that_wait_together_share_prefixes(
    source: Path, scheduler: Literal["cohort", "continuous"], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[PrefixSharing | None] = []
    inner = Generator.shared_prefixes

    def noted(generator: Generator, requests: list[Request], schedule: Schedule) -> PrefixSharing | None:
        shared.append(inner(generator, requests, schedule))
        return shared[-1]

    monkeypatch.setattr(Generator, "shared_prefixes", noted)
    made: list[dict[str, list[int]]] = []
    for shares in (False, True):
        shared.clear()
        generator = Generator(config(source, shares_prefixes=shares))
        engine = Engine(generator, EngineConfig(scheduler=scheduler, batch_size=8))
        for request in window():
            engine.add(request)
        tokens: dict[str, list[int]] = {}
        while not engine.is_idle:
            for progress in engine.step():
                assert progress.error is None
                tokens.setdefault(progress.ticket.request.id, []).extend(progress.tokens)
        made.append(tokens)
        assert any(sharing is not None for sharing in shared) == shares
    assert made[0] == made[1]
    assert len(made[0]) == len(window())
