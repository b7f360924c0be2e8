"""Many clients at once of a served endpoint, and the check of each answer against offline."""

import asyncio
import json
import random
import time
from typing import Any

import aiohttp

from pipeline.demo.restaurant_prompts import make_prompts
from tests.support.service_helpers import Offline, Served

PROMPTS = [row["prompt"] for row in make_prompts(60, seed=9)]
Made = list[tuple[dict[str, Any], int, Any, float]]
"""(asked, status, answer, when it was sent by time.monotonic); status 0: no connection."""
CUT = "the stream was cut off"


async def clients(server: Served, count: int, seconds: float, body: Any) -> Made:
    """Each client sends one request after the other. An answer is JSON, that of a stream all events in one, or text."""
    made: Made = []
    ends_at = time.monotonic() + seconds

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < ends_at:
            asked, sent_at, status, read = body(rng), time.monotonic(), 0, b""
            try:
                async with session.post(f"{server.url}/v1/completions", json=asked) as answer:
                    status = answer.status
                    async for part in answer.content.iter_any():
                        read += part
                    answered = understood(answer.content_type, read)
            except aiohttp.ClientError as error:
                answered = CUT if status == 200 else repr(error)
            made.append((asked, status, answered, sent_at))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        await asyncio.gather(*(one(session, n) for n in range(count)))
    return made


def understood(content_type: str, read: bytes) -> Any:
    if content_type == "application/json":
        return json.loads(read)
    if content_type != "text/event-stream":
        return read.decode()
    events = [line.removeprefix("data: ") for line in read.decode().split("\n\n") if line]
    if events[-1:] != ["[DONE]"]:
        return CUT
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return {"choices": [{"token_ids": tokens, "text": "".join(choice["text"] for choice in choices)}]}


def any_request(rng: random.Random) -> dict[str, Any]:
    number = rng.randrange(len(PROMPTS))
    asked = {"prompt": PROMPTS[number], "max_tokens": rng.choice([4, 16, 40]), "return_token_ids": True}
    return asked | ({"temperature": 0.8, "seed": 5, "row_id": f"row-{number}"} if number % 2 else {"temperature": 0})


def wanted(offline: Offline, asked: dict[str, Any]) -> list[int]:
    keys = {name: asked[name] for name in ("temperature", "seed", "row_id") if name in asked}
    return offline(asked["prompt"], asked["max_tokens"], **keys).tokens


def any_request_or_stream(rng: random.Random) -> dict[str, Any]:
    return any_request(rng) | {"stream": rng.random() < 0.5}


def check(offline: Offline, made: Made) -> int:
    """Every 200 that was not cut off is the answer to its own prompt; how many there are."""
    good = [(asked, answer) for asked, status, answer, _ in made if status == 200 and answer != CUT]
    for asked, answer in good:
        assert answer["choices"][0]["token_ids"] == wanted(offline, asked)
    return len(good)
