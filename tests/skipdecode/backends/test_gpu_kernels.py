"""Triton's kernels compiled and run on a GPU, held against torch's operators there.

The cases are those that are interpreted elsewhere (`tests/support/triton_interpreted.py`).
"""

import importlib.util

import pytest
import torch

from skipdecode.backends import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]
CASES: dict[str, object] = {}
if importlib.util.find_spec("triton") is not None:
    from tests.support import triton_interpreted

    CASES = triton_interpreted.CASES | triton_interpreted.SLOW


def test_the_kernels_are_chosen() -> None:
    """On any device that is new enough: else the tests below say nothing of what decodes."""
    assert device.choose_cuda().name == "triton", device.choose_cuda()


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("decoder", "lossless", "sharing"))])
def test_kernels_are_torch(name: str) -> None:
    """Whole decoders: `test_gpu.py`."""
    assert triton_interpreted.DEVICE == "cuda", "TRITON_INTERPRET is set"
    case = CASES[name]
    assert callable(case)
    with torch.inference_mode():
        case()
