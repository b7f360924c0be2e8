"""A pytest plugin (`-p tests.support.other_maker`): the `avx512` back end as CPUs of the other maker have it.

AMD's multiply pairs of bfloat16, Intel's widen them, and both run either. The flag that tells them apart is turned
round.
"""

from skipdecode.backends import choice

_flags = choice.cpu_flags() ^ {"sse4a"}
choice.cpu_flags = lambda: _flags  # type: ignore[assignment]
