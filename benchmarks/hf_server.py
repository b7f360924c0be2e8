"""The peer of `jobs.bench --serve`: FastAPI around Hugging Face `generate`, with as much of the completions API as the
load needs. Waiting requests are decoded together, up to `--batch-size`, until the longest of them ends: what one writes
in an afternoon, batched.

    python benchmarks/hf_server.py --model models/opt-e2e --port 8001
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import OPTForCausalLM, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList


class Job:
    def __init__(self, body: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.prompt, self.max_tokens = body["prompt"], int(body["max_tokens"])
        self.loop, self.made = loop, asyncio.Queue[int | None]()

    def give(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.made.put_nowait, token)


class Tell(StoppingCriteria):
    """Sees every step of `generate`: hands new tokens out, and ends rows at their own limit."""

    def __init__(self, jobs: list[Job], width: int) -> None:
        self.jobs, self.width = jobs, width
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.count += 1
        for job, token in zip(self.jobs, input_ids[:, -1].tolist(), strict=True):
            if self.count <= job.max_tokens:
                job.give(token)
            if self.count == job.max_tokens:
                job.give(None)
        return torch.tensor([self.count >= job.max_tokens for job in self.jobs])


def decode_for_ever(model: OPTForCausalLM, tokenizer: Any, waiting: "queue.Queue[Job]", batch_size: int) -> None:
    while True:
        jobs = [waiting.get()]
        while len(jobs) < batch_size and not waiting.empty():
            jobs.append(waiting.get())
        rows = [[model.config.bos_token_id, *tokenizer(job.prompt, add_special_tokens=False).input_ids] for job in jobs]
        width = max(map(len, rows))
        ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=1,
                stopping_criteria=StoppingCriteriaList([Tell(jobs, width)]),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    model = OPTForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    model.generation_config.eos_token_id = None  # the load asks for answers of exactly max_tokens
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{arguments.model}/tokenizer.json")
    waiting: queue.Queue[Job] = queue.Queue()
    threading.Thread(
        target=decode_for_ever, args=(model, tokenizer, waiting, arguments.batch_size), daemon=True
    ).start()
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        job = Job(await request.json(), asyncio.get_running_loop())
        waiting.put(job)

        async def events() -> AsyncIterator[str]:
            while (token := await job.made.get()) is not None:
                choice = {"index": 0, "text": tokenizer.decode([token]), "token_ids": [token]}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="error")


if __name__ == "__main__":
    main()
