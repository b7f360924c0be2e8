"""Repeats against a search by hand."""

from hypothesis import given
from hypothesis import strategies as st

from skipdecode.speculative.ngram import LONGEST, SHORTEST, Repeats


def by_hand(tokens: list[int], count: int, shortest: int) -> tuple[int, list[int]]:
    for length in range(LONGEST, shortest - 1, -1):
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for i in range(count):  # what is drafted is there to be repeated
                    text.append(text[at + length + i])
                return length, text[len(tokens) :]
    return 0, []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 257, 65536, 1 << 24]), max_size=40),
    more=st.lists(st.integers(0, 2), max_size=10),
    count=st.integers(1, 8),
    shortest=st.integers(SHORTEST, LONGEST),
)
def test_the_last_longest_repeat_is_found(tokens: list[int], more: list[int], count: int, shortest: int) -> None:
    index = Repeats(tokens)
    assert index.find(count, shortest) == by_hand(tokens, count, shortest)
    index.add(more)
    assert len(index) == len(tokens) + len(more)
    assert index.find(count, shortest) == by_hand(tokens + more, count, shortest)
    index.drop(len(more))
    assert index.find(count, shortest) == by_hand(tokens, count, shortest)


def test_a_loop_goes_round() -> None:
    assert Repeats([9, 1, 2, 1, 2, 1, 2]).find(5) == (4, [1, 2, 1, 2, 1])


def test_bytes_of_neighbours_are_no_token() -> None:
    """256 is 0, 1, 0, 0 and 1 is 1, 0, 0, 0: the bytes of 1, 0 stand in 256, 0 at no token's place."""
    assert Repeats([256, 0, 0, 7, 1, 0]).find(1, SHORTEST) == (0, [])
