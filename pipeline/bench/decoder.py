"""`skipdecode bench`: decoding or training speed of schedules in this process, on one device."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from pipeline.cluster.machine import device_to_measure, provenance
from pipeline.config.job import ConfigError, Section, SwiftKVSection, build_config, read_tree
from pipeline.formatting import Json, Log
from skipdecode.backends.host_memory import num_cores
from skipdecode.config.model import KVCacheDtype, Quantization
from skipdecode.families import released
from skipdecode.model.devices import dtype_name

if TYPE_CHECKING:
    import torch

    from skipdecode.model.decoder import Decoder


class BenchConfig(Section):
    work: Literal["decode", "train"] = "decode"
    """train: measures an optimiser step on `prompt_tokens` + `new_tokens`; `dtype` is then that of autocast."""
    shape: str | None = "opt-125m"
    """A released shape with random weights; or null and `source`."""
    source: str | None = None
    """A checkpoint, in place of `shape`."""
    adapter: str | None = None
    """The folder of a LoRA adapter for `source`; null: none."""
    swiftkv: SwiftKVSection | None = None
    """Gives `shape` the projections of SwiftKV, so that `schedules` may have `prefill: swiftkv`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the decoder computes in; auto: bfloat16 where the device multiplies it, else float32."""
    quantization: Quantization | None = None
    """int8, fp8: weights of 8 bits; int4: of 4; as `model.quantization` of a job."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8: keys and values of 8 bits, as `model.kv_cache_dtype` of a job."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)] | Literal["largest"], ...] = (8, 32)
    """largest: as many rows as fit into memory at full depth."""
    prompt_tokens: tuple[Annotated[int, Field(ge=1)], ...] = (64,)
    """Prompt lengths to measure."""
    new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens of an answer."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Interleaved measurements of each setting; figures are medians."""
    schedules: tuple[dict[str, JsonValue], ...] = tuple({"method": "skipdecode", "speedup": s} for s in (2, 3, 4, 5))
    """`decode:` mappings to compare with full depth; `prefill: swiftkv` may stand beside their keys."""


def load_bench_config(path: str | None, overrides: list[str]) -> BenchConfig:
    return build_config(BenchConfig, read_tree(path, overrides))


def run_bench(config: BenchConfig, log: Log, *, profile: bool = False) -> dict[str, Json]:
    """Measures every shape; returns the JSON document. `profile`: the stages of a decode step and not its speed."""
    import torch

    from actors.measuring.bench import BenchCase, bench_case, bench_training, largest_batch, profile_case
    from skipdecode.backends.choice import choose
    from skipdecode.model.devices import choose_dtype

    device = device_to_measure(config.device)
    precision = dtype_name(choose_dtype(config.dtype, device))
    if config.work == "train":
        _check_training(config, precision, profile)
    torch.set_num_threads(config.threads or num_cores())
    try:
        model = _load_model(config, device, precision)
    except ValueError as error:
        raise ConfigError.parse(error) from error
    room = model.config.max_position_embeddings - config.new_tokens
    if max(config.prompt_tokens) > room:
        raise ConfigError("prompt_tokens", f"{max(config.prompt_tokens)} and new_tokens do not fit; at most {room}")
    rows: list[Json] = []
    schedules = list(config.schedules)
    for prompt_tokens in config.prompt_tokens:
        for size in config.batch_sizes:
            rows_of_batch = largest_batch(model, prompt_tokens, config.new_tokens) if size == "largest" else size
            case = BenchCase(rows_of_batch, prompt_tokens, config.new_tokens)
            if profile:
                measured = profile_case(model, case, schedules)
            elif config.work == "train":
                measured = bench_training(model, case, schedules, config.repeats, precision)
            else:
                measured = bench_case(model, case, schedules, config.repeats)
            if not rows:
                log(_line({key: key for key in measured[0]}))
            for row in measured:
                log(_line(row))
            rows += measured
    return provenance(device) | {
        "dtype": precision,
        "cpu_kernels": str(choose()) if device.type == "cpu" else None,
        "config": config.model_dump(mode="json"),
        "rows": rows,
    }


def _check_training(config: BenchConfig, precision: str, profile: bool) -> None:
    """ConfigError for settings that `work: train` does not support."""
    if "largest" in config.batch_sizes:
        raise ConfigError("batch_sizes", "largest is for work=decode")
    if profile:
        raise ConfigError("work", "--profile is for work=decode")
    if config.quantization is not None:
        raise ConfigError("quantization", "is for work=decode")
    if config.kv_cache_dtype != "auto":
        raise ConfigError("kv_cache_dtype", "is for work=decode")
    if precision == "float16":
        raise ConfigError("dtype", "float16 is not trained in; use bfloat16 or float32")
    for key in ("ffn_skip", "prefill"):
        if any(decode.get(key) is not None for decode in config.schedules):
            raise ConfigError("schedules", f"{key} is not timed with work=train; work=decode times it")


def _load_model(config: BenchConfig, device: "torch.device", precision: str) -> "Decoder":
    """The model, packed for decoding; ValueError if schedules, SwiftKV or quantization do not fit it."""
    import torch

    from actors.measuring.bench import random_model
    from skipdecode.checkpoint.weights import load_model
    from skipdecode.schedules.from_config import listed_schedule

    dtype = torch.float32 if config.work == "train" else getattr(torch, precision)
    if config.source is not None:
        if config.swiftkv is not None:
            raise ValueError("swiftkv: is for a shape; a source carries its own, or jobs.distill gives it one")
        quantization = config.quantization if config.work == "decode" else None
        model = load_model(config.source, adapter=config.adapter, device=device, dtype=dtype, quantization=quantization)
    else:
        if config.adapter is not None:
            raise ValueError("adapter: is for a source; a shape has random weights")
        model_config = released(config.shape or "")
        if config.swiftkv is not None:
            model_config = replace(model_config, swiftkv=config.swiftkv.shape(model_config))
        model = random_model(model_config, device=str(device), dtype=dtype)
    if config.work == "train" and model.config.implementation == "transformers":
        raise ValueError("source: work=train needs a model of a family of ours (docs/models.md)")
    for decode in config.schedules:
        listed_schedule(model.config, decode, config.new_tokens)
    return model.pack(config.quantization, config.kv_cache_dtype) if config.work == "decode" else model


LEFT_OUT = ("new_tokens", "prefill_ms")  # in the document only, not in the table
SCHEDULE_WIDTH = 16


def _line(row: Mapping[str, Json]) -> str:
    cells = {key: f"{value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()}
    return "  ".join(
        cell.rjust(max(len(key), SCHEDULE_WIDTH if key == "schedule" else 0))
        for key, cell in cells.items()
        if key not in LEFT_OUT
    )
