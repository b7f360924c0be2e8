"""The ceilings that are measured are those of a real machine."""

import os
import subprocess
import sys

from actors.ceilings import measure_ceilings


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings("cpu", "float32")
    assert 1e8 < ceilings.flops_per_s < 1e15
    assert 1e8 < ceilings.bytes_per_s < 1e13
    assert 1e-8 < ceilings.call_s < 1e-2


def test_ceilings_of_bfloat16_on_a_cpu_that_does_not_multiply_it() -> None:
    """oneDNN refuses to lay such weights out there; a worker would end while it loads."""
    code = "from actors.ceilings import measure_ceilings; assert measure_ceilings('cpu', 'bfloat16').flops_per_s > 0"
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
