"""The kernels' tests as on other CPUs: `amx` over tiles emulated in C++, and `avx512` as the other maker has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.backends import build, choice

ROOT = Path(__file__).parents[3]
FLAGS = choice.cpu_flags()
IS_SKIPPED = ("choice", "others")
KERNEL_TESTS = [
    str(path) for path in sorted(Path(__file__).parent.glob("test_cpu_*.py")) if not path.stem.endswith(IS_SKIPPED)
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not choice.NEEDS["avx512"] | {"avx512_bf16"} <= FLAGS, reason="needs AVX-512 with BF16"),
    pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler"),
]


@pytest.mark.skipif("amx_tile" in FLAGS, reason="this machine has AMX: its own tests run it")
def test_the_kernels_tests_pass_on_emulated_tiles() -> None:
    pass_with("tests.support.emulated_amx", "amx")


def test_the_kernels_tests_pass_as_the_other_maker_has_them() -> None:
    pass_with("tests.support.other_maker", "avx512")


def pass_with(plugin: str, back_end: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-k", back_end, *KERNEL_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
