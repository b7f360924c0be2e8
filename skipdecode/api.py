"""The Python API: `skipdecode.load` reads a model into this process, `skipdecode.generate` continues texts with it.

It uses the decoder of the jobs and of the endpoint, so the same prompt, id, seed and schedule give the same tokens (in
float32). It does not stream corpora, use several workers or turn bad prompts into failed rows, as `pipeline` does:
whatever cannot be done is a ValueError before anything is decoded.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from skipdecode.checkpoint.detokenizer import answer_text
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.config.model import KVCacheDtype, Quantization, WantedImplementation
from skipdecode.config.sampling import Sampling, is_unicode
from skipdecode.engine.generate import generate as decode_batch
from skipdecode.engine.request import Request, refuse_too_long
from skipdecode.engine.results import Completion, TokenLogprobs
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import available_device, choose_dtype
from skipdecode.model.pipeline_parallel import launching_on
from skipdecode.schedules.from_config import METHODS, listed_schedule
from skipdecode.schedules.schedule import Schedule

DECODE_KEYS = frozenset({"method", "ffn_skip"}).union(*(method.keys for method in METHODS.values()))
JOB_KEYS = frozenset({"lossless", "draft_tokens", "prefix", "n", "deterministic", "prompt_logprobs"})


@dataclass(frozen=True)
class TextModel:
    """A loaded model and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer

    def schedule(self, max_new_tokens: int, prefill: str | None, decode: dict[str, Any]) -> Schedule:
        """The schedule that `decode` asks for, else the one that the checkpoint carries, else full depth."""
        config = self.model.config
        given = {key: value for key, value in decode.items() if value is not None}
        skip = given.pop("ffn_skip", None)
        base = {"method": "skipdecode"} | given if given else dict(config.skip_decode or {"method": "full"})
        return listed_schedule(
            config, base | {"ffn_skip": skip, "prefill": prefill or config.default_prefill}, max_new_tokens
        )


@dataclass(frozen=True)
class Generated:
    """The continuation of one prompt."""

    text: str
    """No special tokens; ends before a stop string."""
    tokens: list[int]
    """Includes the end-of-text token where one ended it."""
    finish_reason: str
    """`stop`, `length` or `repetition`."""
    layers_run: int
    """Layers, summed over the decode steps."""
    ffns_run: int
    """Feed-forward blocks, summed over the decode steps."""
    num_input_tokens: int
    logprobs: list[TokenLogprobs]
    """One per token where they were asked for, else empty."""
    is_valid: bool | None = None
    """Whether the text has its whole structure, which one that the limit cut off has not; None without
    `structured_outputs`."""


def load(
    source: str | Path,
    *,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Quantization | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    implementation: WantedImplementation = "auto",
) -> TextModel:
    """Loads the model of a folder, a hub id or a `.gguf` file. ValueError names an argument that does not fit, and a
    warning what of the files has no effect.

    `adapter`: the folder of a LoRA adapter, merged into the weights. `tokenizer`: a folder or hub id with the
    tokenizer's files, where they are not beside the model. `dtype`: auto, float32, bfloat16 or float16; auto takes
    bfloat16 where the device multiplies it. `device`: auto, cpu, cuda or cuda:N; auto takes the GPU if there is one.
    `quantization`: `int8`, `int4` or `fp8` weights. `kv_cache_dtype`: `fp8` keys and values. `implementation`: `own`, a
    family with kernels of ours, or `transformers`, any decoder-only model; auto takes the former where there is one.
    """
    if implementation not in (known := get_args(WantedImplementation)):
        raise ValueError(f"implementation: must be {', '.join(known)}, got {implementation!r}")
    if quantization not in (None, *get_args(Quantization)):
        raise ValueError(f"quantization: must be {', '.join(get_args(Quantization))}, or None, got {quantization!r}")
    if kv_cache_dtype not in (known := get_args(KVCacheDtype)):
        raise ValueError(f"kv_cache_dtype: must be {' or '.join(known)}, got {kv_cache_dtype!r}")
    target = available_device(device)
    torch_dtype = choose_dtype(dtype, target)
    folder = resolve_source(str(source))
    files = folder if tokenizer is None else resolve_source(str(tokenizer), "tokenizer")
    config = read_config(folder, implementation)
    for remark in check_folder(folder, adapter, config):
        warnings.warn(remark, stacklevel=2)
    model = load_model(
        folder,
        adapter=adapter,
        device=target,
        dtype=torch_dtype,
        implementation=config.implementation,
        quantization=quantization,
    ).pack(quantization, kv_cache_dtype)
    return TextModel(model, Tokenizer(files, model.config))


def generate(
    model: TextModel,
    prompts: str | Sequence[str],
    *,
    ids: Sequence[str] | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    prefill: str | None = None,
    batch_size: int = 32,
    **keys: Any,
) -> list[Generated]:
    """Continues each prompt: one result per prompt, in their order. One text counts as a list of one.

    `keys` are the other keys of `sampling:` in a configuration (min_p, repetition_penalty, logit_bias, ...) and those
    of `decode:` (method, speedup, max_layers, ...) but for JOB_KEYS; without any of the latter the checkpoint's own
    schedule is used, or full depth where it carries none. `prefill`: full or swiftkv; None for what the checkpoint was
    released to run with. A row's random numbers depend on seed, id and step alone; `ids` are "0", "1", ... by default.
    `logprobs` asks for the log-probability of each new token and of so many of the likeliest ones. ValueError names an
    argument that is not valid, before anything is decoded.
    """
    if of_jobs := keys.keys() & JOB_KEYS:
        raise TypeError(f"generate() has no {min(of_jobs)!r}: it is a key of jobs (`skipdecode generate`)")
    if unknown := keys.keys() - DECODE_KEYS - Sampling.names():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    decode = {name: value for name, value in keys.items() if name in DECODE_KEYS}
    for name, count in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}: must be a whole number of at least 1, got {count!r}")
    texts, stops = _checked_texts("prompts", prompts), tuple(_checked_texts("stop", stop))
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed, stops, ignore_eos, logprobs)
    sampling = sampling.with_parameters({name: value for name, value in keys.items() if name not in DECODE_KEYS})
    sampling.check_vocabulary(model.model.config.vocab_size)
    if ids is not None and (isinstance(ids, str) or len(_checked_texts("ids", ids)) != len(texts)):
        raise ValueError(f"ids: must be {len(texts)} texts, one for each prompt, got {ids!r}")
    row_ids = [str(number) for number in range(len(texts))] if ids is None else list(ids)
    schedule = model.schedule(max_new_tokens, prefill, decode)
    asked = sampling.structured_outputs
    grammar = None if asked is None else model.tokenizer.grammars.compile(asked)
    requests = []
    for row_id, tokens in zip(row_ids, model.tokenizer.encode(texts), strict=True):
        if not tokens:
            raise ValueError(f"row {row_id!r}: the prompt has no tokens, and this model has none that begins a text")
        requests.append(Request(row_id, tokens, sampling, logprobs, grammar=grammar))
    refuse_too_long(requests, model.model.config.max_position_embeddings)
    return generate_requests(model, requests, schedule, batch_size)


def generate_requests(
    model: TextModel, requests: Sequence[Request], schedule: Schedule, batch_size: int
) -> list[Generated]:
    """The completions of requests of one schedule in their order; rows of similar length share a batch."""
    by_length = sorted(range(len(requests)), key=lambda row: len(requests[row].prompt_tokens))
    done: dict[int, Generated] = {}
    for start in range(0, len(by_length), batch_size):
        rows = by_length[start : start + batch_size]
        chosen = [requests[row] for row in rows]
        with launching_on(model.model.device):
            result = decode_batch(model.model, chosen, schedule, decode_text=model.tokenizer.decode)
        done |= {row: _generated(model, requests[row], c) for row, c in zip(rows, result.completions, strict=True)}
    return [done[row] for row in range(len(requests))]


def _generated(model: TextModel, request: Request, completion: Completion) -> Generated:
    return Generated(
        answer_text(completion.tokens, completion.finish_reason, request.sampling, model.tokenizer.decode),
        completion.tokens,
        completion.finish_reason,
        completion.layers_run,
        completion.ffns_run,
        len(request.prompt_tokens),
        completion.logprobs,
        completion.is_valid,
    )


def _checked_texts(name: str, value: object) -> list[str]:
    """One text counts as a list of one. ValueError for what no tokenizer takes."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{name}: must be a text or a list of texts, got {value!r}")
    for number, text in enumerate(value):
        if not isinstance(text, str) or not is_unicode(text):
            raise ValueError(f"{name}: number {number} must be a text, got {text!r}")
    return list(value)
