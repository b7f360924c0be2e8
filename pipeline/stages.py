"""What Ray Data runs on each block of rows: tokenise (CPU task), decode (actor), finish (CPU task).

Each takes and gives Arrow tables with as many rows as it got. Columns that are not ours pass through untouched. The
model work is `actors.generator`; the columns are `pipeline.schema`.
"""

import json
import os
import socket
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray

from actors.generator import Generator, GeneratorConfig, RowFailure
from actors.tokenizer import OPTTokenizer
from pipeline.schema import (
    BAD_PARAMETERS,
    OUTPUT_SCHEMA,
    PROMPT,
    PROMPT_NOT_TEXT,
    PROMPT_TOKENS,
    PROMPT_TOO_LONG,
    SAMPLING,
    STATUS,
)
from skipdecode.config import OPTConfig
from skipdecode.generate import Request
from skipdecode.sampling import Sampling, cut_at_stop

TOKENS = pa.list_(pa.int32())


def row_sampling(base: Sampling, overrides: str | None) -> Sampling:
    """The run's sampling with what the row itself asks for (JSON object, keys of `Sampling`)."""
    if overrides is None:
        return base
    own = json.loads(overrides)
    if "stop" in own:
        own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
    return replace(base, **own)


@dataclass(frozen=True)
class TokenizeConfig:
    source: str
    model: OPTConfig
    sampling: Sampling
    too_long: str


@lru_cache(maxsize=2)
def _tokenizer(source: str, model: OPTConfig) -> OPTTokenizer:
    """Built once per worker process, not once per block."""
    return OPTTokenizer(source, model)


def tokenize(table: pa.Table, *, config: TokenizeConfig) -> pa.Table:
    """Adds the prompt's tokens and their number; marks rows that cannot be decoded."""
    tokenizer = _tokenizer(config.source, config.model)
    prompts, given = table[PROMPT].to_pylist(), table[PROMPT_TOKENS].to_pylist()
    codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
    samplings = table[SAMPLING].to_pylist()
    texts = [row for row, code in enumerate(codes) if not code and given[row] is None]
    tokens: list[list[int]] = [[] for _ in codes]
    for row, ids in zip(texts, tokenizer.encode([prompts[row] for row in texts]), strict=True):
        tokens[row] = ids
    counts = [0] * len(codes)
    for row, code in enumerate(codes):
        if code:
            continue
        if given[row] is not None:
            tokens[row] = given[row] or [config.model.bos_token_id]
            known = [token for token in given[row] if token < config.model.vocab_size]
            prompts[row] = prompts[row] or tokenizer.decode(known)
        problem = fit(row, tokens, row_sampling(config.sampling, samplings[row]).max_new_tokens, config)
        counts[row] = len(tokens[row])
        if problem:
            codes[row], messages[row] = problem
            tokens[row] = []
    columns = {
        PROMPT: pa.array(prompts, pa.string()),
        PROMPT_TOKENS: pa.array(tokens, TOKENS),
        "error_code": pa.array(codes, pa.string()),
        "error_message": pa.array(messages, pa.string()),
        "num_input_tokens": pa.array(counts, pa.int32()),
    }
    return with_columns(table, columns)


def fit(row: int, tokens: list[list[int]], max_new_tokens: int, config: TokenizeConfig) -> tuple[str, str] | None:
    """Cuts the row's tokens if the run says so; otherwise says why they cannot be decoded."""
    ids, limit = tokens[row], config.model.max_position_embeddings
    vocabulary = config.model.vocab_size
    if max(ids) >= vocabulary:
        return PROMPT_NOT_TEXT, f"prompt token {max(ids)} is not in the vocabulary of {vocabulary} tokens"
    room = limit - max_new_tokens
    if room < 1:
        return BAD_PARAMETERS, f"max_tokens {max_new_tokens} leaves no room for a prompt in {limit} positions"
    if len(ids) <= room:
        return None
    if config.too_long == "fail_row":
        return (
            PROMPT_TOO_LONG,
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones do not fit the model's {limit} positions; "
            "set input.too_long to truncate_left or truncate_right, or lower sampling.max_new_tokens",
        )
    # BOS stays in front whichever side is cut
    tokens[row] = ids[:room] if config.too_long == "truncate_right" else [ids[0], *ids[len(ids) - room + 1 :]]
    return None


class DecodeStage:
    """One actor of the pool: a `Generator` behind Arrow tables, telling `metrics` what each batch cost."""

    def __init__(self, config: GeneratorConfig, sampling: Sampling, metrics: Any) -> None:
        self.sampling = sampling
        self.metrics = metrics
        self.worker = f"{socket.gethostname()}:{ray.get_runtime_context().get_actor_id()[:8]}"
        self.generator = Generator(config)
        metrics.worker_started.remote(
            self.worker,
            {
                "pid": os.getpid(),
                "load_s": self.generator.load_s,
                "device": str(self.generator.device),
                "dtype": str(self.generator.dtype).removeprefix("torch."),
                "ready_at": time.time(),
            },
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        started_at = time.time()
        codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
        ids, tokens = table["id"].to_pylist(), table[PROMPT_TOKENS].to_pylist()
        samplings = table[SAMPLING].to_pylist()
        rows = [row for row, code in enumerate(codes) if not code]
        requests = [Request(ids[row], tokens[row], row_sampling(self.sampling, samplings[row])) for row in rows]
        result = self.generator(requests)
        made: list[list[int]] = [[] for _ in codes]
        reasons, layers = ["error"] * len(codes), [0] * len(codes)
        for row, answer in zip(rows, result.answers, strict=True):
            if isinstance(answer, RowFailure):
                codes[row], messages[row] = answer.error_code, answer.error_message
            else:
                made[row], reasons[row], layers[row] = answer.tokens, answer.finish_reason, answer.layers_run
        failed = sum(bool(code) for code in codes)
        window = {"started_at": started_at, "ended_at": time.time(), "rows": len(codes), "failed": failed}
        self.metrics.window_done.remote(self.worker, window, result.batches)
        columns = {
            "generated_tokens": pa.array(made, TOKENS),
            "num_generated_tokens": pa.array([len(t) for t in made], pa.int32()),
            "finish_reason": pa.array(reasons, pa.string()),
            "layers_run": pa.array(layers, pa.int32()),
            "error_code": pa.array(codes, pa.string()),
            "error_message": pa.array(messages, pa.string()),
        }
        return with_columns(table, columns)


def finish(table: pa.Table, *, config: TokenizeConfig, extra_names: tuple[str, ...]) -> pa.Table:
    """Adds the text and the status, and puts the columns in the order of the contract."""
    tokenizer = _tokenizer(config.source, config.model)
    texts = []
    tokens, reasons = table["generated_tokens"].to_pylist(), table["finish_reason"].to_pylist()
    for ids, reason, own in zip(tokens, reasons, table[SAMPLING].to_pylist(), strict=True):
        text = tokenizer.decode(ids)
        stop = row_sampling(config.sampling, own).stop if reason == "stop" else ()
        texts.append(cut_at_stop(text, stop))
    status = pc.if_else(pc.equal(table["error_code"], ""), "ok", "failed")
    table = with_columns(table, {"generated_text": pa.array(texts, pa.string()), STATUS: status})
    return table.select([*OUTPUT_SCHEMA.names, *extra_names, STATUS])


def with_columns(table: pa.Table, columns: dict[str, Any]) -> pa.Table:
    """`table` with these columns replaced or appended."""
    for name, column in columns.items():
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    return table
