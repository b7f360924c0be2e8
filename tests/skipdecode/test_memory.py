"""Memory in large pages: tensors of their own, on a line of the cache, given back with the last of them."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skipdecode.backends import memory
from skipdecode.backends.memory import LINE_BYTES, PAGE_BYTES, SLAB_BYTES, LargePages, large_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system's own list of memory is read")


def mapping_of(tensor: Tensor) -> dict[str, str]:
    """What the system says of the memory in which a tensor begins; empty where there is none."""
    at, found = tensor.data_ptr(), False
    facts = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            found = begin <= at < end
        elif found:
            name, value = line.split(":", 1)
            facts[name] = value.strip()
    return facts


def test_tensors_do_not_overlap() -> None:
    pages = LargePages()
    shapes = [(3,), (7, 5), (1, 32, 2, 512), (SLAB_BYTES // 4,), (2,), (0, 4)]
    tensors = [pages.empty(shape, dtype) for shape in shapes for dtype in (torch.bfloat16, torch.int8, torch.float32)]
    tensors += large_pages([*shapes, (PAGE_BYTES,)], torch.bfloat16)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
        assert tensor.numel() == 0 or tensor.data_ptr() % LINE_BYTES == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()  # what is saved of a part


@linux
def test_slabs_are_for_large_pages_and_given_back() -> None:
    pages = LargePages()
    first, second = pages.empty((SLAB_BYTES // 4,), torch.int8), pages.empty((SLAB_BYTES // 4,), torch.int8)
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in mapping_of(first)["VmFlags"].split()
    assert first.data_ptr() % PAGE_BYTES == 0
    kept = torch.empty(0, dtype=torch.int8).set_(second)
    other = pages.empty((SLAB_BYTES,), torch.int8)  # the slab is not the current one any more
    place = second.data_ptr()
    before = Path("/proc/self/maps").read_text().splitlines()
    del first, second
    gc.collect()
    assert kept.fill_(1).sum() == kept.numel()
    assert mapping_of(kept)
    del kept
    gc.collect()
    still = [line for line in Path("/proc/self/maps").read_text().splitlines() if spans(line, place)]
    assert not [line for line in still if line in before]  # another one may lie there by now
    assert len(other) == SLAB_BYTES


def spans(line: str, at: int) -> bool:
    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
    return begin <= at < end


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ADVICE", None)
    assert LargePages().empty((2, 3), torch.float32).shape == (2, 3)
