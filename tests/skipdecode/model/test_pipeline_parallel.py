"""Layers on several devices: the tokens are those of one device, every plan is shared out evenly, and all work at once.

Here the devices are one CPU, several times over, or under several numbers. What crosses from one to the next is seen on
fake CUDA devices (`test_fake_cuda.py`); on real ones in `test_gpu.py`.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from actors.training.trainer import init_weights
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.prefill import allocate_cache
from skipdecode.families import config_of
from skipdecode.kv.static_cache import PaddedView
from skipdecode.model import layer_loop
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import devices_of
from skipdecode.model.pipeline_parallel import BLOCK, Placement, cut, deal, in_phases
from skipdecode.model.teacher_forcing import ForcedView, teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from tests.support.naive import greedy, random_prompts, requests_for, tokens_of
from tests.support.schedules import SCHEDULES

L = 6
CPU = torch.device("cpu")
FULL = FullDepth(L)
LENGTHS = [3, 9, 1, 5, 12, 7, 2, 8, 10]


@pytest.fixture(scope="module", params=["125m", "350m"])
def folder(request: pytest.FixtureRequest, ending_checkpoint: Callable[[str], Path]) -> Path:
    return ending_checkpoint(request.param)


def on(folder: Path, count: int, *, is_packed: bool = True) -> Decoder:
    model = load_model(folder, devices=[CPU] * count)
    return model.pack() if is_packed else model


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("sampling", [greedy(40), Sampling(40, temperature=0.8, top_p=0.9)], ids=["greedy", "drawn"])
@pytest.mark.grid
def test_tokens_are_those_of_one_device(
    folder: Path, ours: Callable[[Path], Decoder], count: int, is_packed: bool, schedule: Schedule, sampling: Sampling
) -> None:
    """Rows end at different steps, so that batches shrink on the way."""
    requests = requests_for(random_prompts(LENGTHS, seed=5), sampling)
    wanted = generate(ours(folder), requests, schedule)
    made = generate(on(folder, count, is_packed=is_packed), requests, schedule)
    assert tokens_of(made) == tokens_of(wanted)
    assert made.stats.batch_rows == wanted.stats.batch_rows
    assert [c.layers_run for c in made.completions] == [c.layers_run for c in wanted.completions]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_llama(tmp_path: Path, schedule: Schedule) -> None:
    """Its rotations are asked for on every device."""
    shape = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": L, "eos_token_id": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    one = Decoder(config_of({"model_type": "llama", **shape, **heads})).eval().requires_grad_(False)
    init_weights(one, seed=1)
    save_model(one, tmp_path)
    requests = requests_for(random_prompts(LENGTHS, seed=5), greedy(20))
    wanted = tokens_of(generate(one, requests, schedule))
    assert max(len(set(row)) for row in wanted) >= 5
    for count in (2, 3):
        assert tokens_of(generate(on(tmp_path, count), requests, schedule)) == wanted


def test_fewer_rows_than_devices(folder: Path, ours: Callable[[Path], Decoder]) -> None:
    requests = requests_for(random_prompts([4]), greedy(9))
    assert tokens_of(generate(on(folder, 3), requests, FULL)) == tokens_of(generate(ours(folder), requests, FULL))


@pytest.mark.parametrize("schedule", [FULL, SkipDecode(L, 5, 2, 1, 9)], ids=["full", "skipdecode"])
def test_scores_are_those_of_one_device(folder: Path, ours: Callable[[Path], Decoder], schedule: Schedule) -> None:
    prompts, answers = (random_prompts([5, 3, 8], seed) for seed in (1, 2))
    batch = teacher_batch(list(zip(prompts, answers, strict=True)), 1)
    with torch.inference_mode():
        wanted = teacher_forced_logits(ours(folder), batch, schedule)
        made = teacher_forced_logits(on(folder, 2), batch, schedule)
    torch.testing.assert_close(made, wanted, atol=1e-4, rtol=0)


def test_a_mask_is_copied_to_each_device_once() -> None:
    """It is as large as the square of a sequence, and layers in turns ask for a device many times."""
    here, there = torch.zeros(2, 5, dtype=torch.int64), torch.device("meta")
    view = ForcedView(here, torch.ones(2, 1, 5, 5, dtype=torch.bool), (None,) * L, range(L))
    first, back = view.on(there, None), view.on(there, None).on(CPU, None)
    again = back.on(there, None)
    assert first.mask is again.mask is not None
    assert first.positions is again.positions
    assert back.mask is view.mask
    assert again.mask.device == there  # type: ignore[union-attr]


@pytest.mark.parametrize("num_layers", [12, 24, 32, 48, 64, 80])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_plan_is_shared_out_evenly(num_layers: int, count: int) -> None:
    """Cut in the middle, one device would have nearly all of a plan that leaves low and middle layers out."""
    of_layer = deal(num_layers, [CPU] * count).of_layer
    schedule = SkipDecode(num_layers, num_layers, 2, 1, 100)
    for plan in {schedule.step(k) for k in range(100)}:
        work = [sum(of_layer[layer] == number for layer in plan.layers) for number in range(count)]
        assert max(work) - min(work) <= BLOCK + 1, plan
    upper = sum(layer >= num_layers // 2 for layer in schedule.step(50).layers)
    assert upper > 0.8 * schedule.step(50).num_layers_run  # what a cut in the middle would do


def test_a_group_of_layers_is_cut_where_the_device_changes() -> None:
    assert cut(((0, 1, 2), (4, 5)), (0, 0, 1, 1, 0, 0)) == ((0, 1), (2,), (4, 5))
    assert cut(((0, 1, 2, 3, 4, 5),), (0,) * 6) == ((0, 1, 2, 3, 4, 5),)


def test_weights_and_caches_are_where_their_layers_are() -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    place = deal(6, devices)
    assert place.of_layers == [devices[n] for n in (0, 0, 1, 1, 0, 0)]
    assert place.of_weight("blocks.3.fc1.weight") == devices[1]
    assert place.of_weight("blocks.4.fc1.weight") == place.of_weight("embed_tokens.weight") == devices[0]


def test_too_few_layers_or_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 layers cannot be on 3 devices.*actors\.num_gpus"):
        deal(2, [CPU] * 3)
    with pytest.raises(ValueError, match=r"\d+ GPUs are visible here, and actors\.num_gpus asks for 99"):
        devices_of(torch.device("cuda"), 99)
    assert devices_of(CPU, 2) == (CPU, CPU)


@dataclass
class Timeline:
    """What devices do when, in layers' time, by the order of launches: each has one stream, and a copy waits for what
    both streams have to do before (torch's `copy_device_to_device`)."""

    free: list[int]
    launched: list[str] = field(default_factory=list)

    def copy(self, source: int, target: int) -> None:
        self.free[source] = self.free[target] = max(self.free[source], self.free[target])
        self.launched.append(f"{source}->{target}")

    def work(self, device: int, layers: int) -> None:
        self.free[device] += layers
        self.launched.append(f"{layers} on {device}")


@pytest.mark.parametrize("num_layers", [8, 16])
@pytest.mark.parametrize("count", [2, 3])
def test_all_devices_work_at_the_same_time(
    checkpoint_factory: Callable[..., Path], num_layers: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one part is on a device, the next is on the one before: a step takes as long as a part alone, and a little
    longer."""
    devices = [torch.device("cpu", number) for number in range(count)]
    model = load_model(checkpoint_factory("125m", layers=num_layers), devices=devices)
    full, line, where = FullDepth(num_layers), Timeline([0] * count), dict[PaddedView, int]()
    plain, move = layer_loop._run, PaddedView.on

    def run(own: Decoder, groups: list[tuple[int, ...]], h: torch.Tensor, *args: object, **keys: object) -> object:
        line.work(own.device_of(groups[0][0]).index, sum(map(len, groups)))
        return plain(own, groups, h, *args, **keys)  # type: ignore[arg-type]

    def on_device(view: PaddedView, device: torch.device, table: torch.Tensor | None) -> PaddedView:
        line.copy(where.get(view, 0), device.index)
        made = move(view, device, table)
        where[made] = device.index
        return made

    rows = 2 * count
    with torch.inference_mode():
        cache = allocate_cache(model, torch.zeros(rows, dtype=torch.int64, device=devices[0]), 4, full, 3)
        positions = torch.arange(4, device=devices[0]).expand(rows, 4)
        model(torch.tensor(random_prompts([4] * rows), device=devices[0]), positions, cache, full.prefill())
        monkeypatch.setattr(layer_loop, "_run", run)
        monkeypatch.setattr(PaddedView, "on", on_device)
        newest = torch.zeros(rows, 1, dtype=torch.int64, device=devices[0])
        model(newest, torch.full_like(newest, 4), cache, full.step(0))
    assert max(line.free) <= num_layers + BLOCK * (count - 1), line.launched
    first = [f"{BLOCK} on 0", "0->1", f"{BLOCK} on 1", f"{BLOCK} on 0"]
    assert line.launched[:4] == first


def test_runs_of_any_length_end() -> None:
    seen = []

    def run(name: str, phases: int) -> Generator[None, None, str]:
        for phase in range(phases):
            seen.append(f"{name}{phase} copy")
            yield
            seen.append(f"{name}{phase} work")
            yield
        return name

    assert in_phases([run("a", 3), run("b", 1), run("c", 0)]) == ["a", "b", "c"]
    assert seen == [
        "a0 copy", "a0 work", "a1 copy", "b0 copy", "a1 work", "b0 work", "a2 copy", "a2 work",
    ]  # fmt: skip
    assert in_phases(list[Generator[None, None, str]]()) == []


def test_a_placement_is_a_value() -> None:
    assert deal(8, [CPU, CPU]) == Placement((CPU, CPU), (0, 0, 1, 1, 0, 0, 1, 1))
    assert deal(3, [CPU, CPU, CPU]).of_layer == (0, 1, 2)
