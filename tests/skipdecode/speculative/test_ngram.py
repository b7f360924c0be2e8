"""N-gram matches in a row and in other answers, against searches by hand."""

from hypothesis import given
from hypothesis import strategies as st

from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request, Row
from skipdecode.speculative.answer_index import ANSWERS, CONTEXT_TOKENS, MIN_COUNT, AnswerIndex
from skipdecode.speculative.draft import Source
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


RATES: dict[Source, float] = {2: 0.3, 3: 0.5, 4: 0.7, ANSWERS: 0.6}


def test_a_row_proposes_from_its_prompt_and_its_text() -> None:
    row, proposer = Row(Request("row", [5, 6, 7, 8], Sampling(9))), NgramProposer(AnswerIndex(8))
    row.take([5, 6], (), None)
    assert proposer.propose(row, {2: 3, 3: 1}, 9, RATES) == (2, [7, 8, 5])
    assert proposer.propose(row, {2: 3}, 2, RATES) == (2, [7, 8]), "no more than the row has room for"
    assert proposer.propose(row, {3: 3}, 9, RATES) == (0, []), "no match of that length"
    assert proposer.propose(row, {}, 9, RATES) == proposer.propose(row, {2: 3}, 0, RATES) == (0, [])
    row.take([7], (), None)
    assert proposer.propose(row, {2: 2, 3: 1}, 9, RATES) == (3, [8])


def test_a_row_proposes_from_other_answers_what_is_likelier_than_its_own_text() -> None:
    """Of rows that have left, and of rows that still write; the first tokens follow the prompt's last ones."""
    rows = [Row(Request(str(i), [9, 9, 1, 2], Sampling(9))) for i in range(3)]
    proposer, wanted = NgramProposer(AnswerIndex(1 << 10)), {2: 2, 4: 2, ANSWERS: 3}
    for row in rows[:2]:
        row.take([3, 1, 2, 4], (), None)
    assert proposer.propose(rows[2], wanted, 9, RATES) == (0, [])
    proposer.forget(rows[:1])
    assert proposer.propose(rows[2], wanted, 9, RATES) == (0, []), "one answer with it is too few"
    proposer.propose(rows[1], wanted, 9, RATES)
    assert proposer.propose(rows[2], wanted, 9, RATES) == (ANSWERS, [3, 1, 2])
    rows[2].take([3, 1, 2], (), None)
    assert proposer.propose(rows[2], wanted, 9, RATES) == (ANSWERS, [4])
    assert proposer.propose(rows[2], wanted, 9, RATES | {2: 0.7}) == (2, [3, 1])
    assert proposer.propose(rows[2], {2: 2}, 9, RATES) == (2, [3, 1])


@given(texts=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=6), slots=st.sampled_from([1, 4, 1 << 16]))
def test_the_answer_index_counts_votes(texts: list[list[int]], slots: int) -> None:
    """Against a dictionary where no slot is shared; with shared slots it proposes nothing that it did not see."""
    index, votes, seen = AnswerIndex(slots), dict[tuple[int, ...], tuple[int, int]](), set[tuple[int, ...]]()
    for text in texts:
        half = len(text) // 2
        index.add(text[:half], 0)
        index.add(text, half)
        for i in range(CONTEXT_TOKENS, len(text)):
            context = tuple(text[i - CONTEXT_TOKENS : i])
            seen.add((*context, text[i]))
            token, count = votes.get(context, (text[i], 0))
            if token == text[i]:
                votes[context] = token, count + 1
            else:
                votes[context] = (token, count - 1) if count > 1 else (text[i], 1)
    for text in texts:
        made = index.propose(text, 8)
        whole = [*text[-CONTEXT_TOKENS:], *made]
        assert all(tuple(whole[i : i + CONTEXT_TOKENS + 1]) in seen for i in range(len(made)))
        if slots > 4:
            by_hand = text[-CONTEXT_TOKENS:]
            while len(by_hand) < CONTEXT_TOKENS + 8:
                token, count = votes.get(tuple(by_hand[-CONTEXT_TOKENS:]), (0, 0))
                if count < MIN_COUNT:
                    break
                by_hand = [*by_hand, token]
            assert whole == by_hand
