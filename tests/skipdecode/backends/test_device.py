"""Which kernels a CUDA device gets, and what people are told of it; no device is needed."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import skipdecode.model.sampler  # noqa: F401 - among the modules that ask for a back end
from skipdecode.backends import choice, device
from skipdecode.backends.choice import BackendError, choose
from skipdecode.backends.device import TorchOnCuda, choose_cuda, cuda_backend
from skipdecode.backends.kernel_self_test import self_test
from skipdecode.backends.torch_kernels import TorchKernels


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    for kept in (choose_cuda, cuda_backend):
        kept.cache_clear()
    yield
    for kept in (choose_cuda, cuda_backend):
        kept.cache_clear()


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says where there is one; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_torch_is_named() -> None:
    chosen = choose_cuda()
    assert chosen.name == "torch"
    assert "no CUDA device" in chosen.reason
    assert cuda_backend() is device.backend_on(torch.device("cuda"))
    assert isinstance(cuda_backend(), TorchOnCuda)


@pytest.mark.parametrize("word", ["torch", "off", "0", " Torch "])
def test_torch_by_force(h100: None, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(choice.VARIABLE, word)
    assert str(choose_cuda()) == "torch (NVIDIA H100, sm_90; forced by SKIPDECODE_KERNELS)"
    why = "the CUDA kernels are not used: NVIDIA H100, sm_90; forced by SKIPDECODE_KERNELS"
    assert cuda_backend().why_slow == why
    assert isinstance(cuda_backend(), TorchOnCuda)


def test_kernels_that_do_not_run_are_said_and_left(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here none can: no such device is there, whatever torch says."""
    chosen = choose_cuda()
    assert chosen.name == "torch"
    assert "first kernels failed" in chosen.reason or "cannot be imported" in chosen.reason
    choose_cuda.cache_clear()
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(BackendError, match=r"SKIPDECODE_KERNELS: triton cannot run here: .*; torch can"):
        choose_cuda()


class Refused(TorchKernels):
    """A compiler that does not take one kernel."""

    def gate(self, y: Tensor) -> Tensor:
        raise RuntimeError("PassManager::run failed\nat 12:3")


class Other(TorchKernels):
    """A kernel that chooses the second best."""

    def draw(self, logits: Tensor, *given: Tensor) -> Tensor:
        return super().draw(logits, *given) + 1


class Nothing(TorchKernels):
    def add_norm(self, h: Tensor, y: Tensor | None, *rest: Any, is_pre: bool) -> Tensor:
        return super().add_norm(h, y, *rest, is_pre=is_pre) * torch.nan


@pytest.mark.parametrize(
    ("kernels", "problem"),
    [
        (TorchKernels(), None),
        (Refused(), "the kernel of gates failed (RuntimeError: PassManager::run failed"),
        (Other(), "the kernel of draws is wrong"),
        (Nothing(), "the kernel of layer norms is wrong"),
    ],
)
def test_each_kernel_runs_before_it_is_chosen(kernels: TorchKernels, problem: str | None) -> None:
    assert self_test(kernels, torch.device("cpu")) == problem


def test_the_reference_of_the_kernels_asks_for_no_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the back end is still being chosen while the kernels are tested: to ask for it would begin the test anew,
    within itself."""

    def refuse(_device: torch.device) -> None:
        raise AssertionError("backend_on was called while the back end was being chosen")

    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("skipdecode.") and hasattr(module, "backend_on")
    ]
    assert device in users
    for module in users:
        monkeypatch.setattr(module, "backend_on", refuse)
    assert self_test(TorchKernels(), torch.device("cpu")) is None


def test_a_kernel_that_does_not_compile_is_named(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("skipdecode.backends.triton_kernels.TritonKernels", Refused)
    monkeypatch.setattr(device, "self_test", lambda kernels, _device: self_test(kernels, torch.device("cpu")))
    assert str(choose_cuda()) == (
        "torch (NVIDIA H100, sm_90; the kernel of gates failed (RuntimeError: PassManager::run failed)"
    )
    assert isinstance(cuda_backend(), TorchOnCuda)


def test_old_devices(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 7.5" in choose_cuda().reason


def test_names_of_cpu_back_ends_say_nothing_here(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_triton_problem", lambda: None)
    monkeypatch.setattr(device, "_triton_version", lambda: "3.7.1")
    monkeypatch.setenv(choice.VARIABLE, "avx2")
    chosen = device.choice_on(torch.device("cuda"))
    assert str(chosen) == "triton (NVIDIA H100, sm_90, Triton 3.7.1)"
    assert chosen.no_int8 is not None


def test_triton_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(BackendError, match="triton is for CUDA devices"):
        choose()


def test_cudnn_serves_no_attention() -> None:
    """In training; and so in decoding, which is part of it."""
    code = "import actors.training.trainer, torch; assert not torch.backends.cuda.cudnn_sdp_enabled()"
    subprocess.run([sys.executable, "-c", code], check=True)
