"""A pytest plugin (`-p tests.support.other_maker`): the `avx512` back end as CPUs of the other maker have it.

AMD's multiply pairs of bfloat16, Intel's since Sapphire Rapids widen them, and each runs the other's way. Only the
flags that tell them apart are exchanged.
"""

from skipdecode.backends import choice

_own = choice.cpu_flags()
_widens = "avx512_fp16" in _own and "sse4a" not in _own
_flags = _own - {"avx512_fp16", "sse4a"} | {"sse4a" if _widens else "avx512_fp16"}
choice.cpu_flags = lambda: _flags  # type: ignore[assignment]
