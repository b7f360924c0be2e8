"""Triton's kernels without a GPU: by its interpreter they compute what torch's operators do, and they compile well.

Each in a process of its own: which of the two Triton does is settled at its import. What each case is stands in
`tests/support/triton_interpreted.py` and `triton_compiled.py`.

Interpreted, float32 agrees within 8 times its rounding, and tokens are equal. Compiled for H100 (A100, L4 and B200 are
`slow`): no register is spilled, and keys, values and states come 16 bytes at a time.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux alone has it)"
    ),
]
MAX_REGISTERS = 65536 // 4
"""Of a program of attention: then four or more share a multiprocessor of any of the three."""


def said_by(module: str, folder: Path, *words: str, interpreted: bool) -> dict[str, Any]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-m", f"tests.support.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def interpreted(folder: Path, *words: str) -> None:
    found = said_by("triton_interpreted", folder, *words, interpreted=True)
    assert len(found) >= 9
    wrong = {name: problem for name, problem in found.items() if problem}
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def test_interpreted_kernels_are_torch(tmp_path: Path) -> None:
    interpreted(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on an idle machine
def test_interpreted_kernels_are_torch_in_more_cases(tmp_path: Path) -> None:
    interpreted(tmp_path, "slow")


def check_compiled(found: dict[str, Any]) -> None:
    for name, made in found.items():
        # for sm_89 (L4) the assembler gives one kernel 72 registers and 8 bytes of stack, for a seventh program at once
        most = 16 if name.endswith("sm_89") else 0
        assert made["stack_bytes"] <= most, f"{name}: registers are spilled: {made}"
        if name.removeprefix("FP8, ").startswith("store"):
            continue  # a key of a head for a warp: nothing is read twice
        wide = made["loads"].get("16", 0)
        assert wide >= max(1, made["tile_loads"]), f"{name}: loads of less than 16 bytes: {made}"
        if name.removeprefix("FP8, ").startswith("attention"):
            assert made["registers"] * 32 * made["warps"] <= MAX_REGISTERS, f"{name}: {made}"
            assert made["tile_loads"] >= 2
            assert made["shared_bytes"] <= 96 << 10, f"{name}: {made}"


@pytest.mark.slow
def test_compiled_kernels_spill_nothing_and_load_in_vectors(tmp_path: Path) -> None:
    found = said_by("triton_compiled", tmp_path, "90", interpreted=False)
    assert len(found) == 35
    check_compiled(found)


@pytest.mark.slow
def test_more_kernels_compile_as_well(tmp_path: Path) -> None:
    check_compiled(said_by("triton_compiled", tmp_path, "80", "89", "90", "100", "slow", interpreted=False))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_attention_of_every_released_shape_compiles_in_every_type(tmp_path: Path) -> None:
    """Where 16 bits are a number it spills next to nothing; in float32 it spills more, and is slower."""
    found = said_by("triton_compiled", tmp_path, "80", "89", "90", "100", "released", interpreted=False)
    assert len(found) > 1000
    spilled = {name: made["stack_bytes"] for name, made in found.items() if "float32" not in name}
    assert max(spilled.values()) <= 128, {name: size for name, size in spilled.items() if size > 128}
