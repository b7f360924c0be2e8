"""Reasoning apart from answers, in pieces of any size. The reference is what Qwen3's model card does with a whole text:
it cuts at `</think>` and strips line breaks off both parts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.text.reasoning import Parts, ReasoningStream, is_unfinished, opens_block, split_answer
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.model.decoder import Decoder
from tests.support.examples import examples

CASES = [
    ("<think>\nWell.\nYes.\n</think>\n\nParis.\n", False, "Well.\nYes.", "Paris.\n"),
    ("\n <think>a</think>b", False, "a", "b"),
    ("<think>\n\n</think>\n\nParis", False, "", "Paris"),
    ("<think>\nWell, </think", False, "Well, </think", ""),
    ("<think>", False, "", ""),
    ("Paris. <think>a</think>", False, None, "Paris. <think>a</think>"),
    (" <thin", False, None, " <thin"),
    ("", False, None, ""),
    ("Well.\n</think>\n\nParis", True, "Well.", "Paris"),
    ("\nWell.\n", True, "Well.", ""),
    ("<think>\nagain</think>a</think>b", True, "again", "a</think>b"),
    ("</think>b", True, "", "b"),
    ("", True, "", ""),
]


def split(pieces: Sequence[str], is_open: bool) -> tuple[str | None, str]:
    stream = ReasoningStream(is_open=is_open)
    parts = [stream.push(piece) for piece in pieces] + [stream.finish()]
    reasoning = "".join(part.reasoning for part in parts)
    return reasoning if stream.has_block else None, "".join(part.content for part in parts)


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES)
def test_whole_or_by_characters_the_parts_are_the_same(
    text: str, is_open: bool, reasoning: str | None, content: str
) -> None:
    assert split([text], is_open) == split(list(text), is_open) == (reasoning, content)


def by_the_card(text: str, is_open: bool) -> tuple[str | None, str]:
    start = text.lstrip()
    if start.startswith("<think>"):
        start = start.removeprefix("<think>")
    elif not is_open:
        return None, text
    else:
        start = text
    reasoning, _, content = start.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n")


@settings(max_examples=examples(500))
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "\n", "\n\n", " ", "a", "b.", "é"])),
    is_open=st.booleans(),
)
def test_any_pieces(pieces: list[str], is_open: bool) -> None:
    text = "".join(pieces)
    assert split(pieces, is_open) == split([text], is_open) == by_the_card(text, is_open)
    reasoning, content = by_the_card(text, is_open)
    assert is_unfinished(text, is_open=is_open) <= (reasoning is not None and not content)


def test_what_is_certain_comes_at_once() -> None:
    stream = ReasoningStream(is_open=False)
    assert stream.push("<think>\nWell") == Parts("Well", "")
    assert stream.push(" then\n") == Parts(" then", "")
    assert stream.push("so</") == Parts("\nso", "")
    assert stream.push("think>\n") == Parts("", "")
    assert stream.push("Paris</") == Parts("", "Paris</")


def test_tokens_are_counted_up_to_the_end_of_the_block(loaded: Decoder, tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)

    def tokens(text: str) -> list[int]:
        return tokenizer.encode_rendered([text])[0]

    block, answer = tokens("<think>\nA pub 🙂!\n</think>"), tokens("\n\nIt is a pub.")
    whole = split_answer([*block, *answer, 2], Sampling(), tokenizer.decode, is_open=False)
    assert whole == ("A pub 🙂!", "It is a pub.", len(block))
    cut = split_answer(block[:-1], Sampling(), tokenizer.decode, is_open=False)
    assert (cut.content, cut.num_reasoning_tokens) == ("", len(block) - 1)
    none = split_answer([*answer, 2], Sampling(), tokenizer.decode, is_open=False)
    assert none == (None, "\n\nIt is a pub.", 0)
    stopped = split_answer([*block, *answer], Sampling(stop=(" pub",)), tokenizer.decode, is_open=False)
    assert (stopped.reasoning, stopped.content) == ("A", "")


def test_prompts_that_begin_the_block(loaded: Decoder, tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    for prompt, is_open in (
        ("Hello<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think> a", False),
    ):
        assert opens_block(tokenizer.encode([prompt])[0], tokenizer.decode) is is_open
