"""What the checks of `benchmarks.gpu_check` share: the device, the model that is timed, and the results of a check."""

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from actors.ceilings import measure_ceilings
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule

Found = dict[str, object]


class CheckFailed(Exception):
    """A failed check. Its arguments are a sentence that says what is wrong, and optionally what was found."""


class LimitReached(BaseException):
    """A check has taken too long. No `Exception`, since a `Generator` would take that for a batch that fails."""


def not_run(why: str) -> Found:
    """The result of a check that this machine cannot run, and why."""
    return {"not_run": why}


@dataclass
class CheckContext:
    """The device and the models to check. The model exists once `check_captures` has built it."""

    device: torch.device
    config: DecoderConfig
    larger: DecoderConfig | None = None
    """A larger model that is timed afterwards; None: no other."""
    rows: tuple[int, ...] = (64, 256)
    prompt_tokens: int = 128
    new_tokens: int = 128
    context_tokens: int = 1024
    """Columns of the cache in the checks of attention."""
    cache_bytes: int | None = None
    """Memory for graphs; None: the share of the device that a worker takes."""
    seed: int = 0
    is_dry: bool = False
    """The checks are tried on a machine without a GPU."""
    grouped: DecoderConfig | None = None
    """A model whose query heads share keys and values, for the checks of those; None: no such check."""
    checkpoint: str | None = None
    """A model with real weights, whose tokens are compared with those of transformers; None: the demo model."""
    corpus_prompts: tuple[int, int] = (128, 1024)
    """The shortest and the longest prompt of the corpus, in tokens."""
    corpus_answers: tuple[int, int] = (128, 512)
    """The shortest and the longest answer of the corpus, in tokens, its EOS included."""
    note: Callable[[Found], None] = lambda _: None
    """Keeps what a check has found so far, in case it does not end."""
    model: Decoder = field(init=False)
    graphs: CudaGraphs = field(init=False)

    @property
    def patience(self) -> float:
        """By which the time limits of checks are multiplied."""
        return 4.0 if self.is_dry else 1.0

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
        """Waits until the device has done everything that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Frees the model, its caches and its graphs."""
        for name in ("graphs", "model"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Check = Callable[[CheckContext], Found]
