"""Sampling parameters that change logits, or end rows, drawn for property tests."""

from typing import Any

from hypothesis import strategies as st

from skipdecode.config.sampling import RepetitionDetection


def processing(max_new_tokens: int, vocab: int) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the keys, most often none; strong enough to change most rows."""
    token = st.integers(0, vocab - 1)
    keys: dict[str, st.SearchStrategy[Any]] = {
        "min_p": st.sampled_from([0.05, 0.4]),
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.lists(st.tuples(token, st.sampled_from([-100.0, 3.0])), max_size=3, unique_by=lambda p: p[0])
        .map(sorted)
        .map(tuple),
        "min_new_tokens": st.integers(0, max_new_tokens),
        "stop_token_ids": st.lists(token, max_size=4).map(tuple),
        "repetition_detection": st.sampled_from([RepetitionDetection(4, 1, 2), RepetitionDetection(3, 2, 3)]),
    }
    return st.one_of(st.just({}), st.fixed_dictionaries({}, optional=keys))
