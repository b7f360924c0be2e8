"""The `amx` back end on a CPU without AMX: all of its code, over tiles emulated in plain C++ (`amx_emulation.h`)."""

import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.backends import build, choice

ROOT = Path(__file__).parents[2]
FLAGS = choice.cpu_flags()
KERNEL_TESTS = [str(path) for path in sorted(Path(__file__).parent.glob("test_cpu_*.py")) if "choice" not in path.name]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not choice.NEEDS["avx512"] | {"avx512_bf16"} <= FLAGS, reason="needs AVX-512 with BF16")
@pytest.mark.skipif("amx_tile" in FLAGS, reason="this machine has AMX: its own tests run it")
@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_the_kernels_tests_pass_on_emulated_tiles() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.emulated_amx", "-k", "amx", *KERNEL_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
