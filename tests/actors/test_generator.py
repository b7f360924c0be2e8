"""`Generator`: as many answers as rows and in their order, whatever the batches; fixed shapes, and settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import memory
from actors.batching import full_depth_sample as baseline
from actors.generator import Generator, WindowResult
from actors.generator_config import GeneratorConfig
from actors.memory import DETERMINISTIC_ROWS
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends import choice
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.schedule import EarlyExit, SkipDecode
from tests.support.examples import examples
from tests.support.random_requests import BUCKETS, SKIP, one_by_one, random_requests
from tests.support.schedules import decodes

# Same rows, same order, same tokens


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.lists(st.integers(0, 29), max_size=30, unique=True),
    batch_size=st.integers(1, 9),
    buckets=st.sampled_from([(4, 8, 16, 32), (32,), (1, 2, 3, 5), (20,)]),
    deterministic=st.booleans(),
)
def test_answers_are_those_of_the_rows_alone(
    shared: Generator, order: list[int], batch_size: int, buckets: tuple[int, ...], deterministic: bool
) -> None:
    pool = random_requests(30, limits=(12, 3, 1, 20))
    generator = Generator.__new__(Generator)  # the same loaded model under another configuration
    vars(generator).update(vars(shared))
    keys = {"batch_size": batch_size, "length_buckets": buckets, "deterministic": deterministic}
    generator.config = GeneratorConfig(**(vars(shared.config) | keys))
    requests = [pool[i] for i in order]
    assert generator(requests).answers == one_by_one(shared, requests)


@pytest.mark.slow  # short lane: that `generate` is exact under every method, and batches under one
@pytest.mark.parametrize("decode", decodes().values(), ids=decodes())
def test_every_method(build: Callable[..., Generator], decode: dict[str, Any]) -> None:
    generator, requests = build(decode=decode), random_requests(14, limits=(12, 5))
    assert generator(requests).answers == one_by_one(generator, requests)


@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_on_several_devices(
    build: Callable[..., Generator], shared: Generator, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, scores and the full-depth pass beside; parts of a batch are what the prediction is for."""
    requests = [replace(request, score_prompt=i % 3 == 0) for i, request in enumerate(random_requests(14))]
    generator = build(num_devices=2, deterministic=deterministic, baseline_fraction=1.0, shares_prefixes=True)
    assert generator.model.placement is not None
    assert not generator.cutter.shares_prefixes
    seen: list[int] = []
    monkeypatch.setattr(baseline, "predict_s", lambda _c, _s, _o, batch, **_: seen.append(batch.rows) or (1.0, 1.0))
    result = generator(requests)
    assert [a.tokens for a in result.answers] == [a.tokens for a in one_by_one(shared, requests)]  # type: ignore[union-attr]
    wanted = [a.prompt_logprobs for a in shared(requests).answers]  # type: ignore[union-attr]
    for scores, expected in zip([a.prompt_logprobs for a in result.answers], wanted, strict=True):  # type: ignore[union-attr]
        assert (scores is None) == (expected is None)
        for own, other in zip(scores or [], expected or [], strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    paired = [batch for batch in result.batches if "full_decode_s" in batch]
    assert len(paired) == len(result.batches)
    assert seen == [-(-batch["rows"] // 2) for batch in paired for _ in range(2)]


def test_empty_window(shared: Generator) -> None:
    assert shared([]) == WindowResult([], [])


def test_equal_ids_are_still_two_rows(shared: Generator) -> None:
    a, b = random_requests(2, seed=3)
    twins = [a, Request(a.id, b.prompt_tokens, b.sampling), a]
    assert shared(twins).answers == one_by_one(shared, twins)


def test_rows_of_one_batch_share_a_schedule(shared: Generator, calls: list[tuple[list[str], dict[str, Any]]]) -> None:
    """The horizon follows max_new_tokens, so rows with other limits decode under other schedules, in other batches."""
    requests = random_requests(20, limits=(12, 5, 9))
    answers = shared(requests).answers
    limits = {r.id: r.sampling.max_new_tokens for r in requests}
    for ids, keys in calls:
        (limit,) = {limits[i] for i in ids}
        assert keys["schedule"] == SkipDecode(6, 5, 2, 1, limit - 1)
        assert keys["max_rows"] <= 4
    assert sorted(i for ids, _ in calls for i in ids) == sorted(limits)
    assert answers == one_by_one(shared, requests)


def test_a_fixed_horizon_lets_rows_with_other_limits_share(
    build: Callable[..., Generator], calls: list[tuple[list[str], dict[str, Any]]]
) -> None:
    generator = build(decode=SKIP | {"horizon": 9}, batch_size=16, length_buckets=(32,))
    calls.clear()
    requests = random_requests(12, limits=(12, 5, 1))
    assert generator(requests).answers == one_by_one(generator, requests)
    assert len(calls) == 1


def test_draws_do_not_depend_on_batches(build: Callable[..., Generator]) -> None:
    requests = random_requests(15, limits=(12, 5), temperature=1.0, top_p=0.95)
    generator = build(batch_size=3)
    wanted = one_by_one(generator, requests)
    assert generator(requests).answers == wanted
    assert generator(requests[::-1]).answers == wanted[::-1]
    assert len({tuple(c.tokens) for c in wanted}) == 15


def test_stop_strings_reach_the_decoder(shared: Generator) -> None:
    (plain,) = random_requests(1, seed=8)
    made = shared([plain]).answers[0]
    assert isinstance(made, Completion)
    text = shared.tokenizer.decode(made.tokens)
    stop = next(c for c in text if c.isascii())
    stopped = Request(plain.id, plain.prompt_tokens, Sampling(max_new_tokens=12, stop=(stop,)))
    answer = shared([stopped]).answers[0]
    assert isinstance(answer, Completion)
    assert answer.finish_reason == "stop"
    assert answer.tokens == made.tokens[: len(answer.tokens)]
    assert stop in shared.tokenizer.decode(answer.tokens)
    assert stop not in shared.tokenizer.decode(answer.tokens[:-1])


# Fixed shapes


def test_deterministic_fixes_every_shape(
    build: Callable[..., Generator], calls: list[tuple[list[str], dict[str, Any]]]
) -> None:
    generator = build(deterministic=True, batch_size=5)
    calls.clear()
    requests = random_requests(17)
    lengths = {r.id: len(r.prompt_tokens) for r in requests}
    assert generator(requests).answers == one_by_one(generator, requests)
    for ids, keys in calls:
        assert keys["batch_rows"] == 5
        assert keys["compact"] is False
        assert keys["prompt_columns"] in BUCKETS
        assert all(lengths[i] <= keys["prompt_columns"] for i in ids)
    loose = build(batch_size=5)
    calls.clear()
    loose(requests)
    assert not any("batch_rows" in keys for _, keys in calls)


def test_deterministic_shapes_do_not_follow_free_memory(
    build: Callable[..., Generator], calls: list[tuple[list[str], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = build(deterministic=True, batch_size=None)
    for free in (1, 1 << 20, 1 << 40):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        calls.clear()
        generator(random_requests(3))
        assert {keys["batch_rows"] for _, keys in calls} == {DETERMINISTIC_ROWS}


def test_deterministic_logits_are_bit_for_bit(build: Callable[..., Generator]) -> None:
    """bfloat16, where one bit would show: alone, in a full batch of full-length rows, at another place."""
    generator = build(deterministic=True, batch_size=4, dtype="bfloat16", length_buckets=(8,))
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    # who asks for log-probabilities has logits made
    requests = [Request(str(i), [2, *range(10 + i, 17 + i)], sampling, top_logprobs=0) for i in range(8)]

    def logits_of_last(window: list[Request]) -> torch.Tensor:
        logs: list[torch.Tensor] = []
        hook = generator.model.register_forward_hook(lambda _m, _a, out: logs.append(out.clone()))
        generator(window)
        hook.remove()
        at = (len(window) - 1) % 4
        return torch.stack([out[at] for out in logs[-8:]])

    alone = logits_of_last([requests[5]])
    for window in ([requests[i] for i in (0, 1, 2, 5)], [requests[i] for i in (7, 5)]):
        assert torch.equal(logits_of_last(window), alone)


def test_automatic_batch_size_fits_the_memory(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = build(batch_size=None)
    per_row = 2 * 48 * 4 * (6 * 32 + generator_steps(12))  # K and V, width, float32, columns of all layers
    for rows in (1, 7, 50):
        monkeypatch.setattr(memory, "free_bytes", lambda device, rows=rows: 4 * per_row * rows + 4)
        assert generator.batch_size(32, 12) == rows
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 50)
    assert generator.batch_size(32, 12) == 128
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert generator.batch_size(32, 12) == 1
    requests = random_requests(5)
    assert generator(requests).answers == one_by_one(generator, requests)


def generator_steps(max_new_tokens: int) -> int:
    """Columns beyond the prompt, over all layers: the sum of the budgets."""
    schedule = SkipDecode(6, 5, 2, 1, max_new_tokens - 1)
    return sum(schedule.step(k).num_layers_run for k in range(max_new_tokens - 1))


# Settings


def test_types_and_devices(build: Callable[..., Generator]) -> None:
    generator = build(dtype="bfloat16", device="auto", num_threads=1)
    assert generator.dtype == torch.bfloat16
    assert {p.dtype for p in generator.model.parameters()} == {torch.bfloat16}
    assert generator.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert generator.load_s > 0


@pytest.mark.slow
@pytest.mark.skipif(choice.choose().no_int8 is not None, reason="needs a back end with int8 weights")
def test_int8_weights_keep_most_tokens_of_the_demo_model() -> None:
    """Another model's tokens, and nearly always the same; its full-depth pairs and predictions are int8's own."""
    requests = [Request(row["id"], [], Sampling(max_new_tokens=40)) for row in make_prompts(96)]
    texts = [row["prompt"] for row in make_prompts(96)]
    made = []
    for quantization in (None, "int8"):
        config = GeneratorConfig("models/opt-e2e", {"method": "full"}, dtype="bfloat16", quantization=quantization)
        generator = Generator(config)
        prompts = generator.tokenizer.encode(texts)
        given = [replace(r, prompt_tokens=ids) for r, ids in zip(requests, prompts, strict=True)]
        made.append([answer.tokens for answer in generator(given).answers if isinstance(answer, Completion)])
    assert generator.model.weight_itemsize == 1
    same = sum(a == b for a, b in zip(*made, strict=True))
    assert 70 <= same < 96
    skipping = Generator(replace(config, decode={"method": "skipdecode", "speedup": 3}, baseline_fraction=1.0))
    for record in skipping(given).batches:
        assert 0 < record["predicted_decode_s"] < record["full_predicted_decode_s"]


def test_bad_schedule_is_found_while_loading(build: Callable[..., Generator]) -> None:
    with pytest.raises(ValueError, match=r"max_layers=7"):
        build(decode={"max_layers": 7, "min_layers": 2})


def test_tokenizer_of_another_folder(build: Callable[..., Generator], folder: Path, tokenizer_folder: Path) -> None:
    assert build(tokenizer=str(tokenizer_folder)).tokenizer.encode(["a pub"]) == build().tokenizer.encode(["a pub"])


def test_schedule_of_a_row(shared: Generator) -> None:
    assert shared.schedule(20) == SkipDecode(6, 5, 2, 1, 19)
    early = Generator.__new__(Generator)
    early.model, early.config = load_model(shared.config.source), GeneratorConfig("", SKIP | {"method": "early_exit"})
    assert early.schedule(1) == EarlyExit(6, 5, 2, 1, 1)


def test_another_schedule_on_the_same_weights(build: Callable[..., Generator]) -> None:
    first, fresh = build(baseline_fraction=1.0), build(decode={"method": "unified", "layers": 2}, baseline_fraction=1.0)
    requests = random_requests(10)
    before = first(requests)
    other = first.with_decode(fresh.config.decode)
    result = other(requests)
    assert other.model is first.model
    assert result.answers == fresh(requests).answers != before.answers
    assert [batch["batch"] for batch in result.batches] == list(range(len(before.batches))), "batches count anew"
    assert first(requests).answers == before.answers


def test_batches_of_one_size_whatever_the_lengths(build: Callable[..., Generator]) -> None:
    requests = random_requests(12, seed=3)
    assert len(build().cut(requests)) > 3, "of several buckets, and so not all of four rows"
    alike = build().with_decode(SKIP, 4, length_buckets=[64]).cut(requests)
    assert [len(batch.rows) for batch in alike] == [4, 4, 4]
