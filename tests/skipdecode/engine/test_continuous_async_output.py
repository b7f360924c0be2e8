"""Looks that come steps late, as on a GPU, forced on a CPU: the rows of a continuous batch are those of looks at once.

Float32. That nothing waits meanwhile: `test_fake_cuda_continuous.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request, Row
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import Schedule, SkipDecode
from tests.support.examples import examples
from tests.support.naive import greedy, random_prompts
from tests.support.schedules import SCHEDULES

L = 6
SKIP = SkipDecode(L, 5, 2, 1, 12)


def run(batch: ContinuousBatch, arrivals: dict[int, Sequence[Request]], cancel_at: dict[str, int]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    step = 0
    while step <= max(arrivals) or not batch.is_done:
        if new := arrivals.get(step):
            rows |= {row.request.id: row for row in batch.join(new)}
        for name in [name for name, at in cancel_at.items() if at == step and name in rows]:
            rows[name].cancel()
        batch.step()
        step += 1
        assert step < 300
    return rows


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The columns that each step writes; none is one that its row does not have."""
    steps: list[list[int]] = []
    feed = ContinuousBatch._feed_newest

    def seen(batch: ContinuousBatch) -> None:
        columns = [batch._columns_written(member) for member in batch._members]
        for column, member in zip(columns, batch._members, strict=True):
            assert column < member.slot.prompt + member.slot.limit - 1, "the last new token of a row was fed"
        steps.append(columns)
        feed(batch)

    monkeypatch.setattr(ContinuousBatch, "_feed_newest", seen)
    return steps


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    prompt = random_prompts([draw(st.integers(1, 40))], seed=draw(st.integers(0, 99)))[0]
    sampling = Sampling(
        max_new_tokens=draw(st.integers(1, 20)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        seed=draw(st.integers(0, 3)),
        stop=draw(st.sampled_from([(), ("e", "a")])),
        ignore_eos=draw(st.booleans()),
    )
    return Request(name, prompt, sampling, draw(st.sampled_from([None, None, 0, 2])))


@settings(max_examples=examples(20))
@given(data=st.data(), schedule=st.sampled_from(list(SCHEDULES.values())), max_pending=st.integers(1, 3))
def test_late_output_gives_the_same_rows(
    ending_checkpoint: Callable[[str], Path],
    ours: Callable[[Path], Decoder],
    data: st.DataObject,
    schedule: Schedule,
    max_pending: int,
) -> None:
    """Whatever they sample, wherever they end, and whoever joins, leaves or is cancelled."""
    path = ending_checkpoint("125m")
    model = ours(path)
    decode = Tokenizer(path, model.config).decode
    arrivals: dict[int, list[Request]] = {}
    names = [str(i) for i in range(data.draw(st.integers(1, 10)))]
    for name in names:
        arrivals.setdefault(data.draw(st.integers(0, 20)), []).append(data.draw(requests(name)))
    cancel_at = {name: data.draw(st.integers(0, 30)) for name in names if data.draw(st.integers(0, 4)) == 0}
    late = ContinuousBatch(model, schedule, decode_text=decode, max_pending=max_pending)
    made = run(late, arrivals, cancel_at)
    for name, wanted in run(ContinuousBatch(model, schedule, decode_text=decode), arrivals, {}).items():
        row = made[name]
        if row.finish_reason == "cancelled":
            assert name in cancel_at
            assert row.tokens == wanted.tokens[: len(row.tokens)]
        else:
            assert (row.tokens, row.finish_reason) == (wanted.tokens, wanted.finish_reason), name
        if row.request.top_logprobs is not None:
            assert len(row.logprobs) >= len(row.tokens)
            for own, other in zip(row.logprobs[: len(row.tokens)], wanted.logprobs, strict=False):
                assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [t for t, _ in own.top] == [t for t, _ in other.top]
    late.step()
    assert late.cache_bytes == 0


def test_all_ways_to_end_come_up(loaded: Decoder, tiny_checkpoint: Path, fed: list[list[int]]) -> None:
    """EOS, a stop string, the last new token, the first one as the last, and the last position of the model."""
    limit, decode = loaded.config.max_position_embeddings, Tokenizer(tiny_checkpoint, loaded.config).decode
    prompts = random_prompts([5, 6, 7, limit - 3, limit, 8], seed=8)
    free = generate(loaded, [Request("0", prompts[0], greedy(9, ignore_eos=True))], SKIP).completions[0].tokens
    text = decode(free[:4])[-1:]
    pool = [
        Request("stop", prompts[0], greedy(9, ignore_eos=True, stop=(text,))),
        Request("length", prompts[1], greedy(9, ignore_eos=True)),
        Request("sampled", prompts[2], Sampling(9, temperature=1.0, seed=4, ignore_eos=True)),
        Request("last position", prompts[3], greedy(4, ignore_eos=True)),
        Request("nothing fed", prompts[4], greedy(1, ignore_eos=True)),
        Request("long", prompts[5], greedy(30, ignore_eos=True)),
    ]
    rows = run(ContinuousBatch(loaded, SKIP, decode_text=decode, max_pending=1), {0: pool[:3], 2: pool[3:]}, {})
    for request in pool:
        wanted = generate(loaded, [request], SKIP, decode_text=decode).completions[0]
        assert (rows[request.id].tokens, rows[request.id].finish_reason) == (wanted.tokens, wanted.finish_reason)
    assert rows["stop"].finish_reason == "stop"
    assert limit - 1 in {position for step in fed for position in step}


def test_a_token_is_taken_a_step_late_and_a_place_is_free_a_step_later(loaded: Decoder) -> None:
    batch = ContinuousBatch(loaded, SKIP, max_pending=1)
    (row,) = batch.join([Request("0", [2, 9, 4], greedy(4, ignore_eos=True))])
    assert row.tokens == []
    for count in (1, 2, 4):  # the last look finds no step that could run meanwhile
        assert batch.rows == [row]
        batch.step()
        assert len(row.tokens) == count
    assert batch.is_done
    assert batch.stats.row_steps == 3


def test_only_rows_that_end_early_take_part_in_one_more_step(
    ending_checkpoint: Callable[[str], Path], ours: Callable[[Path], Decoder]
) -> None:
    model, reasons = ours(ending_checkpoint("125m")), set()
    for ignore_eos in (True, False):
        pool = [
            Request(str(i), p, greedy(12, ignore_eos=ignore_eos)) for i, p in enumerate(random_prompts([5] * 8, seed=2))
        ]
        for request in pool:
            steps, ends = [], []
            for max_pending in (0, 1):
                batch = ContinuousBatch(model, SKIP, max_pending=max_pending)
                (row,) = run(batch, {0: [request]}, {}).values()
                steps.append(batch.stats.row_steps)
                ends.append(row.finish_reason)
            assert ends[0] == ends[1]
            made_one_for_nothing = ends[0] == "stop" and len(row.tokens) < 12
            assert steps[1] == steps[0] + made_one_for_nothing
            reasons |= set(ends)
    assert reasons == {"stop", "length"}


def test_nobody_is_left_behind_who_needs_no_step(loaded: Decoder) -> None:
    """A first token that is the last one: its row never has a place, and is awaited all the same."""
    batch = ContinuousBatch(loaded, SKIP, max_pending=2)
    (row,) = batch.join([Request("0", [2, 9, 4], greedy(1))])
    assert batch.rows == [row]
    assert batch.cache_bytes == 0
    batch.step()
    assert batch.is_done
    assert len(row.tokens) == 1


def test_a_join_without_memory_leaves_the_batch_as_it_was(loaded: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([5] * 4 + [70], seed=3)
    pool = [Request(str(i), p, greedy(9 + i, ignore_eos=True)) for i, p in enumerate(prompts)]
    batch = ContinuousBatch(loaded, SKIP, max_pending=1)
    rows = batch.join(pool[:4])

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory, so to speak")

    with monkeypatch.context() as patch:
        patch.setattr(batch._cache, "_allocate", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.join(pool[4:])  # more columns than there are
    assert batch.rows == rows
    batch.step()
    rows += batch.join(pool[4:])
    while not batch.is_done:
        batch.step()
    assert [row.tokens for row in rows] == [generate(loaded, [r], SKIP).completions[0].tokens for r in pool]


def test_on_a_cpu_output_is_read_at_once(loaded: Decoder) -> None:
    batch = ContinuousBatch(loaded, SKIP)
    (row,) = batch.join([Request("0", [2, 9, 4], greedy(4, ignore_eos=True))])
    assert len(row.tokens) == 1
    batch.step()
    assert len(row.tokens) == 2


@torch.inference_mode()
def test_a_mask_depends_on_the_rows_of_a_part_alone(loaded: Decoder) -> None:
    """Whether the host knows the padding, or asks for it."""
    num_pad = [0, 0, 3]
    for num_pad_host in (None, num_pad):
        cache = KVCache.allocate(
            loaded.config,
            num_pad=torch.tensor(num_pad),
            capacities=[5] * L,
            dtype=torch.float32,
            num_pad_host=num_pad_host,
        )
        assert [cache.slice_rows(*part).valid is None for part in ((0, 2), (1, 3), (0, 3))] == [True, False, False]
        assert cache.keep([0, 1], [True] * L).valid is None
