"""Offsets of tokens in a text: those of its characters, at a cost that does not grow with what came before."""

import random
from collections.abc import Sequence
from pathlib import Path

from pipeline.openai_format.logprobs import TextOffsets
from skipdecode.checkpoint.detokenizer import TextDecoder
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.model.decoder import Decoder
from tests.support.tiny_models import VOCAB


def offsets(decode: TextDecoder, tokens: Sequence[int]) -> list[int]:
    found = TextOffsets(decode)
    return [found.next(token) for token in tokens]


def test_a_token_begins_behind_the_characters_before_it(loaded: Decoder, tiny_checkpoint: Path) -> None:
    decode, rng = Tokenizer(tiny_checkpoint, loaded.config).decode, random.Random(0)
    for _ in range(200):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        for number, offset in enumerate(offsets(decode, tokens)):
            before = decode(tokens[:number])
            assert before.rstrip("\ufffd") == before[:offset].rstrip("\ufffd"), (
                "what may be part of a character is open"
            )


def test_bytes_of_a_run_begin_where_their_characters_do() -> None:
    """A vocabulary with byte fallback, which drops the blank at the beginning of a text."""
    words = {300: "▁a", 301: "b"}

    def whole(tokens: Sequence[int]) -> str:
        raw = b"".join(bytes([t]) if t < 256 else words[t].replace("▁", " ").encode() for t in tokens)
        return raw.decode(errors="replace").removeprefix(" ")

    decode = TextDecoder(whole, lambda tokens: whole([301, *tokens])[1:], {byte: byte for byte in range(256)})
    tokens = [300, *"éü".encode(), 301, 300]
    assert offsets(decode, tokens) == [0, 1, 1, 2, 2, 3, 4]
    assert whole(tokens) == "aéüb a"


def test_bytes_that_are_no_character_cost_no_more_than_others() -> None:
    """They all may belong to one, as far as the decoder can tell."""
    num_decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")

    assert len(offsets(TextDecoder(decode), [0x80] * 2000)) == 2000
    assert num_decoded < 40 * 2000
