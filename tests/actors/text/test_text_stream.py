"""Text as it comes, joined, is the text at once; no half characters, no stop string. Against the real tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.text.text_stream import TextStream
from skipdecode.checkpoint.detokenizer import IncrementalDetokenizer, StopStringSearch, cut_at_stop
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.model.decoder import Decoder
from tests.support.examples import examples
from tests.support.tiny_models import VOCAB


def streamed(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


@settings(max_examples=examples(300))
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    stop=st.lists(st.text(st.sampled_from("aeno é🙂"), min_size=1, max_size=4), max_size=3),
)
def test_joined_it_is_the_text(loaded: Decoder, tiny_checkpoint: Path, tokens: list[int], stop: list[str]) -> None:
    """Arbitrary tokens: bytes that are no character at all among them."""
    decode = Tokenizer(tiny_checkpoint, loaded.config).decode
    parts = streamed(TextStream(decode, stop), tokens)
    assert "".join(parts) == cut_at_stop(decode(tokens), stop)


@settings(max_examples=examples(100))
@given(text=st.text(st.sampled_from("ab é🙂東\n"), max_size=20), stop=st.text(st.sampled_from("ab🙂"), min_size=1))
def test_no_half_characters_and_no_stop_strings(loaded: Decoder, tiny_checkpoint: Path, text: str, stop: str) -> None:
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    tokens = tokenizer.encode([text])[0]
    parts = streamed(TextStream(tokenizer.decode, [stop]), tokens)
    assert "".join(parts) == cut_at_stop(text, [stop])
    assert "\ufffd" not in "".join(parts)


def test_text_comes_at_once_where_it_can(loaded: Decoder, tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    tokens = tokenizer.encode(["The pub 🙂!"])[0]
    parts = streamed(TextStream(tokenizer.decode, ["!!"]), tokens)
    assert len([part for part in parts if part]) >= 5
    assert parts[-1] == "!", "the beginning of a stop string was given out"
    assert "🙂" in parts


@settings(max_examples=examples(200))
@given(data=st.data())
def test_bytes_that_are_no_characters_cost_no_more_the_longer_they_go_on(
    loaded: Decoder, tiny_checkpoint: Path, data: st.DataObject
) -> None:
    """Lone parts of characters, special tokens and now and then a whole character, dozens of tokens long."""
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    broken = [token for token in range(VOCAB) if tokenizer.decode([token]).endswith("\ufffd")]
    whole = tokenizer.encode(["🙂\ufffdé"])[0][1:]
    pieces = st.one_of(st.sampled_from(broken).map(lambda t: [t]), st.just([1, 1, 1]), st.just(whole))
    tokens = [token for piece in data.draw(st.lists(pieces, max_size=40)) for token in piece]
    num_decoded = 0

    def decode(part: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(part)
        return tokenizer.decode(part)

    text = IncrementalDetokenizer(decode)
    assert "".join(text.push(token) for token in tokens) + text.rest == tokenizer.decode(tokens)
    assert num_decoded <= 15 * len(tokens)


def test_a_long_stop_string_costs_no_more_per_token() -> None:
    num_decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return "x" * len(tokens)

    scan = StopStringSearch(["x" * 1500, "y" * 5000], decode)
    assert [scan.push(7) for _ in range(1500)] == [False] * 1499 + [True]
    assert num_decoded == 1500
