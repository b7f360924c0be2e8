"""What the tests of the engine share: engines, requests, and what each comes to offline."""

from collections.abc import Sequence
from typing import Any

from actors.generator import Generator
from actors.serving.engine import Engine, Progress
from actors.serving.scheduler import EngineConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from tests.support.naive import random_prompts

SCHEDULERS = ["cohort", "continuous"]
DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "warmup_layers": 1, "horizon": 12}


def engine_of(generator: Generator, **keys: Any) -> Engine:
    return Engine(generator, EngineConfig(**({"batch_size": 4, "max_cohorts": 2} | keys)))


def pool_of(count: int, num_new: int = 10) -> list[Request]:
    prompts = random_prompts([1 + i % 40 for i in range(count)], seed=6)
    return [
        Request(str(i), p, Sampling(num_new + i % 7, temperature=float(i % 2), seed=i)) for i, p in enumerate(prompts)
    ]


def collect(made: dict[str, list[int]], ends: dict[str, str], progress: Sequence[Progress]) -> None:
    for one in progress:
        made.setdefault(one.ticket.request.id, []).extend(one.tokens)
        assert len(one.tokens) == len(one.layers)
        if one.finish_reason or one.error:
            assert one.ticket.request.id not in ends, "ended twice"
            ends[one.ticket.request.id] = one.finish_reason or f"error: {one.error}"


def run(engine: Engine, arrivals: dict[int, list[Request]]) -> tuple[dict[str, list[int]], dict[str, str]]:
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    step = 0
    while step <= max(arrivals) or not engine.is_idle:
        for request in arrivals.get(step, []):
            engine.add(request)
        collect(made, ends, engine.step())
        step += 1
        assert step < 5000
    return made, ends


def offline(generator: Generator, requests: Sequence[Request]) -> tuple[dict[str, list[int]], dict[str, str]]:
    answers = generator(list(requests)).answers
    made = {r.id: a.tokens for r, a in zip(requests, answers, strict=True)}  # type: ignore[union-attr]
    return made, {r.id: a.finish_reason for r, a in zip(requests, answers, strict=True)}  # type: ignore[union-attr]
