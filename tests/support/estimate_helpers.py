"""Requests of which the tests of the estimate know the lengths."""

from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

FIXED = Sampling(max_new_tokens=20, ignore_eos=True)


def requests(count: int, sampling: Sampling = FIXED) -> list[Request]:
    return [Request(f"r{i}", [5 + i % 7] * (4 + i % 30), sampling) for i in range(count)]
