"""The door of plain Python: a model loaded into this process, texts in, texts out (`skipdecode.load`, `.generate`).

The decoder is that of jobs and of the endpoint: same prompt, id, seed and schedule, same tokens (float32). Left out:
corpora, several workers, bad rows as rows (`pipeline`): here what cannot be done is a ValueError.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, get_args

from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.model import MAX_LOGPROBS, Quantization
from skipdecode.config.sampling import Sampling
from skipdecode.detokenizer import cut_at_stop
from skipdecode.engine.generate import Completion, Request
from skipdecode.engine.generate import generate as decode_batch
from skipdecode.engine.request import TokenLogprobs, refuse_too_long
from skipdecode.model.decoder import Decoder
from skipdecode.model.pipeline_parallel import choose_device, choose_dtype, launching_on
from skipdecode.schedules.from_config import METHODS, listed_schedule
from skipdecode.schedules.plan import Schedule

DECODE_KEYS = frozenset({"method", "ffn_skip"}).union(*(method.keys for method in METHODS.values()))
OF_JOBS = frozenset({"lossless", "draft_tokens", "prefix", "n", "deterministic", "prompt_logprobs"})
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TextModel:
    """A loaded model and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer

    def schedule(self, max_new_tokens: int, prefill: str, decode: dict[str, Any]) -> Schedule:
        """As a job settles it: what is asked for, else what the checkpoint carries, else SkipDecode at speedup 2."""
        config = self.model.config
        given = {key: value for key, value in decode.items() if value is not None}
        skip = given.pop("ffn_skip", None)
        base = {"method": "skipdecode"} | given if given else dict(config.skip_decode or {"method": "skipdecode"})
        return listed_schedule(config, base | {"ffn_skip": skip, "prefill": prefill}, max_new_tokens)


@dataclass(frozen=True)
class Generated:
    """What became of one prompt."""

    text: str
    """No special tokens; ends before a stop string."""
    tokens: list[int]
    """With the end-of-text token that ended it."""
    finish_reason: str
    """`stop` or `length`."""
    layers_run: int
    """Layers, summed over the decode steps."""
    ffns_run: int
    """Feed-forward blocks, likewise."""
    num_input_tokens: int
    logprobs: list[TokenLogprobs]
    """One per token where they were asked for, else empty."""


def load(
    source: str | Path,
    *,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Quantization | None = None,
) -> TextModel:
    """The model of a folder, a hub id or a `.gguf` file; ValueError says what does not fit.

    `adapter`: the folder of a LoRA adapter for it, merged into its weights. `tokenizer`: another place for its files.
    `dtype`: auto, float32, bfloat16 or float16; auto takes bfloat16 where the device multiplies it. `device`: auto
    takes the GPU if there is one. `quantization`: `int8` weights.
    """
    if not str(source):
        raise ValueError("source: must be a folder, a hub id or a .gguf file, got ''")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if quantization not in (None, *get_args(Quantization)):
        raise ValueError(f"quantization: must be {' or '.join(get_args(Quantization))}, or None, got {quantization!r}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: must be auto, cpu or cuda, got {device!r}")
    files = source if tokenizer is None else resolve_source(str(tokenizer), "tokenizer")
    place = choose_device(device)
    model = load_model(source, adapter=adapter, device=place, dtype=choose_dtype(dtype, place)).pack(quantization)
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
    prefill: str = "full",
    batch_size: int = 32,
    **decode: Any,
) -> list[Generated]:
    """Continues each prompt; one result per prompt, in their order. One text counts as a list of one.

    `decode`: keys of `decode:` in a configuration (method, speedup, max_layers, ...), but none of OF_JOBS. `ids`:
    random numbers depend on seed, id and step alone; without ids they are "0", "1", ... `logprobs`: log-probabilities
    of each new token, and of so many likeliest ones. ValueError names what cannot be done, before anything is decoded.
    """
    if of_jobs := decode.keys() & OF_JOBS:
        raise TypeError(f"generate() has no {min(of_jobs)!r}: it is a key of jobs (`skipdecode generate`)")
    if unknown := decode.keys() - DECODE_KEYS:
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    texts, stops = _as_texts("prompts", prompts), tuple(_as_texts("stop", stop))
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed, stops, ignore_eos, logprobs)
    _check(sampling, batch_size)
    _check_texts(texts, ids)
    names = [str(number) for number in range(len(texts))] if ids is None else list(ids)
    schedule = model.schedule(max_new_tokens, prefill, decode)
    tokens = model.tokenizer.encode(texts)
    for name, ids_of in zip(names, tokens, strict=True):
        if not ids_of:
            raise ValueError(f"row {name!r}: the prompt has no tokens, and this model has none that begins a text")
    requests = [Request(name, t, sampling, logprobs) for name, t in zip(names, tokens, strict=True)]
    refuse_too_long(requests, model.model.config.max_position_embeddings)
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
    stop = request.sampling.stop if completion.finish_reason == "stop" else ()
    return Generated(
        cut_at_stop(model.tokenizer.decode(completion.tokens), stop),
        completion.tokens,
        completion.finish_reason,
        completion.layers_run,
        completion.ffns_run,
        len(request.prompt_tokens),
        completion.logprobs,
    )


def _is_int(value: object, low: int, high: int = sys.maxsize) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    """That a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max


def _is_text(value: object) -> bool:
    """Not half of a surrogate pair, which no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _check(sampling: Sampling, batch_size: object) -> None:
    """ValueError for what a configuration would refuse (`pipeline.config.job.SamplingConfig`)."""
    s = sampling
    limits = [
        ("max_new_tokens", s.max_new_tokens, _is_int(s.max_new_tokens, 1), "at least 1"),
        (
            "temperature",
            s.temperature,
            _is_number(s.temperature) and 0 <= s.temperature < inf,
            "a number of at least 0",
        ),
        ("top_p", s.top_p, _is_number(s.top_p) and 0 < s.top_p <= 1, "above 0 and up to 1"),
        ("top_k", s.top_k, _is_int(s.top_k, 0), "a whole number of at least 0"),
        ("seed", s.seed, _is_int(s.seed, -(2**63), 2**63 - 1), "a whole number of 64 bits"),
        ("stop", s.stop, all(_is_text(one) and one for one in s.stop), "texts that are not empty"),
        ("ignore_eos", s.ignore_eos, isinstance(s.ignore_eos, bool), "True or False"),
        ("batch_size", batch_size, _is_int(batch_size, 1), "at least 1"),
        (
            "logprobs",
            s.logprobs,
            s.logprobs is None or _is_int(s.logprobs, 0, MAX_LOGPROBS),
            f"0 to {MAX_LOGPROBS}, or None",
        ),
    ]
    for name, value, is_good, wanted in limits:
        if not is_good:
            raise ValueError(f"{name}: must be {wanted}, got {value!r}")


def _check_texts(texts: Sequence[object], ids: Sequence[object] | None) -> None:
    for number, text in enumerate(texts):
        if not _is_text(text):
            raise ValueError(f"prompts: number {number} must be a text, got {text!r}")
    if ids is not None and (
        isinstance(ids, str) or len(ids) != len(texts) or not all(isinstance(one, str) for one in ids)
    ):
        raise ValueError(f"ids: must be {len(texts)} texts, one for each prompt, got {ids!r}")


def _as_texts(name: str, value: object) -> list[str]:
    """One text counts as a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{name}: must be a text or a list of texts, got {value!r}")
    return list(value)
