"""The continuous batch against rows decoded alone: same tokens, whoever joins and leaves at whatever step. Float32."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.backends.backend import Backend
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import ContinuousBatch, check_continuous
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.prefill import rounded_columns
from skipdecode.engine.request import Request, Row
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.layer_ranges import layer_ends
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from tests.support.examples import examples
from tests.support.naive import greedy, random_prompts
from tests.support.processed import processing
from tests.support.schedules import SCHEDULES

L = 6
BASES: list[Schedule] = [
    *SCHEDULES.values(),
    SkipDecode(L, 4, 1, 1, 3),
    SkipBand(SkipDecode(L, 6, 3, 2, 9), 4, (1, 4)),
]


def alone(model: Decoder, request: Request, schedule: Schedule) -> tuple[list[int], str]:
    completion = generate(model, [request], schedule).completions[0]
    return completion.tokens, completion.finish_reason


def run(batch: ContinuousBatch, arrivals: dict[int, list[Request]], cancel_at: dict[str, int]) -> dict[str, Row]:
    """Step 0, 1, ...: who arrives joins, who is to go is cancelled, until nobody is left."""
    rows: dict[str, Row] = {}
    step = 0
    while step <= max(arrivals) or not batch.is_done:
        if new := arrivals.get(step):
            rows |= {row.request.id: row for row in batch.join(new)}
        for name, at in cancel_at.items():
            if at == step and name in rows:
                rows[name].cancel()
        batch.step()
        step += 1
    return rows


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    prompt = random_prompts([draw(st.integers(1, 40))], seed=draw(st.integers(0, 99)))[0]
    max_new_tokens = draw(st.integers(1, 30))
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 20])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        **draw(processing(max_new_tokens, vocab=200)),
    )
    return Request(name, prompt, sampling)


@settings(max_examples=examples(12))
@given(data=st.data(), schedule=st.sampled_from(BASES))
def test_random_arrivals_and_cancellations(
    ending_checkpoint: Callable[[str], Path], ours: Callable[[Path], Decoder], data: st.DataObject, schedule: Schedule
) -> None:
    """Each row's tokens are those it makes alone; a cancelled row's are the first of them."""
    model = ours(ending_checkpoint("125m"))
    arrivals: dict[int, list[Request]] = {}
    names = [str(i) for i in range(data.draw(st.integers(1, 12)))]
    for name in names:
        arrivals.setdefault(data.draw(st.integers(0, 25)), []).append(data.draw(requests(name)))
    cancel_at = {name: data.draw(st.integers(0, 40)) for name in names if data.draw(st.integers(0, 3)) == 0}
    rows = run(ContinuousBatch(model, schedule), arrivals, cancel_at)
    assert sorted(rows) == sorted(names)
    for name, row in rows.items():
        tokens, reason = alone(model, row.request, schedule)
        if row.finish_reason == "cancelled":
            assert name in cancel_at
            assert row.tokens == tokens[: len(row.tokens)]
        else:
            assert (row.tokens, row.finish_reason) == (tokens, reason), name


@pytest.mark.parametrize("style", ["125m", "350m", "1.3b"])
def test_styles(checkpoint_factory: Callable[..., Path], ours: Callable[[Path], Decoder], style: str) -> None:
    model = ours(checkpoint_factory(style))
    schedule = SkipDecode(L, 5, 2, 1, 12)
    pool = [Request(str(i), p, greedy(24)) for i, p in enumerate(random_prompts([3, 30, 7, 1, 12, 5, 18, 9], seed=2))]
    rows = run(ContinuousBatch(model, schedule), {i * 3: [request] for i, request in enumerate(pool)}, {})
    made = [rows[str(i)].tokens for i in range(8)]
    assert made == [alone(model, request, schedule)[0] for request in pool]
    assert len({len(set(tokens)) for tokens in made}) > 1


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("base", [*SCHEDULES.values(), SkipDecode(L, 6, 5, 4, 6)], ids=str)
@pytest.mark.grid
def test_swiftkv(loaded: Decoder, base: Schedule, group_size: int) -> None:
    model = loaded.with_swiftkv(2, group_size)
    torch.manual_seed(3)
    assert model.swiftkv is not None
    for parameter in model.swiftkv.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))  # else it would be the teacher
    schedule = SwiftKVPrefill(base, 2)
    pool = [Request(str(i), p, greedy(20)) for i, p in enumerate(random_prompts([3, 30, 7, 1, 12, 5], seed=2))]
    rows = run(ContinuousBatch(model, schedule), {i * 4: [request] for i, request in enumerate(pool)}, {})
    for request in pool:
        assert rows[request.id].tokens == alone(model, request, schedule)[0]


def test_layers_run_on_the_rows_that_are_young_enough(loaded: Decoder) -> None:
    """Not only the tokens: what runs is what the plans say, no row more."""
    schedule = SkipDecode(L, 6, 1, 1, 6)
    pool = [Request(str(i), p, greedy(9, ignore_eos=True)) for i, p in enumerate(random_prompts([4] * 5, seed=1))]
    batch = ContinuousBatch(loaded, schedule)
    sizes: list[list[int]] = [[] for _ in range(L)]

    def count(own: list[int], columns: torch.Tensor) -> None:
        if columns.shape[1] == 1:  # no prompt
            own.append(len(columns))

    hooks = [
        block.fc1.register_forward_hook(lambda _m, args, _out, own=own: count(own, args[0]))
        for block, own in zip(loaded.layers, sizes, strict=True)
    ]
    try:
        rows = run(batch, {2 * i: [request] for i, request in enumerate(pool)}, {})
    finally:
        for hook in hooks:
            hook.remove()
    for layer in range(L):
        wanted = sum(layer in schedule.step(k).layers for _ in pool for k in range(8))
        wanted += len(pool) * (layer == L - 1)  # of a prompt, one column goes through the last block
        assert sum(sizes[layer]) == wanted
    assert {len(row.tokens) for row in rows.values()} == {9}


def test_memory_follows_the_rows(loaded: Decoder) -> None:
    """It grows for a burst, and a batch without rows holds none."""
    batch = ContinuousBatch(loaded, SkipDecode(L, 4, 2, 1, 5))
    assert batch.cache_bytes == 0
    pool = [Request(str(i), p, greedy(6, ignore_eos=True)) for i, p in enumerate(random_prompts([60] * 30, seed=1))]
    batch.join(pool[:2])
    small = batch.cache_bytes
    batch.join(pool[2:])
    assert batch.cache_bytes > 4 * small
    full = 2 * L * 30 * loaded.config.hidden_size * 4 * 128
    assert batch.cache_bytes < 2 * full
    while not batch.is_done:
        batch.step()
    batch.step()
    assert batch.cache_bytes == 0


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(data=st.data())
@torch.inference_mode()
def test_the_price_of_a_join_is_what_it_takes(loaded: Decoder, data: st.DataObject) -> None:
    """The prompts' cache, the memory there was, and what took its place because it was too small."""
    batch = ContinuousBatch(loaded, SkipDecode(L, 5, 2, 1, 12))
    num_grown = 0
    for turn in range(data.draw(st.integers(1, 6))):
        count, prompt = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 80))
        limit, steps = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 12))
        prompts = random_prompts([prompt] * count, seed=turn)
        batch._drop_ended()
        before, memory, room = batch.cache_bytes, batch._cache._k, batch._cache.num_slots
        price = batch.bytes_with(count, prompt, limit)
        batch.join([Request(f"{turn}-{i}", p, greedy(limit, ignore_eos=True)) for i, p in enumerate(prompts)])
        is_replaced = batch._cache._k is not memory and batch.cache_bytes >= before
        is_copied = not batch._feeds_in_place
        prompt_cache = is_copied * 2 * L * count * rounded_columns(prompt) * loaded.config.hidden_size * 4
        if batch._cache._k is memory or batch.cache_bytes >= before:
            assert price == prompt_cache + before + is_replaced * batch.cache_bytes
        assert price >= prompt_cache + max(before, batch.cache_bytes)
        num_grown += batch._cache.num_slots > room
        for _ in range(steps):
            batch.step()
    assert num_grown > 0


def test_a_join_without_memory_leaves_the_batch_as_it_was(loaded: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SkipDecode(L, 5, 2, 1, 12)
    prompts = random_prompts([5] * 5 + [70], seed=3)
    pool = [Request(str(i), p, greedy(9 + i, ignore_eos=True)) for i, p in enumerate(prompts)]
    batch = ContinuousBatch(loaded, schedule)
    rows = batch.join(pool[:5])
    batch.step()

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory, so to speak")

    with monkeypatch.context() as patch:
        patch.setattr(batch._cache, "_allocate", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.join(pool[5:])  # more columns than there are
    batch.step()
    rows += batch.join(pool[5:])
    while not batch.is_done:
        batch.step()
    assert [row.tokens for row in rows] == [alone(loaded, request, schedule)[0] for request in pool]


@torch.inference_mode()
def test_only_what_rows_have_written_is_moved(loaded: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory grows; beside one long answer all rows have as many columns as that."""
    batch = ContinuousBatch(loaded, FullDepth(L))
    prompts, limits = random_prompts([5] * 12, seed=3), [120, 60, 3, 3, 3, 60, 60, 60, 9, 9, 9, 9]
    pool = [Request(str(i), prompt, greedy(limits[i], ignore_eos=True)) for i, prompt in enumerate(prompts)]
    batch.join(pool[:1])
    for _ in range(16):
        batch.step()
    batch.join(pool[1:8])
    for _ in range(3):  # the second one ends three rows
        batch.step()
    assert [member.slot.index for member in batch._members] == [0, 1, 5, 6, 7]
    memory = batch._cache._k[0]
    for slot in range(len(memory)):
        memory[slot, :, 8:] = slot + 1  # whose columns these are
    monkeypatch.setattr(Backend, "allocate_cache", lambda _, count, *__, **___: torch.zeros(count))
    monkeypatch.setattr(type(batch._cache.backend), "allocate_cache", Backend.allocate_cache)
    batch.join(pool[8:])
    assert batch._cache._k[0] is not memory, "it has not grown"
    assert [(member.slot.index, member.slot.length) for member in batch._members[:5]] == [
        (0, 24), (1, 8), (2, 8), (3, 8), (4, 8)
    ]  # fmt: skip
    grown = batch._cache._k[0]
    assert (grown[0, :, 8:24] == 1).all()
    assert (grown[1:5, :, 8:] == 0).all()


def test_a_slot_serves_the_next_row(loaded: Decoder) -> None:
    """Nothing is moved for those that leave in the middle, and memory stays as it is."""
    batch = ContinuousBatch(loaded, FullDepth(L))
    limits = [30, 3, 30, 3, 30, 3, 30, 3]
    pool = [Request(str(i), p, greedy(limits[i], ignore_eos=True)) for i, p in enumerate(random_prompts([5] * 8))]
    rows = batch.join(pool[:5])
    memory = batch._cache._k[0]
    for _ in range(4):
        batch.step()
    assert [member.slot.index for member in batch._members] == [0, 2, 4]
    rows += batch.join(pool[5:])
    assert [member.slot.index for member in batch._members] == [0, 2, 4, 1, 3, 5]
    assert batch._cache._k[0] is memory
    while not batch.is_done:
        batch.step()
    assert [row.tokens for row in rows] == [alone(loaded, request, batch.schedule)[0] for request in pool]


def test_a_schedule_is_looked_through_once(loaded: Decoder) -> None:
    """Thousands of plans; a batch is made anew whenever rows come after a pause."""
    ContinuousBatch(loaded, SkipDecode(L, 5, 2, 1, 77))
    misses = layer_ends.cache_info().misses
    ContinuousBatch(loaded, SkipDecode(L, 5, 2, 1, 77))
    assert layer_ends.cache_info().misses == misses


@pytest.mark.slow
def test_a_long_stream_of_rows_stays_small(loaded: Decoder) -> None:
    """Rows come and go for ever in memory for a few."""
    schedule = SkipDecode(L, 5, 2, 1, 7)
    prompts = random_prompts([3 + i % 9 for i in range(120)], seed=4)
    pool = [Request(str(i), p, greedy(2 + i % 13, ignore_eos=True)) for i, p in enumerate(prompts)]
    waiting, batch, biggest = deque(pool), ContinuousBatch(loaded, schedule), 0
    rows = []
    while waiting or not batch.is_done:
        if waiting and len(batch.rows) < 6:
            rows += batch.join([waiting.popleft()])
        batch.step()
        biggest = max(biggest, batch.cache_bytes)
    assert [row.tokens for row in rows] == [alone(loaded, request, schedule)[0] for request in pool]
    assert biggest <= 2 * L * 24 * loaded.config.hidden_size * 4 * 64


def test_offline(loaded: Decoder, tiny_checkpoint: Path) -> None:
    """A whole corpus through one batch, with stop strings, in the order of the requests."""
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    schedule = SkipDecode(L, 5, 2, 1, 20)
    prompts = random_prompts([1 + i % 17 for i in range(40)], seed=8)
    pool = [
        Request(str(i), p, greedy(5 + 40 * (i % 8 == 0), stop=("e", "a") if i % 3 == 0 else ()))
        for i, p in enumerate(prompts)
    ]
    made = generate_continuous(loaded, pool, schedule, max_rows=8, decode_text=tokenizer.decode)
    wanted = generate(loaded, pool, schedule, decode_text=tokenizer.decode)
    assert made.completions == wanted.completions
    stats, others = made.stats, wanted.stats
    assert (stats.rows, stats.input_tokens, stats.output_tokens) == (40, others.input_tokens, others.output_tokens)
    assert stats.row_steps == sum(stats.batch_rows) == sum(len(c.tokens) - 1 for c in made.completions)
    assert stats.layer_row_steps == stats.layers_run == others.layers_run
    assert len(stats.batch_rows) == stats.decode_steps
    assert max(stats.batch_rows) <= 8


def test_log_probabilities_equal_those_of_a_static_batch(loaded: Decoder) -> None:
    schedule = SkipDecode(L, 5, 2, 1, 9)
    pool = [
        Request(str(i), p, greedy(8, ignore_eos=True), top_logprobs=top)
        for i, (p, top) in enumerate(zip(random_prompts([4, 9, 2], seed=1), (3, None, 0), strict=True))
    ]
    rows = run(ContinuousBatch(loaded, schedule), {0: pool[:1], 3: pool[1:]}, {})
    from skipdecode.engine.static_batch import StaticBatch

    for request in pool:
        static = StaticBatch(loaded, [request], schedule)
        static.prefill()
        while not static.is_done:
            static.step()
        wanted, got = static.rows[0].logprobs, rows[request.id].logprobs
        assert len(wanted) == len(got) == (0 if request.top_logprobs is None else 8)
        for a, b in zip(wanted, got, strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
            assert [t for t, _ in b.top] == [t for t, _ in a.top]
            assert len(a.top) == request.top_logprobs
            assert a.logprob == pytest.approx(a.top[0][1]) if a.top else True  # greedy: the likeliest


def test_dynamic_ffns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decode.ffn_skip.mode"):
        check_continuous(SkipSaturated(FullDepth(L), 2, 1, 1, 0.9))
