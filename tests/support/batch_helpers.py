"""Lines, uploads and endpoints for tests of the batch API."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from fastapi import FastAPI, Request

from pipeline.batches.run_config import job_settings
from pipeline.batches.status import TERMINAL
from pipeline.batches.storage import ClientStorage, Storage, StoredBatch
from pipeline.config.job import build_config
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.service.auth import check_key, digest
from pipeline.service.batch_routes import BatchRoutes
from pipeline.service.config import ServeConfig
from pipeline.service.error_responses import add_error_handlers
from tests.support.local_app import local_app

KEY, OTHER_KEY = "first-secret-key", "second-secret-key"
SESSION = "0123456789ab"
PROMPTS = [row["prompt"] for row in make_prompts(60, seed=3)]
"""That the demo model knows."""


def line(custom_id: str, prompt: str = "a", *, model: str | None = "tiny", **body: Any) -> dict[str, Any]:
    own = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | body
    if model is not None:
        own["model"] = model
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": own}


def demo_lines(count: int, **body: Any) -> list[Any]:
    """Lines for the demo model, `row-0` and so on, with PROMPTS in turns."""
    return [line(f"row-{n}", PROMPTS[n % len(PROMPTS)], model="opt-e2e", **body) for n in range(count)]


def jsonl(lines: list[Any]) -> bytes:
    """One line per entry; a string as it is."""
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()


def create_batch(client: openai.OpenAI, lines: list[Any], **keys: Any) -> Any:
    """Uploads the lines and creates a batch of them; `keys` in place of what is usual."""
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    given = {"endpoint": "/v1/completions", "completion_window": "24h"} | keys
    return client.batches.create(input_file_id=file.id, **given)


def client_of(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def batch_endpoint(folder: Path, keys: Sequence[str] = (KEY, OTHER_KEY), **sections: Any) -> Iterator[str]:
    """The routes of files and batches whose storage is `folder`; nobody runs the batches."""
    storage = {"path": str(folder)} | sections.get("storage", {})
    config = build_config(ServeConfig, {"model_name": "tiny"} | sections | {"storage": storage})
    digests = [digest(key) for key in keys]

    def caller(request: Request) -> str:
        return check_key(digests, request.headers.get("authorization")).hex()

    app = FastAPI()
    BatchRoutes(config, job_settings(config), caller, lambda: None).add_to(app)
    add_error_handlers(app)
    with local_app(app) as url:
        yield url


def storage_of(folder: Path, key: str = KEY) -> ClientStorage:
    return Storage(str(folder)).of(digest(key).hex())


def begin_run(own: ClientStorage, batch_id: str, documents: int, rows: int | None = None, **more: Any) -> None:
    """As a driver does that has begun and was killed."""
    state: Any = {
        "version": "1.0.0", "state": "running", "fingerprint": {}, "former": [], "known": [], "retries": [],
        "books": {"input": rows or documents, "ok": None, "failed": None, "closed": False},
        "input": {"format": "openai_batch", "files": [], "documents": documents},
        "sessions": [{"id": SESSION, "started_at": time.time() - 10, "ended_at": time.time()}],
    }  # fmt: skip
    own.run(batch_id).write_state(state | more)


def finish_run(own: ClientStorage, record: StoredBatch) -> None:
    """What a run leaves that has answered all lines of the batch: of its files, those that the API reads."""
    with own.open_input(record["id"]) as source:
        ids = [json.loads(text)["custom_id"] for text in source.read().splitlines()]
    answers = [{"custom_id": one, "response": {"status_code": 200, "body": {}}, "error": None} for one in ids]
    run, now = own.run(record["id"]), time.time()
    run.write_text("batch_output.jsonl", jsonl(answers).decode())
    run.write_text("batch_errors.jsonl", "")
    state: Any = {
        "version": "1.0.0", "state": "finished", "fingerprint": {}, "books": {"input": len(ids)},
        "input": {"documents": len(ids)}, "sessions": [{"id": "0" * 12, "started_at": now, "ended_at": now}],
        "answers": {"batch_output.jsonl": {"lines": len(ids)}, "batch_errors.jsonl": {"lines": 0}},
    }  # fmt: skip
    run.write_state(state)


def wait_for_batch(client: openai.OpenAI, batch_id: str, timeout_s: float = 300) -> tuple[Any, list[str]]:
    """The batch once it has ended, and the states that were seen on the way."""
    deadline, states = time.monotonic() + timeout_s, list[str]()
    while True:
        batch = client.batches.retrieve(batch_id)
        if states[-1:] != [batch.status]:
            states.append(batch.status)
        if batch.status in TERMINAL:
            return batch, states
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)


def answers_of(client: openai.OpenAI, batch: Any) -> tuple[dict[str, Any], list[Any]]:
    """The bodies of the output file by `custom_id`, and the errors of the other one."""
    output: dict[str, Any] = {}
    if batch.output_file_id is not None:
        for text in client.files.content(batch.output_file_id).text.splitlines():
            answer = json.loads(text)
            assert answer["custom_id"] not in output, answer["custom_id"]
            output[answer["custom_id"]] = answer["response"]["body"]
    errors = [] if batch.error_file_id is None else client.files.content(batch.error_file_id).text.splitlines()
    return output, [json.loads(text)["error"] | {"custom_id": json.loads(text)["custom_id"]} for text in errors]
