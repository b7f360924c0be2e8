"""Helpers of the endpoint's tests: a real `jobs.serve` process, a replica's HTTP without Ray, offline answers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from transformers import OPTForCausalLM

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from pipeline.batches.run_config import job_settings
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import Endpoint, EndpointSpec
from pipeline.service.routes import create_app
from skipdecode.checkpoint.detokenizer import cut_at_stop
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.local_app import local_app
from tests.support.processes import descendants, free_ports

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "models/opt-e2e")
DECODE = {"method": "skipdecode", "max_layers": 16, "min_layers": 8, "warmup_layers": 1, "horizon": 63}


def free_port() -> int:
    return free_ports(1)[0]


@dataclass
class Served:
    url: str
    process: "subprocess.Popen[str]"
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str, **keys: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **keys)

    def post(self, body: Any, **keys: Any) -> httpx.Response:
        own = {"content": body} if isinstance(body, bytes | str) else {"json": body}
        return httpx.post(f"{self.url}/v1/completions", timeout=60, **own, **keys)


@contextmanager
def served(folder: Path, *overrides: str, config: str = "configs/serve.yaml", **env: str) -> Iterator[Served]:
    """`jobs.serve` with the demo model in float32 on a free port of loopback."""
    port, log = free_port(), folder / "serve.log"
    decode = ", ".join(f"{key}: {value}" for key, value in DECODE.items())
    command = [
        sys.executable, "-m", "jobs.serve", "--config", config, "--port", str(port), f"model.source={DEMO}",
        "model.dtype=float32", f"decode={{{decode}}}", "auth.open_on_loopback=true", *overrides,
    ]  # fmt: skip
    with log.open("w") as target:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdout=target, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while "serving " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Served(f"http://127.0.0.1:{port}", process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def local(endpoint: Endpoint, send_bytes: int | None = None) -> Iterator[str]:
    """The HTTP of one replica: the URL. `send_bytes`: what the kernel keeps for a client."""
    with local_app(create_app(endpoint), send_bytes) as url:
        yield url


def make_endpoint(generator: Generator, digests: Sequence[bytes] = (), **sections: Any) -> Endpoint:
    config = ServeConfig.model_validate({"model": {"source": generator.config.source}, "model_name": "tiny"} | sections)
    spec = EndpointSpec(config, generator.config, tuple(digests), job_settings(config))
    return Endpoint(spec, generator=generator)


def scripted(source: Path, folder: Path, tokens: Sequence[int]) -> Generator:
    """A model that says `tokens[p]` at position p, whatever it is asked: its layers do nothing, its positions all."""
    model = OPTForCausalLM.from_pretrained(source, dtype=torch.float32)
    decoder = model.model.decoder
    with torch.no_grad():
        for layer in decoder.layers:
            for last in (layer.self_attn.out_proj, layer.fc2):
                last.weight.zero_()
                last.bias.zero_()
        decoder.final_layer_norm.weight.fill_(1)
        decoder.final_layer_norm.bias.zero_()
        vectors = decoder.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(0))
        decoder.embed_positions.weight[2 : 2 + len(tokens)] = 20 * vectors[list(tokens)]  # OPT's two are unused
    model.save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
    decode = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
    return Generator(GeneratorConfig(str(folder), decode, dtype="float32", num_threads=1))


class Offline:
    """What the offline job makes of the same model, decode, prompts, ids and seeds."""

    def __init__(self, source: str = DEMO, **keys: Any) -> None:
        self.generator = Generator(GeneratorConfig(source, DECODE, dtype="float32", num_threads=1, **keys))
        self._known: dict[Any, Completion] = {}

    def __call__(
        self, prompt: str | Sequence[int], max_tokens: int, *, row_id: str = "", **sampling: Any
    ) -> Completion:
        tokens = self.generator.tokenizer.encode([prompt])[0] if isinstance(prompt, str) else list(prompt)
        key = (tuple(tokens), max_tokens, row_id, tuple(sorted(sampling.items())))
        if key not in self._known:
            (answer,) = self.generator([Request(row_id, tokens, Sampling(max_tokens, **sampling))]).answers
            assert isinstance(answer, Completion), answer
            self._known[key] = answer
        return self._known[key]

    def text(self, completion: Completion, stop: Sequence[str] = ()) -> str:
        return cut_at_stop(self.generator.tokenizer.decode(completion.tokens), stop)


def replica_pids(session_leader: int) -> list[int]:
    """Replicas among the processes that a `jobs.serve` has started."""
    found = []
    for pid in descendants(session_leader):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if re.match(r"ray::ServeReplica", title):
            found.append(pid)
    return found


def post(url: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 4} | body, headers=headers, timeout=30
    )


def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """The `choices` entries of a stream of one prompt."""
    asked = {"prompt": "a", "max_tokens": 4, "stream": True} | body
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=30) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:])["choices"][0] for line in lines[:-1]]


def slow_down(endpoint: Endpoint, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = endpoint.engine.step
    monkeypatch.setattr(endpoint.engine, "step", lambda: (time.sleep(seconds), step())[1])


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]
