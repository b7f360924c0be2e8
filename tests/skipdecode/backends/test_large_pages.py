"""Memory in large pages: tensors of their own, on a line of the cache, given back with the last of them."""

import gc
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from skipdecode.backends import large_pages as memory
from skipdecode.backends.large_pages import LINE_BYTES, PAGE_BYTES, SLAB_BYTES, LargePages, large_pages
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.schedules.from_config import make_schedule

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


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is kept yet, nor afterwards."""
    monkeypatch.setattr(memory, "_SPARE", memory._Spare())
    yield
    gc.collect()


@linux
@pytest.mark.usefixtures("spare")
def test_the_next_cache_takes_over_the_memory_of_the_last() -> None:
    shapes = [(3, PAGE_BYTES), (5, PAGE_BYTES // 2)]
    places = []
    for size in (1, 1, 2, 1):
        assert bool(places) == (memory.reusable_bytes() > 0)
        tensors = large_pages(shapes * size, torch.int8)
        assert memory.reusable_bytes() == 0, "given up, or in use"
        part = tensors[-1][1:2]  # the rest of them may go
        places.append(tensors[0].data_ptr())
        del tensors
        gc.collect()
        assert memory.reusable_bytes() == 0
        assert part.fill_(1).sum() == part.numel()
        del part
    assert places[0] == places[1]
    assert places[2] == places[3], "smaller, but not by far"
    assert memory.reusable_bytes() >= 2 * sum(math.prod(shape) for shape in shapes)
    few = large_pages([(PAGE_BYTES,)], torch.int8)
    assert memory.reusable_bytes() == 0, "far more than was asked for is not held for it"
    del few


@linux
@pytest.mark.usefixtures("spare")
def test_two_batches_in_turns_take_over_their_own_memory() -> None:
    """A cache of prompts beside one of answers, or full depth beside a schedule; a third is not kept."""
    places: list[set[int]] = []
    for _ in range(3):
        tensors = [large_pages([(size, PAGE_BYTES)], torch.int8)[0] for size in (2, 40)]
        places.append({tensor.data_ptr() for tensor in tensors})
        del tensors
        gc.collect()
    assert places[1] == places[2]
    held = memory.reusable_bytes()
    assert held >= 42 * PAGE_BYTES
    tensors = [large_pages([(40, PAGE_BYTES)], torch.int8)[0] for _ in range(3)]
    del tensors
    gc.collect()
    assert memory.reusable_bytes() < 3 * 40 * PAGE_BYTES


@linux
@pytest.mark.usefixtures("spare")
def test_memory_that_is_in_use_is_lent_to_nobody_else() -> None:
    """Sizes, ends and threads at random: whoever holds memory finds in it what he wrote."""

    def work(seed: int) -> bool:
        random = Random(seed)
        held: list[tuple[Tensor, int]] = []
        for turn in range(60):
            number = (seed * 60 + turn) % 127
            held.append((large_pages([(random.randint(1, 4) * PAGE_BYTES,)], torch.int8)[0].fill_(number), number))
            while len(held) > random.randint(0, 2):
                tensor, number = held.pop(random.randrange(len(held)))
                if not bool((tensor == number).all()):
                    return False
                del tensor
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@linux
@pytest.mark.usefixtures("spare")
def test_what_memory_held_before_changes_no_token(checkpoint_factory: Callable[..., Path]) -> None:
    """Padding, layers that are skipped, dropped rows: none of them is read that was not written."""
    model = load_model(checkpoint_factory("125m", layers=6, eos_token_id=-1, max_position_embeddings=512))
    keys = {"method": "skipdecode", "warmup_layers": 1, "max_layers": 4, "min_layers": 2}
    schedule = make_schedule(keys, num_layers=6, max_new_tokens=150)
    requests = [
        Request(str(n), [4 + n] * (2 + 9 * n), Sampling(150 - 9 * n, temperature=1.0, seed=n)) for n in range(16)
    ]
    found = []
    for number in (0, -1):  # of all bits: NaN
        place = large_pages([(16 << 20,)], torch.int8)[0].fill_(number).data_ptr()
        result = generate(model, requests, schedule)
        found.append([completion.tokens for completion in result.completions])
        assert large_pages([(16 << 20,)], torch.int8)[0].data_ptr() == place, "the batch had other memory"
    assert found[0] == found[1]
