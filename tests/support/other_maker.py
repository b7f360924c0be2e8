"""A pytest plugin (`-p tests.support.other_maker`): the `avx512` back end as CPUs of the other maker have it.

AMD's multiply pairs of bfloat16, Intel's since Sapphire Rapids widen them, and both run either. The flags that tell
them apart are turned round.
"""

from skipdecode.backends import choice

_flags = choice.cpu_flags() ^ {"sse4a", "avx512_fp16"}
choice.cpu_flags = lambda: _flags  # type: ignore[assignment]
