"""Requests at random, and what each of them comes to alone."""

from collections.abc import Sequence
from typing import Any

import torch

from actors.generator import Generator
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.from_config import make_schedule

SKIP = {"method": "skipdecode", "max_layers": 5, "min_layers": 2}
BUCKETS = (4, 8, 16, 32)


def random_requests(count: int, seed: int = 0, limits: Sequence[int] = (12,), **keys: Any) -> list[Request]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=rng).tolist()
    return [
        Request(
            f"row-{i}",
            [2, *torch.randint(4, 320, (n - 1,), generator=rng).tolist()],
            Sampling(max_new_tokens=limits[i % len(limits)], **keys),
        )
        for i, n in enumerate(lengths)
    ]


alone: dict[str, Completion] = {}
"""Of models, schedules and requests that were decoded by themselves."""


def one_by_one(generator: Generator, requests: Sequence[Request]) -> list[Completion]:
    config, layers = generator.config, generator.model.config.num_hidden_layers
    names = [f"{config.source} {config.dtype} {config.quantization} {config.decode} {request}" for request in requests]
    for name, request in zip(names, requests, strict=True):
        if name not in alone:
            new_tokens = request.sampling.max_new_tokens
            schedule = make_schedule(config.decode, num_layers=layers, max_new_tokens=new_tokens)
            made = generate(generator.model, [request], schedule, decode_text=generator.tokenizer.decode)
            (alone[name],) = made.completions
    return [alone[name] for name in names]
