"""What the checks of `benchmarks.gpu_check` share: the device, the shape that is timed, and how a check ends."""

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings, measure_ceilings
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.plan import FullDepth, Schedule

Found = dict[str, object]


class Wrong(Exception):
    """What is wrong, as a sentence; then what was found."""


def not_run(why: str) -> Found:
    """For a check that this machine has no means for. It is said, and the next one runs."""
    return {"not_run": why}


@dataclass
class Bench:
    """The model is there once `check_captures` has made it."""

    device: torch.device
    config: DecoderConfig
    larger: DecoderConfig | None = None
    """Timed behind the other; None: no other."""
    rows: tuple[int, ...] = (64, 256)
    prompt_tokens: int = 128
    new_tokens: int = 128
    context: int = 1024
    """Columns that attention alone reads."""
    cache_bytes: int | None = None
    """For graphs; None: the share of the device that a worker takes."""
    seed: int = 0
    model: Decoder = field(init=False)
    graphs: CudaGraphs = field(init=False)

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(str(self.device), "bfloat16")

    def schedules(self) -> dict[str, Schedule]:
        fast = {"method": "skipdecode", "max_layers": -(-2 * self.layers // 3), "min_layers": -(-self.layers // 3)}
        made = make_schedule(fast, num_layers=self.layers, max_new_tokens=self.new_tokens)
        return {"full": FullDepth(self.layers), "skipdecode 2x": made}

    def requests(self, lengths: Sequence[int], num_new: int, vocab: int | None = None) -> list[Request]:
        rng = random.Random(self.seed + len(lengths))
        vocab = vocab or self.config.vocab_size
        sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
        return [Request(str(i), [rng.randrange(4, vocab) for _ in range(n)], sampling) for i, n in enumerate(lengths)]

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Gives the model, its caches and its graphs back, for whoever takes the device next."""
        for name in ("graphs", "model"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Check = Callable[[Bench], Found]
