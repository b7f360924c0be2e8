"""Heads of prompts that are run once: the tokens of prompts run alone, for any mix, method, family and back end."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.config.model import Quantization
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs, plans_of
from skipdecode.engine.generate import generate
from skipdecode.engine.prefill import allocate_cache, pad_prompts
from skipdecode.engine.prefix_sharing import PrefixSharing, share_prefixes
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill, Unified
from skipdecode.speculative.generate_lossless import generate_lossless
from tests.support.cpu_backends import BACKENDS, KINDS, forced, params_of
from tests.support.graphs import FakeCaptures, cpu_as_cuda
from tests.support.schedules import SCHEDULES
from tests.support.shared_prompts import LAYERS as L
from tests.support.shared_prompts import gemma3, grouped_prompts, llama, opt, random_decoder, requests_of

CONFIGS = {
    "opt": opt,
    "llama": llama,
    "opt-350m": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=32),
    "gemma3, windows": gemma3,
    "llama, a head of keys each": lambda: llama(num_key_value_heads=6, attention_bias=True),
}
BASES: dict[str, Schedule] = SCHEDULES | {
    "ffn row": SkipSaturated(SkipDecode(L, 5, 3, 1, 7), threshold=0.9, cold_start=1, cold_end=1, warmup_tokens=2),
    "ffn calibrated": SkipBand(FullDepth(L), layers=(2, 3), warmup_tokens=2),
}
SWIFTKV = {None: None, "swiftkv": (3, 1), "swiftkv, groups": (2, 2)}
MIXES = st.lists(
    st.tuples(st.integers(1, 25).map(lambda n: 2 * n), st.lists(st.integers(1, 20), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", params=["torch", *BACKENDS])
def any_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


@cache
def decoder(backend: str, family: str, swiftkv: str | None, dtype: torch.dtype) -> Decoder:
    return random_decoder(CONFIGS[family](), dtype, swiftkv=SWIFTKV[swiftkv]).pack()


def marks_of(mix: Sequence[tuple[int, Sequence[int]]]) -> list[list[int]]:
    return [[length] for length, ends in mix for _ in ends]


@given(
    mix=MIXES,
    family=st.sampled_from(sorted(CONFIGS)),
    method=st.sampled_from(sorted(BASES)),
    swiftkv=st.sampled_from(list(SWIFTKV)),
    num_new=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=8)
def test_tokens_are_those_without(
    any_backend: str,
    mix: list[tuple[int, list[int]]],
    family: str,
    method: str,
    swiftkv: str | None,
    num_new: list[int],
    temperature: float,
    seed: int,
) -> None:
    swiftkv = None if family == "opt-350m" else swiftkv  # whose norms are behind the blocks
    model, schedule = decoder(any_backend, family, swiftkv, torch.float32), BASES[method]
    if (shape := SWIFTKV[swiftkv]) is not None:
        schedule = SwiftKVPrefill(schedule, shape[0])
    prompts = grouped_prompts(mix, seed)
    requests, sharing = requests_of(prompts, num_new, temperature), share_prefixes(prompts, marks_of(mix))
    wanted = generate(model, requests, schedule)
    made = generate(model, requests, schedule, sharing=sharing)
    assert made.completions == wanted.completions
    assert wanted.stats.prefix_tokens_saved == 0
    assert made.stats.prefix_tokens_saved == sum(length * (len(ends) - 1) for length, ends in mix)
    assert made.stats.input_tokens == wanted.stats.input_tokens


def nested() -> tuple[list[list[int]], list[list[int]]]:
    """A head of all; behind it two heads of some, one with a head behind it again; a row without any."""
    inner = grouped_prompts([(8, [3, 5]), (14, [1, 2, 9]), (2, [4])], 5)
    head = grouped_prompts([(30, [0])], 6)[0]
    prompts = [head + prompt for prompt in inner]
    deep = [*prompts[2][:44], 7, 7, 7, 7]
    prompts += [[*deep, 9], [*deep, 8, 8, 8], [11, 12, 13]]
    marks = [[30, 38]] * 2 + [[30, 44]] * 3 + [[30]] + [[30, 44, 48]] * 2 + [[]]
    return prompts, marks


def test_nested_prefixes_are_run_after_their_parents() -> None:
    prompts, marks = nested()
    sharing = share_prefixes(prompts, marks)
    assert sharing is not None
    assert [len(head) for head in sharing.prefixes] == [30, 38, 44, 48]
    assert sharing.parents == (-1, 0, 0, 2)
    assert sharing.prefix_of_row == (1, 1, 2, 2, 2, 0, 3, 3, -1)
    fed = 30 + 8 + 14 + 4 + sum(len(p) - n for p, n in zip(prompts, (38, 38, 44, 44, 44, 30, 48, 48, 0), strict=True))
    assert sharing.tokens_saved == sum(map(len, prompts)) - fed


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_nested_prefixes_change_no_token(any_backend: str, family: str) -> None:
    model, (prompts, marks) = decoder(any_backend, family, "swiftkv", torch.float32), nested()
    for schedule in (FullDepth(L), SwiftKVPrefill(SkipDecode(L, 4, 2, 1, 7), 3)):
        requests = requests_of(prompts, [6, 3])
        made = generate(model, requests, schedule, sharing=share_prefixes(prompts, marks))
        assert made.completions == generate(model, requests, schedule).completions


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("kind", params_of(KINDS))
def test_where_layers_are_kernels_no_bit_changes(
    kind: tuple[str, torch.dtype, Quantization | None], family: str
) -> None:
    """Logits are equal to the last bit, so bfloat16 draws the same tokens, too."""
    name, dtype, quantization = kind
    with forced(name):
        model, (prompts, marks) = random_decoder(CONFIGS[family](), dtype).pack(quantization), nested()
        assert model.supports_shared_prefix
        requests = [replace(request, top_logprobs=3) for request in requests_of(prompts, [7], temperature=1.0)]
        whole, parts = (
            StaticBatch(model, requests, FullDepth(L), sharing=s) for s in (None, share_prefixes(prompts, marks))
        )
        for static in (whole, parts):
            static.prefill()
            while not static.is_done:
                static.step()
        assert [row.tokens for row in whole.rows] == [row.tokens for row in parts.rows]
        assert [row.logprobs for row in whole.rows] == [row.logprobs for row in parts.rows]


def bytes_of(columns: int, rows: int, family: str) -> int:
    config = CONFIGS[family]()
    return 2 * 4 * rows * columns * config.kv_dim


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("name", BACKENDS)
def test_one_copy_of_a_head_is_all_that_is_held(name: str, family: str) -> None:
    """Bytes are exact: columns of heads once, and of rows their own ends and the steps that run the layer."""
    mix = [(40, [5, 9, 2]), (24, [9, 3])]
    prompts = grouped_prompts(mix, 1)
    schedule, num_new = SkipDecode(L, 4, 2, 1, 5), 6
    steps = [sum(schedule.step(k).attn[layer] for k in range(num_new - 1)) for layer in range(L)]
    with forced(name):
        model = decoder(name, family, None, torch.float32)
        assert model.supports_shared_prefix
        sharing = share_prefixes(prompts, marks_of(mix))
        static = StaticBatch(model, requests_of(prompts, [num_new]), schedule, sharing=sharing)
        heads = L * bytes_of(40, 2, family)
        assert static.cache_bytes == heads + sum(bytes_of(9 + n, 5, family) for n in steps)
        static.prefill()
        assert static.cache_bytes == static.stats.cache_bytes
        whole = StaticBatch(model, requests_of(prompts, [num_new]), schedule)
        assert whole.cache_bytes == sum(bytes_of(49 + n, 5, family) for n in steps)


def test_where_nothing_reads_a_shared_copy_rows_have_their_own() -> None:
    mix = [(40, [5, 9, 2])]
    prompts = grouped_prompts(mix, 1)
    with forced("torch"):
        model = decoder("torch", "llama", None, torch.float32)
        static = StaticBatch(
            model, requests_of(prompts, [4]), FullDepth(L), sharing=share_prefixes(prompts, marks_of(mix))
        )
        static.prefill()
        assert static.cache_bytes == L * bytes_of(49 + 3, 3, "llama")


def test_graphs_read_one_copy_of_prefixes() -> None:
    """Batches in turns, with prefixes and without; rows that end early are dropped. A graph is captured anew with the
    first batch that has prefixes, and serves those without, too. Memory is given back."""
    prompts, marks = nested()
    requests, schedule = requests_of(prompts, [5, 12, 3]), SkipDecode(L, 4, 2, 1, 11)
    sharing = share_prefixes(prompts, marks)
    with cpu_as_cuda():
        model = random_decoder(llama()).pack()
        wanted = [c.tokens for c in generate(model, requests, schedule).completions]
        captures = FakeCaptures()
        graphs = CudaGraphs(model, 1 << 24, max_rows=16, captures=captures)
        graphs.pool.memory.fill_(torch.nan)  # no column that a row has not written may matter
        graphs.capture_all(plans_of([schedule], 12))
        before, free = captures.captures, graphs.pool.free_bytes
        batches = [StaticBatch(model, requests, schedule, graphs=graphs, sharing=s) for s in (sharing, None, sharing)]
        assert [batch._cache.shared is not None for batch in batches] == [True, False, True]
        assert batches[0].cache_bytes < 0.8 * batches[1].cache_bytes
        for batch in batches:
            batch.prefill()
        while not all(batch.is_done for batch in batches):
            for batch in batches:
                if not batch.is_done:
                    batch.step()
        assert [[row.tokens for row in batch.rows] for batch in batches] == [wanted] * 3
        assert len(set(batches[0].stats.batch_rows)) > 1, "no rows were dropped"
        again, late = graphs.num_graphs, graphs.num_late
        assert late == captures.captures - before > 0
        assert again == before, "in place of those that there were"
        for shared in (sharing, None):
            made = generate(model, requests, schedule, graphs=graphs, sharing=shared)
            assert [c.tokens for c in made.completions] == wanted
        assert graphs.num_late == late
        del batch, batches, made
        gc.collect()
        assert graphs.pool.free_bytes == free


def test_graphs_that_may_not_be_captured_anew_serve_batches_without_prefixes() -> None:
    prompts, marks = nested()
    requests, sharing = requests_of(prompts, [4]), share_prefixes(prompts, marks)
    with cpu_as_cuda():
        model = random_decoder(llama()).pack()
        wanted = [c.tokens for c in generate(model, requests, FullDepth(L)).completions]
        captures = FakeCaptures()
        graphs = CudaGraphs(model, 1 << 24, max_rows=16, captures=captures)
        graphs.capture_all(plans_of([FullDepth(L)], 4))
        captures.fails = RuntimeError("no more")
        for shared in (sharing, None):
            made = generate(model, requests, FullDepth(L), graphs=graphs, sharing=shared)
            assert [c.tokens for c in made.completions] == wanted
        assert captures.replays == 3
        assert graphs.failure == "RuntimeError: no more"


def test_one_copy_is_taken_where_it_is_smaller() -> None:
    """A long prompt beside those that share makes the columns of all rows as long: copies take less then."""
    prompts = grouped_prompts([(40, [2, 3, 4])], 1)
    sharing = share_prefixes(prompts, [[40]] * 3)
    with cpu_as_cuda():
        model = random_decoder(llama()).pack()
        assert StaticBatch(model, requests_of(prompts, [2]), FullDepth(L), sharing=sharing)._cache.shared is not None
        longer = [*prompts, [7] * 60]
        mixed = share_prefixes(longer, [[40]] * 3 + [[]])
        batch = StaticBatch(model, requests_of(longer, [2]), FullDepth(L), sharing=mixed)
        assert batch._cache.shared is None


@pytest.mark.parametrize("swiftkv", list(SWIFTKV))
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_newcomers_of_a_continuous_batch_share_prefixes(any_backend: str, family: str, swiftkv: str | None) -> None:
    model, (prompts, marks) = decoder(any_backend, family, swiftkv, torch.float32), nested()
    schedule: Schedule = SkipDecode(L, 5, 2, 1, 7)
    if (shape := SWIFTKV[swiftkv]) is not None:
        schedule = SwiftKVPrefill(schedule, shape[0])
    requests = requests_of(prompts, [6, 3, 8])
    batch = ContinuousBatch(model, schedule)
    rows = batch.join(requests[:4], share_prefixes(prompts[:4], marks[:4]))
    batch.step()
    rows += batch.join(requests[4:], share_prefixes(prompts[4:], marks[4:]))
    while not batch.is_done:
        batch.step()
    assert [row.tokens for row in rows] == [c.tokens for c in generate(model, requests, schedule).completions]


@given(mix=MIXES, seed=st.integers(0, 2**31), pick=st.randoms(use_true_random=False))
def test_sharing_says_what_prompts_are(mix: list[tuple[int, list[int]]], seed: int, pick: object) -> None:
    """Every row begins with its head, every head with its parent; two or more begin with each."""
    prompts, marks = grouped_prompts(mix, seed), marks_of(mix)
    sharing = share_prefixes(prompts, marks)
    if sharing is None:
        assert all(len(ends) == 1 for _, ends in mix)
        return
    users = [*sharing.prefix_of_row, *sharing.parents]
    for head in range(len(sharing.prefixes)):
        assert users.count(head) >= 2
    for at, (head, parent) in enumerate(zip(sharing.prefixes, sharing.parents, strict=True)):
        assert parent < at
        assert parent < 0 or head[: len(sharing.prefixes[parent])] == sharing.prefixes[parent]
    for prompt, head in zip(prompts, sharing.prefix_of_row, strict=True):
        assert head < 0 or tuple(prompt[: len(sharing.prefixes[head])]) == sharing.prefixes[head]


def test_the_cost_model_is_told_what_groups_read() -> None:
    """Each prefix once for every 16 rows that have it; on CPUs once."""
    prompts = grouped_prompts([(40, [2] * 17), (20, [3] * 2)], 1)
    sharing = share_prefixes(prompts, [[40]] * 17 + [[20]] * 2)
    assert sharing is not None
    assert sharing.columns_read(None) == 40 + 20
    assert sharing.columns_read(16) == 2 * 40 + 20
    assert sharing.shape(prompts, copies=False, group_rows=16).columns_read_once == 17 * 40 + 2 * 20 - 100
    assert sharing.shape(prompts, copies=True, group_rows=16).columns_read_once == 0


def test_the_sharing_of_other_rows_is_refused() -> None:
    sharing = PrefixSharing(((5, 6),), (-1,), (0, 0))
    with forced("torch"):
        model = decoder("torch", "opt", None, torch.float32)
        with pytest.raises(AssertionError, match="another batch"):
            StaticBatch(model, requests_of([[5, 6, 7]] * 3, [2]), FullDepth(L), sharing=sharing)


def test_a_prompt_is_never_shared_to_its_last_token() -> None:
    with pytest.raises(AssertionError):
        share_prefixes([[5, 6], [5, 6]], [[2], [2]])


def test_columns_behind_a_filled_cache_need_no_padding() -> None:
    """What was refused: several columns behind filled ones, in a batch of prompts as long as each other."""
    with forced("torch"):
        model = decoder("torch", "llama", None, torch.float32)
        prompts = grouped_prompts([(0, [9, 9])], 3)
        requests, schedule = requests_of(prompts, [1]), FullDepth(L)
        tokens, num_pad, _ = pad_prompts(model, requests, None, None)
        caches = [allocate_cache(model, num_pad, 9, schedule, 1) for _ in range(2)]
        plan, positions = schedule.prefill(), torch.arange(9).expand(2, 9)
        with torch.inference_mode():
            whole = model(tokens, positions, caches[0], plan)
            model(tokens[:, :4], positions[:, :4], caches[1], plan)
            parts = model(tokens[:, 4:], positions[:, 4:], caches[1], plan)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_lossless_rows_share_prefixes(any_backend: str, family: str) -> None:
    model, (prompts, marks) = decoder(any_backend, family, None, torch.float32), nested()
    requests, sharing = requests_of(prompts, [9, 5]), share_prefixes(prompts, marks)
    made = generate_lossless(model, requests, Lossless(L, Unified(L, 3), 2), sharing=sharing)
    full = generate(model, requests, FullDepth(L))
    assert [c.tokens for c in made.completions] == [c.tokens for c in full.completions]
    assert made.stats.prefix_tokens_saved == (0 if sharing is None else sharing.tokens_saved) > 0
