"""What ends a row: its limit, the model's positions, EOS, stop strings. Float32, tokens equal."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.checkpoint.detokenizer import StopStringSearch, cut_at_stop
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import InvalidLogits, Request, Row
from skipdecode.engine.results import Completion
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import SkipDecode
from tests.support.examples import examples
from tests.support.hf_tokens import FULL, L, Load, LoadHF, hf_generate
from tests.support.naive import greedy, random_prompts, requests_for, tokens_of

# Logits that are no numbers


def decode_to_the_end(batch: StaticBatch) -> None:
    while not batch.is_done:
        batch.step()


@pytest.mark.parametrize("keys", [{}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("num_top", [None, 2])
def test_a_row_whose_logits_are_no_numbers_ends_its_batch(
    loaded: Decoder, monkeypatch: pytest.MonkeyPatch, keys: dict[str, float], num_top: int | None
) -> None:
    """Never by a token; where tokens are read late, as on GPUs, what was chosen is fed in the meantime."""
    sampling = Sampling(max_new_tokens=12, ignore_eos=True, **keys)  # type: ignore[arg-type]
    requests = [Request(f"r{i}", p, sampling, num_top) for i, p in enumerate(random_prompts([3, 9, 5], seed=5))]
    head, steps = Decoder.head_states, list[int]()

    def overflows(model: Decoder, h: Tensor) -> Tensor:
        steps.append(len(steps))
        states = head(model, h)
        if len(steps) == 6:
            states[1, 5] = torch.nan
        return states

    monkeypatch.setattr(Decoder, "head_states", overflows)
    for check_every, max_pending in ((1, 0), (4, 1)):
        steps.clear()
        batch = StaticBatch(loaded, requests, FULL, check_every=check_every, max_pending=max_pending)
        batch.prefill()
        with pytest.raises(InvalidLogits, match="row 'r1': a logit of new token 6 is NaN or infinite"):
            decode_to_the_end(batch)
        assert len(batch.rows[1].tokens) == 5
        assert len(steps) == (6 if check_every == 1 else 12)


# Limits


def test_each_row_has_its_own_limit(loaded: Decoder) -> None:
    prompts = random_prompts([3, 9, 1, 5], seed=5)
    limits = [1, 20, 6, 13]
    requests = [
        Request(str(i), p, greedy(n, ignore_eos=True)) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    for compact in (True, False):
        result = generate(loaded, requests, FULL, compact=compact)
        assert [len(c.tokens) for c in result.completions] == limits
        assert {c.finish_reason for c in result.completions} == {"length"}
        for c, prompt in zip(result.completions, prompts, strict=True):
            assert (
                c.tokens
                == generate(loaded, [Request("x", prompt, greedy(20, ignore_eos=True))], FULL)
                .completions[0]
                .tokens[: len(c.tokens)]
            )


def test_one_new_token_needs_no_step(loaded: Decoder) -> None:
    result = generate(loaded, requests_for(random_prompts([3, 9]), greedy(1)), SkipDecode(L, 3, 2, 1, 1))
    assert [len(c.tokens) for c in result.completions] == [1, 1]
    assert [c.layers_run for c in result.completions] == [0, 0]
    assert result.stats.decode_steps == result.stats.row_steps == 0
    assert result.stats.batch_rows == []


def test_an_ended_row_is_carried_beyond_the_positions_of_the_model(loaded: Decoder) -> None:
    """A long prompt with a small limit beside a short prompt with a large one: each fits the model's 128 positions."""
    long, short = random_prompts([120, 4], seed=9)
    requests = [Request("long", long, greedy(4, ignore_eos=True)), Request("short", short, greedy(60, ignore_eos=True))]
    alone = [generate(loaded, [r], FULL).completions[0] for r in requests]
    third = Request("third", short, greedy(60, ignore_eos=True))  # two of three keep running: no compaction
    assert generate(loaded, [*requests, third], FULL).completions == [*alone, alone[1]]
    assert generate(loaded, requests, FULL, compact=False).completions == alone


def test_the_last_position_can_be_used_and_no_further(loaded: Decoder, tiny_checkpoint: Path, hf: LoadHF) -> None:
    """128 positions hold 120 prompt tokens and 8 fed ones; the ninth new token is not fed."""
    (prompt,) = random_prompts([120], seed=9)
    made = generate(loaded, [Request("a", prompt, greedy(9, ignore_eos=True))], FULL).completions[0].tokens
    assert made == hf_generate(hf(tiny_checkpoint), [prompt], 9, eos=-7)[0]
    with pytest.raises(ValueError, match=r"128 positions"):
        generate(loaded, [Request("a", prompt, greedy(10, ignore_eos=True))], FULL)


# Stop strings


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path, loaded: Decoder) -> Tokenizer:
    return Tokenizer(tiny_checkpoint, loaded.config)


@pytest.fixture(scope="module")
def writer(tiny_checkpoint: Path, tokenizer: Tokenizer) -> Decoder:
    """A model that writes text: tokens that are no characters of their own, and specials, get hardly any logit."""
    model = load_model(tiny_checkpoint)
    for token in range(320):
        text = tokenizer.decode([token])
        if not text or "\ufffd" in text or not text.isprintable():
            model.embed_tokens.weight[token] *= 0.01
    return model


def defined_end(tokens: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """The definition: the first token after which the text holds a stop string."""
    return next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stop)), None)


def test_stop_strings_end_a_row_at_the_first_token_that_completes_one(
    writer: Decoder, tokenizer: Tokenizer, check_every: Callable[[int], None]
) -> None:
    """Stop strings cut out of what the model writes, over token borders too, for several check intervals."""
    prompts = random_prompts([4, 9, 1], seed=3)
    free = generate(writer, requests_for(prompts, greedy(30, ignore_eos=True)), FULL).completions
    num_stopped = num_spanning = 0
    for c in free:
        text = tokenizer.decode(c.tokens)
        for at in range(0, len(text) - 6, 5):
            for stop in ((text[at : at + 4],), (text[at + 2 : at + 6], "never", text[at : at + 3]), ("\0never",)):
                if any("\ufffd" in s for s in stop):
                    continue
                end = defined_end(c.tokens, stop, tokenizer.decode)
                assert (end is None) == (stop == ("\0never",))
                num_stopped += end is not None
                num_spanning += end is not None and not any(
                    s in tokenizer.decode(c.tokens[end - 1 : end]) for s in stop
                )
    assert num_stopped > 20
    assert num_spanning > 10
    text = [tokenizer.decode(c.tokens) for c in free]
    for interval in (1, 2, 3, 7, 8, 100):
        check_every(interval)
        for at in (0, 6, 13):
            stops = [tuple(s for s in (t[at : at + 4], t[at + 9 : at + 11]) if s and "\ufffd" not in s) for t in text]
            requests = [
                Request(str(i), p, greedy(30, ignore_eos=True, stop=s))
                for i, (p, s) in enumerate(zip(prompts, stops, strict=True))
            ]
            result = generate(writer, requests, FULL, decode_text=tokenizer.decode)
            for c, whole, stop in zip(result.completions, free, stops, strict=True):
                end = defined_end(whole.tokens, stop, tokenizer.decode)
                assert c.tokens == whole.tokens[:end]
                assert c.finish_reason == ("length" if end is None else "stop")
                assert c.layers_run == L * (len(c.tokens) - 1)


@settings(max_examples=examples(300))
@given(
    text=st.text(st.sampled_from("ab é🙂東\n"), min_size=1, max_size=16),
    cuts=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 4)), min_size=1, max_size=3),
    other=st.sampled_from(["never", "a", "🙂"]),
    interval=st.integers(1, 9),
    specials=st.lists(st.integers(0, 12), max_size=8),
)
def test_the_check_interval_does_not_matter(
    tokenizer: Tokenizer, text: str, cuts: list[tuple[int, int]], other: str, interval: int, specials: list[int]
) -> None:
    """Characters split over several tokens, special tokens (which have no text) in between, any interval."""
    stop = [text[at : at + n] for at, n in cuts if text[at : at + n]] + [other]
    tokens = tokenizer.encode([text])[0][1:]
    for at in specials:
        tokens.insert(at, 1)
    wanted = defined_end(tokens, stop, tokenizer.decode)
    row = Row(Request("x", [2], Sampling(len(tokens) + 1, stop=tuple(stop), ignore_eos=True)))
    for checked in range(0, len(tokens), interval):
        row.take(tokens[checked : checked + interval], {2}, tokenizer.decode)
        if not row.is_running:
            break
    assert (len(row.tokens) if row.finish_reason == "stop" else None) == wanted
    if wanted is not None:
        cut = cut_at_stop(tokenizer.decode(tokens[:wanted]), stop)
        assert not any(s in cut for s in stop)
        assert tokenizer.decode(tokens).startswith(cut)


def test_stop_string_of_a_character_split_over_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(["x🙂y"])[0][1:]
    assert len(tokens) >= 5, "the tokenizer has merged the bytes of the character"
    scan = StopStringSearch(["🙂"], tokenizer.decode)
    assert [scan.push(token) for token in tokens[:-1]] == [False] * (len(tokens) - 2) + [True]


def test_eos_and_stop_string_and_limit_together(
    ending_checkpoint: Callable[[str], Path], ours: Load, tokenizer: Tokenizer, check_every: Callable[[int], None]
) -> None:
    """Whatever comes first wins, and `stop` beats `length` on the last token."""
    model = ours(ending_checkpoint("125m"))
    prompts = random_prompts([3, 9, 1, 5, 12, 7, 2, 8], seed=5)
    free = tokens_of(generate(model, requests_for(prompts, greedy(40)), FULL))
    ended = [i for i, t in enumerate(free) if t[-1] == model.config.eos_token_id and len(t) > 3]
    assert ended
    for interval in (1, 8, 100):
        check_every(interval)
        for i in ended:
            whole, length = free[i], len(free[i])

            def run(i: int = i, **keys: object) -> Completion:
                return generate(
                    model, [Request("x", prompts[i], greedy(**keys))], FULL, decode_text=tokenizer.decode
                ).completions[0]  # type: ignore[arg-type]

            assert run(num_new=length) == Completion(whole, "stop", L * (length - 1), L * (length - 1))
            assert run(num_new=length - 1) == Completion(whole[:-1], "length", L * (length - 2), L * (length - 2))
            last = tokenizer.decode(whole[-2:-1])
            if last and "\ufffd" not in last:
                end = defined_end(whole, [last], tokenizer.decode)
                assert end is not None
                assert run(num_new=40, stop=(last,)) == Completion(whole[:end], "stop", L * (end - 1), L * (end - 1))
                assert run(num_new=end, stop=(last,)).finish_reason == "stop"


def test_stop_strings_without_a_decoder_of_text_are_refused(loaded: Decoder) -> None:
    with pytest.raises(AssertionError, match="stop strings need decode_text"):
        generate(loaded, requests_for([[2, 5]], greedy(3, stop=("x",))), FULL)


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("one two", [], "one two"),
        ("one two", ["three"], "one two"),
        ("one two", ["two", "ne"], "o"),
        ("one two", ["one"], ""),
        ("aXbXc", ["X"], "a"),
        ("grün", ["ü"], "gr"),
    ],
)
def test_cut_at_stop(text: str, stop: list[str], cut: str) -> None:
    assert cut_at_stop(text, stop) == cut


def test_a_row_takes_no_token_beyond_what_it_may_make() -> None:
    """Of a row whose prompt alone is scored, none."""
    for limit, ends, wanted in ((0, set(), "length"), (2, set(), "length"), (2, {6}, "stop"), (1, {6}, "length")):
        row = Row(Request("x", [2], Sampling(limit)))
        row.take([5, 6, 7], ends, None)
        assert (row.tokens, row.finish_reason) == ([5, 6, 7][:limit], wanted)
