"""Fixtures all tests share: tiny OPT checkpoints and their tokenizer (`support.tiny_models`), the reference, Ray.

No network, one torch thread (the machine is shared, and tiny kernels want no more).
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM
from transformers.utils import logging as hf_logging

from actors import generator
from skipdecode.checkpoint.weights import load_model
from skipdecode.model.decoder import Decoder
from tests.support import profiles  # noqa: F401 - the examples of property tests
from tests.support.markers import pytest_collection_modifyitems, pytest_runtest_call, pytest_runtest_setup
from tests.support.tiny_models import VOCAB, save_model, save_tokenizer
from tests.support.verbs import Call

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_call", "pytest_runtest_setup"]  # hooks: pytest looks here

torch.set_num_threads(1)
hf_logging.disable_progress_bar()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a shell; jobs must hear their Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Measuring what the machine can do takes a second, and a test run makes hundreds of generators.
generator.measure_ceilings = cache(generator.measure_ceilings)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `tokenizer.json` of a byte-level BPE of VOCAB tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Callable[..., Path]:
    """`checkpoint_factory(style, layers=6, seed=0, **config overrides)` -> folder, made once per session."""
    made: dict[Any, Path] = {}

    def make(style: str, layers: int = 6, seed: int = 0, **overrides: Any) -> Path:
        key = (style, layers, seed, tuple(sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"opt-{style}")
            save_model(folder, tokenizer_folder, style, layers, seed, **overrides)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    """125m style: 6 layers, float32, 320 tokens, 128 positions, with tokenizer.json."""
    return checkpoint_factory("125m", layers=6)


@pytest.fixture(scope="session")
def ending_checkpoint(checkpoint_factory: Callable[..., Path]) -> Callable[[str], Path]:
    """`ending_checkpoint(style)`: a checkpoint whose EOS id is a token that rows make at many different steps."""

    @cache
    def make(style: str) -> Path:
        free = OPTForCausalLM.from_pretrained(checkpoint_factory(style), dtype=torch.float32).eval()
        prompts = torch.randint(4, VOCAB, (24, 6), generator=torch.Generator().manual_seed(11))
        made = free.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=30, do_sample=False, eos_token_id=-7
        )
        rows = made[:, 6:].tolist()
        spread = {t: len({row.index(t) for row in rows if t in row}) for row in rows for t in row if t > 3}
        return checkpoint_factory(style, eos_token_id=max(spread, key=lambda t: (spread[t], t)))

    return make


@pytest.fixture(scope="session")
def hf() -> Callable[[Path], OPTForCausalLM]:
    """`hf(folder)`: the reference, in float32; loaded once. Do not change it."""

    @cache
    def load(folder: Path) -> OPTForCausalLM:
        return OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)

    return load


@pytest.fixture(scope="session")
def ours() -> Callable[[Path], Decoder]:
    """`ours(folder)`: our model, in float32; loaded once. Do not change it."""

    @cache
    def load(folder: Path) -> Decoder:
        return load_model(folder)

    return load


@pytest.fixture(scope="session")
def loaded(tiny_checkpoint: Path, ours: Callable[[Path], Decoder]) -> Decoder:
    return ours(tiny_checkpoint)


@pytest.fixture(scope="module")
def ray_is_up() -> None:
    """Ray as a verb starts it. It stays up for the next files too: a start, and the first run on it, take 8 s more."""
    from pipeline.cluster.pool import start_ray

    start_ray()


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """For files whose Ray is unlike that of a verb: none is up when their tests begin, and theirs ends with them."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """`call(verb, *arguments)` in this process: exit code, JSON document, stderr."""
    return Call(capsys)
