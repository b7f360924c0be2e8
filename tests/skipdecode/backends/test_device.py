"""Which kernels a CUDA device gets, and what people are told of it; no device is needed."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import skipdecode.model.sampler  # noqa: F401 - among the modules that ask for a back end
from skipdecode.backends import choice, device
from skipdecode.backends.choice import BackendError, choose
from skipdecode.backends.cuda_kernels import Heads
from skipdecode.backends.device import TorchOnCuda, check_kernels, choose_cuda, cuda_backend
from skipdecode.backends.kernel_self_test import KernelShape, self_test
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.config.model import FeedForwardKind
from skipdecode.families import released
from tests.support.cuda_models import cpu_computed_by, random_model


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    for kept in (choose_cuda, cuda_backend):
        kept.cache_clear()
    yield
    for kept in (choose_cuda, cuda_backend):
        kept.cache_clear()
    device._unfit.clear()
    device._unfit_prompts.clear()
    device._unfit_prefixes.clear()


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

    def gate(self, y: Tensor, mlp: FeedForwardKind = "swiglu") -> Tensor:
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


SHAPES = ("opt-125m", "opt-2.7b", "smollm2-135m", "llama-3.1-8b", "gemma-3-1b")


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_are_tested_at_the_shapes_of_a_model(name: str) -> None:
    """One for each kind of layer, with its heads, norms, rotation and window."""
    config = released(name)
    shapes = KernelShape.of_model(config, torch.float32)
    assert {(one.heads, one.kv_heads, one.head_dim) for one in shapes} == {
        (config.num_attention_heads, config.num_kv_heads, config.head_dim)
    }
    assert [bool(one.window) for one in shapes] == ([True, False] if name.startswith("gemma") else [False])
    assert {one.rotary_dim for one in shapes} == {0 if name.startswith("opt") else config.head_dim}
    for shape in shapes:
        small = replace(shape, vocab_size=3000, ffn_dim=64)
        assert self_test(TorchKernels(), torch.device("cpu"), small) is None
        assert self_test(TorchKernels(), torch.device("cpu"), small, of="prompts") is None
        assert self_test(TorchKernels(), torch.device("cpu"), small, of="prefixes") is None


class NoWideHeads(TorchKernels):
    """A compiler that does not take heads of 128."""

    def attend(self, heads: Heads, *rest: Any) -> Tensor:
        if heads.head_dim == 128:
            raise RuntimeError("out of resource: shared memory")
        return super().attend(heads, *rest)


class WrongAlone(TorchKernels):
    """A kernel that is wrong where each query head has keys of its own."""

    def attend(self, heads: Heads, *rest: Any) -> Tensor:
        return super().attend(heads, *rest) * (2 if heads.heads == heads.kv_heads else 1)


def use_kernels(monkeypatch: pytest.MonkeyPatch, kernels: type[TorchKernels]) -> None:
    """In place of Triton's; tests of them run on the CPU."""
    monkeypatch.setattr("skipdecode.backends.triton_kernels.TritonKernels", kernels)
    on_cpu = partial(_tested_on_cpu, self_test)
    monkeypatch.setattr(device, "self_test", on_cpu)


def _tested_on_cpu(
    test: Any, kernels: TorchKernels, _device: torch.device, *shape: KernelShape, **how: bool
) -> str | None:
    found: str | None = test(kernels, torch.device("cpu"), *(replace(one, vocab_size=3000) for one in shape), **how)
    return found


class NoPrefixes(TorchKernels):
    """Kernels that do not see what lies before a row's own columns."""

    def attend(self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: Any) -> Tensor:
        return super().attend(heads, q, k, v, columns._replace(shared=None))


def test_prefixes_that_are_read_wrongly_are_copied(
    h100: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All other kernels stay in use."""
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "_triton_version", lambda: "3.7.1")
    monkeypatch.setattr(device, "missing", lambda: None)
    for kernels, reads in ((TorchKernels, True), (NoPrefixes, False)):
        use_kernels(monkeypatch, kernels)
        for kept in (choose_cuda, cuda_backend):
            kept.cache_clear()
        check_kernels(released("llama-3.1-8b"), torch.bfloat16, torch.device("cuda"))
        backend, model = cuda_backend(), random_model("llama", dtype=torch.bfloat16)
        with cpu_computed_by(backend):
            layers = [layer.kernel for layer in model.pack().layers]
        assert backend.why_padded(layers, torch.bfloat16, torch.device("cuda")) is None
        assert backend.supports_shared_prefix(layers) == reads
    assert "rows get copies of the prefixes that they share: the kernel of shared prefixes is wrong" in caplog.text


class NoPackedPrompts(TorchKernels):
    """A torch whose flash attention has nothing for this device."""

    def attend_packed(self, q: Tensor, *rest: Any) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


def test_flash_attention_that_fails_leaves_the_kernels(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are then fed with padding, and the reason is said; only where its types are fed at all."""
    pytest.importorskip("triton")
    use_kernels(monkeypatch, NoPackedPrompts)
    monkeypatch.setattr(device, "_triton_version", lambda: "3.7.1")
    monkeypatch.setattr(device, "missing", lambda: None)
    cuda, config = torch.device("cuda"), released("opt-125m")
    check_kernels(config, torch.float32, cuda)
    assert cuda_backend().why_padded([], torch.bfloat16, cuda) is None
    check_kernels(config, torch.bfloat16, cuda)
    assert choose_cuda().name == "triton"
    assert cuda_backend().why_padded([], torch.bfloat16, cuda) == (
        "the kernel of prompts failed (RuntimeError: FlashAttention only supports Ampere GPUs or newer), "
        "with 12 heads of 64, 12 for keys and values, bfloat16"
    )
    assert not cuda_backend().supports_packed_prompts([], torch.empty(1, dtype=torch.bfloat16))


def test_a_torch_without_flash_attention_is_named(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    use_kernels(monkeypatch, NoPackedPrompts)
    monkeypatch.setattr(device, "_triton_version", lambda: "3.7.1")
    monkeypatch.setattr(device, "missing", lambda: "torch 2.6.0 was built without flash attention")
    check_kernels(released("opt-125m"), torch.bfloat16, torch.device("cuda"))
    why = cuda_backend().why_padded([], torch.bfloat16, torch.device("cuda"))
    assert why == "torch 2.6.0 was built without flash attention"


@pytest.mark.parametrize(
    ("kernels", "name", "problem"),
    [
        (NoWideHeads, "opt-125m", None),
        (NoWideHeads, "llama-3.1-8b", "the kernel of attention failed (RuntimeError: out of resource: shared memory), "
         "with 32 heads of 128, 8 for keys and values, bfloat16"),
        (WrongAlone, "llama-3.2-1b", None),
        (WrongAlone, "opt-125m", "the kernel of attention is wrong, with 12 heads of 64, 12 for keys and values, "
         "bfloat16"),
    ],
)  # fmt: skip
def test_a_kernel_that_fails_at_a_models_shape_is_left(
    h100: None, monkeypatch: pytest.MonkeyPatch, kernels: type[TorchKernels], name: str, problem: str | None
) -> None:
    """Before the model uses it: torch's operators serve such a model, and the reason is said."""
    pytest.importorskip("triton")
    use_kernels(monkeypatch, kernels)
    monkeypatch.setattr(device, "_triton_version", lambda: "3.7.1")
    assert choose_cuda().name == "triton"
    check_kernels(released(name), torch.bfloat16, torch.device("cuda"))
    assert choose_cuda().name == ("triton" if problem is None else "torch")
    assert isinstance(cuda_backend(), TorchOnCuda) == (problem is not None)
    if problem is not None:
        assert choose_cuda().reason == f"NVIDIA H100, sm_90; {problem}"
        monkeypatch.setenv(choice.VARIABLE, "triton")
        choose_cuda.cache_clear()
        with pytest.raises(BackendError, match="triton cannot run here: the kernel of attention"):
            choose_cuda()


def test_a_device_without_memory_for_the_test_is_not_given_up(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold it, a process that is ending for instance: the worker is started again, and is not slow for good."""
    pytest.importorskip("triton")

    class Full(TorchKernels):
        def add_norm(self, *_: Any, **__: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    use_kernels(monkeypatch, Full)
    with pytest.raises(torch.OutOfMemoryError):
        choose_cuda()


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
