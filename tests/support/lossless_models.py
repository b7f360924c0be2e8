"""Models and drafts for tests of lossless decoding."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skipdecode.backends import choice
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.model import DecoderConfig
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from skipdecode.speculative.controller import NGRAMS, Decision, SpeculationController
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.latency_model import LatencyModel
from tests.support.cpu_backends import forced
from tests.support.cuda_models import random_model
from tests.support.schedules import SCHEDULES

L = 6
FULL = FullDepth(L)
DRAFTS: list[Schedule] = [
    *SCHEDULES.values(),  # full depth: n-gram drafts alone
    SkipDecode(L, 6, 6, 1, 1),  # all layers: whatever it drafts is accepted
    SkipBand(SkipDecode(L, 6, 3, 2, 9), 4, (1, 4)),
]


def is_quiet(model: Decoder) -> Decoder:
    """The same model with middle layers that change little, so that drafts without them are often right."""
    with torch.no_grad():
        for layer in model.layers[1:-1]:
            for linear in (layer.out_proj, layer.fc2):
                linear.weight *= 0.2
                if linear.bias is not None:
                    linear.bias *= 0.2
            for norm in (layer.attn_out_norm, layer.ffn_out_norm):
                if norm is not None:
                    norm.weight *= 0.2
    return model


@pytest.fixture(scope="module", params=["torch", *(["kernels"] if choice.choose().name != "torch" else [])])
def models(request: pytest.FixtureRequest, ending_checkpoint: Callable[[str], Path]) -> Iterator[dict[str, Decoder]]:
    """Narrow random models, by torch's operators and by the kernels of this machine: one whose rows end, a Llama whose
    heads share keys, and a Gemma whose windows are shorter than its texts."""
    with forced("torch" if request.param == "torch" else choice.choose().name):
        opt = is_quiet(load_model(ending_checkpoint("1.3b")))  # as wide as kernels take it
        llama = is_quiet(random_model("llama", layers=L))
        gemma3 = is_quiet(random_model("gemma3", layers=L))
        yield {"opt": opt.pack(), "llama": llama.pack(), "gemma3": gemma3.pack()}


class Erratic(SpeculationController):
    """Drafts, and takes plain steps, as a die says: for some rounds each, by skipped layers, by n-grams, or by both."""

    def __init__(
        self, schedule: Lossless, config: DecoderConfig, seed: int, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__(schedule, LatencyModel(config, 4), vocabulary=vocabulary)
        self._die = random.Random(seed)
        self._left, self._decision = 0, Decision("no_gain")

    def decide(self, rows: int, k: int, context: int) -> Decision:
        if self._left == 0:
            self._left, self._decision = self._die.choice([1, 2, 5, 40]), self._roll()
        self._left -= 1
        return self._decision

    def _roll(self) -> Decision:
        die = self._die
        ngrams = {source: die.randint(1, 5) for source in NGRAMS if die.random() < 0.5}
        layers = die.randint(1, 5) if self.schedule.drafts_by_skipping and die.random() < 0.5 else 0
        return Decision("no_gain") if die.random() < 0.4 else Decision("drafted", layers, ngrams)
