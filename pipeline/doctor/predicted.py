"""`doctor --gpu NAME`: predicts speed and cost on a GPU from its data sheet. Starts nothing."""

from collections.abc import Mapping
from dataclasses import asdict, replace

from pipeline.config.job import ConfigError
from pipeline.formatting import Json, Log
from skipdecode.config.model import ON_CPUS, WEIGHT_BYTES, KVCacheDtype, Quantization
from skipdecode.cost.gpu_specs import gpu_named
from skipdecode.cost.predict import BANDWIDTH_REACHED, FLOPS_REACHED, MODELS, Prediction, Workload, predict_all
from skipdecode.families import released

COLUMNS = ("model", "schedule", "num_gpus", "rows", "ms_per_step", "tokens_per_s", "cost_per_million", "speedup")


def predicted(
    name: str,
    log: Log,
    prompt_tokens: int,
    new_tokens: int,
    *,
    price_per_hour: float | None = None,
    quantization: Quantization | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> dict[str, Json]:
    """The JSON document for rows of `prompt_tokens` that generate `new_tokens` each; a table goes to `log`."""
    try:
        gpu = gpu_named(name)
    except ValueError as error:
        raise ConfigError("--gpu", str(error)) from error
    if price_per_hour is not None:
        gpu = replace(gpu, price_per_hour=price_per_hour)
    if prompt_tokens < 1:
        raise ConfigError("--prompt-tokens", f"{prompt_tokens} is below 1")
    asked = {"model.quantization": quantization or "null", "model.kv_cache_dtype": kv_cache_dtype}
    for key, value in asked.items():
        if value in ON_CPUS or (value == "fp8" and not gpu.has_fp8):
            raise ConfigError(key, f"{value} does not run on {gpu.name}; leave it out")
    work = Workload(
        prompt_tokens,
        new_tokens,
        weight_itemsize=None if quantization is None else WEIGHT_BYTES[quantization],
        kv_itemsize=None if kv_cache_dtype == "auto" else 1,
    )
    longest = min(released(model).max_position_embeddings for model in MODELS)
    if work.num_prompt_tokens + work.new_tokens > longest:
        raise ConfigError(
            "sampling.max_new_tokens", f"{work.new_tokens} and {prompt_tokens} prompt tokens are above {longest}"
        )
    rows = predict_all(gpu, [(model, released(model)) for model in MODELS], work)
    missing = sorted(set(MODELS) - {row.model for row in rows})
    log(f"{gpu.name}: predicted, not measured. {gpu.source}; {gpu.price_per_hour:g} $ an hour")
    types = _types(quantization, kv_cache_dtype)
    log(
        f"prompts of {work.num_prompt_tokens} tokens, {work.new_tokens} new tokens, {types}, with CUDA graphs; "
        f"assumes {BANDWIDTH_REACHED:.0%} of the bandwidth and {FLOPS_REACHED:.0%} of the FLOPS of the data sheet"
    )
    log(_line({column: column for column in COLUMNS}))
    for row in rows:
        log(_line(_shown(row)))
    if any(row.num_gpus > 1 for row in rows):
        log("more than one GPU: layers are dealt out to them (actors.num_gpus), and steps run without CUDA graphs")
    for model in missing:
        log(f"{model}: needs more than 8 of these GPUs")
    return {
        "gpu": asdict(gpu),
        "measured": False,
        "bandwidth_reached": BANDWIDTH_REACHED,
        "flops_reached": FLOPS_REACHED,
        "prompt_tokens": work.num_prompt_tokens,
        "new_tokens": work.new_tokens,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "predictions": [asdict(row) for row in rows],
        "do_not_fit": [*missing],
    }


def _types(quantization: Quantization | None, kv_cache_dtype: KVCacheDtype) -> str:
    weights = [] if quantization is None else [f"{quantization} weights"]
    return ", ".join(["bfloat16", *weights, *([] if kv_cache_dtype == "auto" else ["fp8 keys and values"])])


def _shown(row: Prediction) -> Mapping[str, str]:
    cells = asdict(row)
    return {
        column: f"{cells[column]:.2f}" if isinstance(cells[column], float) else str(cells[column]) for column in COLUMNS
    } | {"tokens_per_s": f"{row.tokens_per_s:,.0f}", "cost_per_million": f"{row.cost_per_million:.3f}"}


def _line(cells: Mapping[str, str]) -> str:
    return "  ".join(cells[column].rjust(max(len(column), 14 if column in COLUMNS[:2] else 0)) for column in COLUMNS)
