"""A CUDA device that is not there: fake tensors, which have a device and a shape and no numbers (`FakeTensorMode`).

Whatever asks for a number on the host, or mixes devices, raises, as it would wait or fail on a real one. Kernels are
counted: torch's operators but for views and empty memory, and launches of ours, whose arguments must lie on the device.
Pinned memory holds zeros, which may be read once an event behind the copy into it was waited for.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from skipdecode.backends import device, triton_kernels
from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.config.model import KVCacheDtype, Quantization, SwiftKVConfig
from skipdecode.families import config_of, released
from skipdecode.model.decoder import Decoder
from skipdecode.model.pipeline_parallel import deal

CUDA = torch.device("cuda", 0)
A = torch.ops.aten
NO_KERNELS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh",
              "split", "chunk", "reshape", "split_with_sizes", "unbind", "contiguous"}  # fmt: skip
"""Beside views; the last one is no copy of what lies in order, and nothing else asks for it here."""


FROM_DEVICE = FakeTensor.tolist  # which raises

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
"""config.json of Qwen/Qwen3-1.7B."""


def indexed(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """x[index] by operators, for Python's own indexing asks for a CUDA build of torch first: the view that numbers,
    slices and new dimensions make of it, and the tensors that index its first dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    given = sum(part is not None and part is not Ellipsis for part in parts)
    dim, tensors = 0, {}
    for part in parts:
        if part is None:
            x, dim = A.unsqueeze.default(x, dim), dim + 1
        elif part is Ellipsis:
            dim += x.dim() - given
        elif isinstance(part, slice):
            x, dim = A.slice.Tensor(x, dim, part.start, part.stop, part.step or 1), dim + 1
        elif isinstance(part, int):
            x = A.select.int(x, dim, part)
        else:
            tensors[dim], dim = part, dim + 1
    return x, [tensors.get(at) for at in range(max(tensors, default=-1) + 1)]


def pinned(host: Tensor) -> Tensor:
    """Marks memory of the CPU; no build without CUDA pins any."""
    assert isinstance(host, FakeTensor), type(host)
    host.constant = None  # else a copy of a single number is tried on a real device
    host.is_fake_pinned = True  # type: ignore[attr-defined]
    return host


def is_pinned(x: Tensor) -> bool:
    return getattr(x, "is_fake_pinned", False)


class Host(TorchFunctionMode):
    """What of Python's operators wants a CUDA build, by way of plain ones; and pinned memory."""

    def __init__(self, fake: "FakeCuda") -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            view, tensors = indexed(*args)
            return A.index.Tensor(view, tensors) if tensors else view
        if func is torch.Tensor.__setitem__:
            view, tensors = indexed(args[0], args[1])
            if not isinstance(args[2], Tensor):
                A.fill_.Scalar(view, args[2])
            elif tensors:
                A.index_put_.default(view, tensors, args[2])
            else:
                A.copy_.default(view, args[2])
            return None
        if func is torch.Tensor.copy_:
            args[0].copied_at = self._fake.now
            A.copy_.default(*args, **(kwargs or {}))
            return args[0]
        if func in (torch.tensor, torch.empty) and (kwargs or {}).pop("pin_memory", False):
            if isinstance(args[0], np.ndarray):  # as torch says itself
                raise RuntimeError("Can't pin tensor constructed from numpy")
            return pinned(func(*args, **(kwargs or {})))
        if func is torch.Tensor.data_ptr:  # no address; equal where addresses would be
            return args[0].untyped_storage()._cdata, args[0].storage_offset()
        if func is F.rms_norm:  # its decomposition asks for a CUDA build; something of the same shape and type
            return A.mul.Tensor(args[0], (kwargs or {})["weight"])
        if func is torch.Tensor.contiguous:
            return (
                args[0] if args[0].is_contiguous() else A.clone.default(args[0], memory_format=torch.contiguous_format)
            )
        if func is torch.Tensor.__invert__:
            return A.bitwise_not.default(args[0])
        return func(*args, **(kwargs or {}))


class Counted(TorchDispatchMode):
    """Kernels by name since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        if not func.is_view and name not in NO_KERNELS:
            self.kernels[name] += 1
        return made

    @property
    def total(self) -> int:
        return sum(self.kernels.values())


class NoWaits(TorchDispatchMode):
    """AssertionError where a copy between host and device waits for all that the device was given before it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func.overloadpacket.__name__ in ("to", "_to_copy", "copy_"):
            source, to = args[0], given.get("device", args[0].device)
            if func.overloadpacket.__name__ == "copy_":
                source, to = args[1], args[0].device
            is_free = given.get("non_blocking", args[2] if len(args) > 2 else False) and (
                is_pinned(source) or is_pinned(args[0])
            )
            assert to == source.device or is_free, f"{func}: waits on the way from {source.device} to {to}"
        return func(*args, **given)


def kind_of(value: object, parameter: Any) -> object:
    """What Triton compiles an argument's kernel for."""
    if isinstance(value, Tensor):
        is_round = value.storage_offset() * value.element_size() % 16 == 0
        return value.dtype, is_round or parameter.do_not_specialize_on_alignment
    if not isinstance(value, int) or isinstance(value, bool):
        return type(value)
    size = "i32" if -(2**31) <= value < 2**31 else "i64"
    return size if parameter.do_not_specialize else (size, value == 1, value % 16 == 0)


class FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, fake: "FakeCuda") -> None:
        self._fake = fake

    def record(self, stream: str) -> None:
        assert stream == f"stream of {CUDA}", "of another device: done before the copy has begun"
        self._at, self._launched = self._fake.now, self._fake.launched.total()
        self._fake.now += 1

    def synchronize(self) -> None:
        self._fake.done = max(self._fake.done, self._at)
        self._fake.left.append(self._fake.launched.total() - self._launched)


class FakeCuda:
    """The device, while `fake_cuda` lasts."""

    def __init__(self) -> None:
        self.counted = Counted()
        self.launched: Counter[str] = Counter()
        self.devices: list[torch.device] = []
        """Of each launch."""
        self.compiled: set[tuple[Any, ...]] = set()
        """What Triton would have compiled for the launches: of each kernel, once for each of these."""
        self.now, self.done = 0, -1
        """Events so far, and the last one that was waited for."""
        self.left: list[int] = []
        """At each wait for an event: launches of ours that came after it, and keep the device busy meanwhile."""

    def listed(self, x: FakeTensor) -> Any:
        """In place of `tolist`."""
        if not is_pinned(x):
            return FROM_DEVICE(x)
        assert x.copied_at <= self.done, "read before it was there"  # type: ignore[attr-defined]
        return np.zeros(x.shape, int).tolist()

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """In place of `triton_kernels.launch`."""
        assert all(0 < size < 2**31 for size in grid), grid
        assert all(size < 2**16 for size in grid[1:]), grid
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for argument in tensors:
            assert isinstance(argument, FakeTensor), "a tensor of the CPU"
            assert argument.device.type == "cuda", f"{kernel.__name__}: an argument lies on {argument.device}"
            assert argument.device == tensors[0].device, f"{kernel.__name__}: {argument.device}, {tensors[0].device}"
        self.devices.append(tensors[0].device)
        self.launched[kernel.__name__] += 1
        kinds = [kind_of(value, by) for value, by in zip(arguments, kernel.params, strict=False)]
        self.compiled.add((kernel.__name__, *kinds, *sorted(options.items())))

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Kernels of the block by name; filled at its end."""
        found: Counter[str] = Counter()
        before, self.launched = self.launched, Counter()
        with Counted() as counted:
            yield found
        found += counted.kernels + self.launched
        self.launched = before + self.launched


@contextmanager
def fake_cuda(backend: Backend | None = None) -> Iterator[FakeCuda]:
    """`backend`: None: Triton's kernels, launched nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeCuda()
        chosen = CudaBackend(triton_kernels.TritonKernels()) if backend is None else backend
        patch.setattr(triton_kernels, "launch", fake.launch)
        patch.setattr(device, "cuda_backend", lambda: chosen)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "Event", lambda: FakeEvent(fake))
        patch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        patch.setattr(FakeTensor, "tolist", lambda x: fake.listed(x))
        with FakeTensorMode(), Host(fake), torch.inference_mode():
            yield fake


def fake_model(
    name: str, *, layers: int | None = None, swiftkv: SwiftKVConfig | None = None, num_devices: int = 1,
    quantization: Quantization | None = None, kv_cache_dtype: KVCacheDtype = "auto",
) -> Decoder:  # fmt: skip
    """A released shape on the device, in bfloat16, ready to decode; `layers`: at most so many of its layers."""
    dtype = torch.bfloat16
    with torch.device("meta"):
        config = config_of(QWEN3) if name == "qwen3-1.7b" else released(name)
        depth = min(config.num_hidden_layers, layers or config.num_hidden_layers)
        model = Decoder(replace(config, swiftkv=swiftkv, num_hidden_layers=depth))
    if num_devices > 1:
        model.placement = deal(depth, [torch.device("cuda", number) for number in range(num_devices)])
    for prefix, module in model.named_modules():
        for key, weight in list(module._parameters.items()):
            if weight is not None:
                where = CUDA if model.placement is None else model.placement.of_weight(f"{prefix}.{key}")
                own = torch.empty(weight.shape, dtype=dtype, device=where)
                module._parameters[key] = nn.Parameter(own, requires_grad=False)
    return model.eval().pack(quantization, kv_cache_dtype)


__all__ = ["CUDA", "TORCH", "FakeCuda", "NoWaits", "fake_cuda", "fake_model"]
