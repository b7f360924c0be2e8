"""N-gram matches against a search by hand."""

from hypothesis import given
from hypothesis import strategies as st

from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request, Row
from skipdecode.speculative.ngram import LONGEST, SHORTEST, NgramProposer, TokenIndex


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
def test_the_last_longest_match_is_found(tokens: list[int], more: list[int], count: int, shortest: int) -> None:
    index = TokenIndex(tokens)
    assert index.find(count, shortest) == by_hand(tokens, count, shortest)
    index.add(more)
    assert len(index) == len(tokens) + len(more)
    assert index.find(count, shortest) == by_hand(tokens + more, count, shortest)


def test_a_loop_goes_round() -> None:
    assert TokenIndex([9, 1, 2, 1, 2, 1, 2]).find(5) == (4, [1, 2, 1, 2, 1])


def test_bytes_of_neighbours_are_no_token() -> None:
    """256 is 0, 1, 0, 0 and 1 is 1, 0, 0, 0: the bytes of 1, 0 stand in 256, 0 between two tokens."""
    assert TokenIndex([256, 0, 0, 7, 1, 0]).find(1, SHORTEST) == (0, [])


def test_a_row_proposes_from_its_prompt_and_its_text() -> None:
    row, proposer = Row(Request("row", [5, 6, 7, 8], Sampling(9))), NgramProposer()
    row.take([5, 6], (), None)
    assert proposer.propose(row, {2: 3, 3: 1}, 9) == (2, [7, 8, 5])
    assert proposer.propose(row, {2: 3}, 2) == (2, [7, 8]), "no more than the row has room for"
    assert proposer.propose(row, {3: 3}, 9) == (0, []), "no match of that length"
    assert proposer.propose(row, {}, 9) == proposer.propose(row, {2: 3}, 0) == (0, [])
    row.take([7], (), None)
    assert proposer.propose(row, {2: 2, 3: 1}, 9) == (3, [8])
