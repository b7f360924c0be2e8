"""Finds and checks the checkpoint that a configuration names, and resolves its schedule. All errors are
`ConfigError`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ray

from actors.loading import DRAFTS_NEED_SAME_BITS
from actors.memory import DETERMINISTIC_ROWS
from pipeline.config.job import ConfigError, JobConfig
from pipeline.formatting import Json, Log
from skipdecode.backends.choice import int8_misfit
from skipdecode.backends.cuda_fp8 import STEP as FP8_STEP
from skipdecode.checkpoint.hub import pin, resolve_source
from skipdecode.checkpoint.lora_adapter import resolve_adapter
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import ADAPTER_NEEDS_VALUES, adapted, check_blocks, check_folder
from skipdecode.config.model import DecoderConfig, KVCacheDtype, Quantization, WantedImplementation
from skipdecode.config.structured_outputs import StructuredOutputs
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.kv_scales import why_no_scales
from skipdecode.schedules.from_config import check_whole_layers, complete_ffn_skip, make_schedule
from skipdecode.schedules.lossless import KEYS as LOSSLESS_KEYS
from skipdecode.schedules.lossless import Lossless, stored_drafts
from skipdecode.schedules.schedule import Schedule
from skipdecode.schedules.trained import why_untuned

PrefillMethod = Literal["full", "swiftkv"]


@dataclass(frozen=True)
class ResolvedModel:
    """A checkpoint that can run, and how it will be decoded."""

    folder: Path
    source: str
    """Its name in the configuration."""
    config: DecoderConfig
    decode: dict[str, Json]
    prefill: PrefillMethod = "full"
    adapter: Path | None = None
    """The folder of the LoRA adapter to merge into it."""
    bos_text: str = ""
    """What its tokenizer puts before every prompt, such as `<s>`."""


def check_model(config: JobConfig, log: Log) -> ResolvedModel:
    """Finds the checkpoint, checks its files and the keys that depend on it, and resolves the schedule."""
    try:
        asked = config.model
        folder, model_config, adapter = find_model(asked.source, asked.adapter, log, asked.implementation)
        if asked.quantization == "int4" and check_blocks(folder, model_config) and adapter is not None:
            raise ConfigError("model.adapter", ADAPTER_NEEDS_VALUES)
        own = config.model.tokenizer
        tokenizer = Tokenizer(resolve_source(own, "model.tokenizer") if own else folder, model_config)
        decode = resolve_decode(config, model_config, log)
        new = config.sampling.max_new_tokens
        schedule = make_schedule(decode, num_layers=model_config.num_hidden_layers, max_new_tokens=new)
        prefill = resolve_prefill(config, model_config)
        check_lossless(decode, prefill)
        if model_config.implementation == "transformers":
            check_wrapped(config)
        if config.actors.num_devices > 1:
            check_placement(config, schedule, prefill)
        if prefill == "swiftkv" and model_config.swiftkv is None:
            raise ConfigError(
                "prefill.method",
                "'swiftkv' needs a checkpoint that carries SwiftKV's weights, and config.json of this "
                "one has no swiftkv; jobs.distill makes one that does, and prefill.method=full needs none",
            )
        if new >= model_config.max_position_embeddings:
            raise ConfigError(
                "sampling.max_new_tokens",
                f"{new} leaves no room for a prompt in the model's {model_config.max_position_embeddings} positions",
            )
        check_tokens(config, model_config, tokenizer)
        model = ResolvedModel(folder, config.model.source, model_config, decode, prefill, adapter, tokenizer.bos_text)
        remarks = [foreign_swiftkv(model, config), untuned(model, config), full_by_default(model, config)]
    except ValueError as error:
        raise ConfigError.parse(error) from error
    for text in filter(None, remarks):
        log(text)
    return model


def check_tokens(config: JobConfig, model_config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """ConfigError for token ids in `sampling` that the model does not have, and for structured outputs that do not
    compile."""
    for key, tokens in (("logit_bias", config.sampling.logit_bias), ("stop_token_ids", config.sampling.stop_token_ids)):
        if tokens and (largest := max(tokens)) >= model_config.vocab_size:
            raise ConfigError(
                f"sampling.{key}", f"token {largest} is not in the model's vocabulary of {model_config.vocab_size}"
            )
    if (asked := config.sampling.structured_outputs) is not None:
        try:
            tokenizer.grammars.compile(StructuredOutputs.of(asked))
        except ValueError as error:
            raise ConfigError.parse(f"sampling.{error}") from error


def foreign_swiftkv(model: ResolvedModel, config: JobConfig) -> str | None:
    """A warning where an adapter is merged into a model whose SwiftKV weights were trained without it."""
    if model.prefill != "swiftkv" or model.adapter is None:
        return None
    return (
        f"warning: prefill.method=swiftkv: SwiftKV's weights in {model.source} were taken from it without "
        "model.adapter, so texts may differ from those of a whole prompt; prefill.method=full needs none"
    )


def untuned(model: ResolvedModel, config: JobConfig) -> str | None:
    """A warning where layers are skipped that the checkpoint was not, to all that is known, tuned without; else None.

    Lossless decoding needs no warning, since full depth verifies it, nor does FFN-SkipLLM, which needs no tuning.
    """
    name = model.source + ("" if config.model.adapter is None else f" with {config.model.adapter}")
    base = {key: value for key, value in model.decode.items() if key not in ("ffn_skip", *LOSSLESS_KEYS)}
    num_steps = config.sampling.max_new_tokens - 1  # the first token comes from the prompt, at full depth
    if model.decode.get("lossless") or num_steps < 1:
        return None
    schedule = make_schedule(base, num_layers=model.config.num_hidden_layers, max_new_tokens=num_steps + 1)
    why = why_untuned(model.config, str(base["method"]), schedule.step(num_steps - 1))
    return why and (
        f"warning: {name} {why}: its text may be nonsense (agreement in the report compares it with full depth); tune "
        "it with jobs.finetune, or use decode.method=full, or decode.lossless=true"
    )


def full_by_default(model: ResolvedModel, config: JobConfig) -> str | None:
    """How to skip layers, for a run at full depth because neither the job nor the checkpoint names a schedule; None
    for any other run."""
    is_default = model.config.skip_decode is None and not config.decode.is_given
    if not is_default or config.sampling.max_new_tokens < 2:  # the prompt gives the first token
        return None
    return (
        "full depth: this checkpoint carries no schedule; decode.speedup=2 skips layers, best after jobs.finetune "
        "(docs/training.md)"
    )


def find_model(
    source: str, adapter: str | None, log: Log, implementation: WantedImplementation = "auto"
) -> tuple[Path, DecoderConfig, Path | None]:
    """The folders of a model and its adapter and the configuration of both; ValueError where they do not fit.

    Says what of the model's files has no effect (`check_folder`).
    """
    folder = resolve_source(source)
    adapter_folder = None if adapter is None else resolve_adapter(adapter)
    model_config = read_config(folder, implementation)
    for remark in check_folder(folder, adapter_folder, model_config):
        log(f"model.source: {remark}")
    return folder, model_config if adapter_folder is None else adapted(model_config, adapter_folder), adapter_folder


def resolve_decode(config: JobConfig, model_config: DecoderConfig, log: Log) -> dict[str, Json]:
    """The `decode:` mapping that a job runs: its own, else the checkpoint's, else full depth.

    With `lossless`, where the schedule only drafts, the checkpoint's calibrated drafts come before its schedule, and
    SkipDecode at speedup 2 takes the place of full depth. `ffn_skip` and `lossless` themselves always come from the
    job, on top of whichever schedule holds. `prefix` is not part of the mapping.
    """
    given = config.decode.model_dump(exclude_none=True, exclude={"prefix"})
    check_whole_layers(model_config, given)
    skip, lossless = given.pop("ffn_skip", None), {key: given.pop(key) for key in LOSSLESS_KEYS}
    drafts = stored_drafts(model_config) if lossless["lossless"] else None
    if drafts is not None:  # workers read them too, whatever the job names
        check_drafts(drafts.decode, model_config)
    if given:
        decode: dict[str, Json] = {"method": "skipdecode"} | given
    else:
        stored = model_config.skip_decode if drafts is None else drafts.decode
        if stored is None:
            stored = {"method": "skipdecode", "speedup": 2} if lossless["lossless"] else {"method": "full"}
        decode = {key: value for key, value in stored.items() if key not in LOSSLESS_KEYS}
    if skip is not None:
        decode |= {"ffn_skip": resolve_ffn_skip(skip, decode, resolve_prefill(config, model_config), model_config, log)}
    return decode | {
        key: value for key, value in lossless.items() if lossless["lossless"] or value not in (False, "auto")
    }


def resolve_prefill(config: JobConfig, model_config: DecoderConfig) -> PrefillMethod:
    """`prefill.method`, else what the checkpoint was released to run with; drafts are for the whole prompt."""
    default: PrefillMethod = "full" if config.decode.lossless else model_config.default_prefill
    return config.prefill.method or default


def check_drafts(decode: dict[str, Json], model_config: DecoderConfig) -> None:
    """ConfigError where the drafts that a checkpoint carries are not a schedule for it."""
    try:
        make_schedule(decode, num_layers=model_config.num_hidden_layers, max_new_tokens=1)
    except ValueError as error:
        raise ConfigError(
            "decode.lossless",
            f"drafts in the checkpoint's config.json: {error}; run jobs.calibrate target=drafts again, or take drafts "
            "out of config.json",
        ) from error


def check_lossless(decode: dict[str, Json], prefill: str) -> None:
    """ConfigError for what `decode.lossless` cannot be combined with, besides what `make_schedule` refuses."""
    if decode.get("lossless") and prefill == "swiftkv":
        raise ConfigError(
            "decode.lossless", "full depth has no SwiftKV prompt; use prefill.method=full, or decode.lossless=false"
        )


def check_wrapped(config: JobConfig) -> None:
    """ConfigError for what layers of transformers cannot do yet. `decode.ffn_skip` is refused with the schedule."""
    asked = {
        "model.quantization": (
            config.model.quantization == "fp8",
            "int8 is for CPUs; null keeps the weights as they are",
        ),
        "model.kv_cache_dtype": (config.model.kv_cache_dtype != "auto", "auto stores keys and values as they are"),
        "actors.num_gpus": (config.actors.num_devices > 1, "use actors.num_gpus=1"),
        "sampling.deterministic": (config.sampling.deterministic, "use sampling.deterministic=false"),
    }
    for key, (is_asked, remedy) in asked.items():
        if is_asked:
            raise ConfigError(
                key, f"is not supported for models that run by way of transformers (model.implementation); {remedy}"
            )


def refuse_wrapped(model_config: DecoderConfig, key: str, what: str) -> None:
    """ConfigError blaming `key` if layers of transformers, which cannot do `what`, run the model."""
    if model_config.implementation == "transformers":
        raise ConfigError(
            key, f"{what} needs a model of a family of ours (docs/models.md), and transformers would run this one"
        )


def check_exact_drafts(
    decode: dict[str, Json], deterministic: bool, model_config: DecoderConfig, device: str, lacking: str | None
) -> None:
    """ConfigError where workers on `device` could not draft under `sampling.deterministic`.

    `lacking` names a node without kernels for the model's type; None if there is none or it is not known yet.
    """
    if not (deterministic and decode.get("lossless")):
        return
    odd = [f"{key} {width} is no multiple of 32" for key, width in product_inputs(model_config) if width % 32]
    if model_config.embed_dim != model_config.hidden_size:
        odd.append("torch multiplies before and after the layers of this model")
    why = f"this would decode on {device}" if device != "cpu" else odd[0] if odd else lacking
    if why is not None:
        raise ConfigError(
            "decode.lossless",
            f"{DRAFTS_NEED_SAME_BITS}; {why}; use sampling.deterministic=false, or decode.lossless=false",
        )


def check_placement(config: JobConfig, schedule: Schedule, prefill: PrefillMethod) -> None:
    """ConfigError for what cannot run with the layers split over several GPUs."""
    gpus = config.actors.num_devices
    if schedule.num_layers < gpus:
        raise ConfigError("actors.num_gpus", f"{gpus} GPUs for {schedule.num_layers} layers; use at most as many")
    cause = None
    if prefill == "swiftkv":
        cause = "prefill.method", "SwiftKV writes the keys of many layers at once; use prefill.method=full"
    elif isinstance(schedule, Lossless):
        cause = "decode.lossless", "rows that get several tokens at a time go through one device; use lossless=false"
    elif config.sampling.deterministic and deterministic_rows(config) % gpus:
        rows = deterministic_rows(config)
        cause = "sampling.deterministic", f"batches of {rows} rows have no {gpus} equal parts; set actors.batch_size"
    elif not schedule.is_static:
        cause = "decode.ffn_skip.mode", "rows decide on one device; use mode calibrated or fixed"
    if cause is not None:
        key, reason = cause
        raise ConfigError(key, f"{reason}, or actors.num_gpus=1 instead of {gpus}")


def deterministic_rows(config: JobConfig) -> int:
    """The number of rows of every batch under `sampling.deterministic`."""
    rows = config.actors.batch_size
    return DETERMINISTIC_ROWS if rows == "auto" else rows


def resolve_ffn_skip(
    skip: dict[str, Json], decode: dict[str, Json], prefill: str, model_config: DecoderConfig, log: Log
) -> dict[str, Json]:
    """`decode.ffn_skip` with its defaults, and with the checkpoint's own layers in mode `calibrated`.

    `decode` and `prefill` are the schedule that it goes on top of.
    """
    if skip["mode"] != "calibrated":
        return complete_ffn_skip(skip)
    if "layers" in skip:
        raise ConfigError("decode.ffn_skip.layers", "has no meaning with mode 'calibrated'; use mode 'fixed'")
    band = model_config.ffn_skip
    if band is None:
        raise ConfigError(
            "decode.ffn_skip.mode",
            "this checkpoint carries no calibrated layers (ffn_skip in its config.json, which hold without a "
            "model.adapter alone); jobs.calibrate makes one that does, and mode 'row' needs none",
        )
    if not isinstance(band, dict) or not {"num_layers", "layers", "warmup_tokens", "decode", "prefill"} <= band.keys():
        raise ConfigError(
            "decode.ffn_skip.mode",
            "ffn_skip in the checkpoint's config.json is not what jobs.calibrate writes, or was made by a version "
            "before 1.0; run jobs.calibrate again",
        )
    if band["num_layers"] != model_config.num_hidden_layers:
        raise ConfigError(
            "decode.ffn_skip.mode",
            f"the layers in ffn_skip of the checkpoint's config.json were calibrated for "
            f"{band['num_layers']} layers, and this model has {model_config.num_hidden_layers}",
        )
    before, now = (band["decode"], band["prefill"]), (decode, prefill)
    if before != now:
        names = [f"{decode} with prefill {prefill}" for decode, prefill in (before, now)]
        log(
            f"decode.ffn_skip: the layers were calibrated on top of {names[0]}; on top of {names[1]} their share "
            "and what they cost are others"
        )
    return complete_ffn_skip({"layers": band["layers"], "warmup_tokens": band["warmup_tokens"]} | skip)


def check_quantization(
    quantization: Quantization | None, model_config: DecoderConfig, dtype: str, device: str, lacking: str | None
) -> None:
    """ConfigError where workers on `device` in `dtype` could not load the model quantized like this. What their GPUs
    can do is only known there.

    `lacking` says why their CPUs have no kernels for such weights; None if they have, or it is not known yet.
    """
    if quantization is None:
        return
    if quantization == "fp8":
        _check_fp8_weights(model_config, dtype, device)
        return
    if device != "cpu" or dtype not in ("bfloat16", "float32")[: 2 if quantization == "int4" else 1]:
        where = (
            "float32 or bfloat16 on CPUs with AVX2"
            if quantization == "int4"
            else "bfloat16 on CPUs with AMX, or with AVX-512 that has BF16 and VNNI"
        )
        raise ConfigError(
            "model.quantization",
            f"{quantization} weights are for {where}, and this would decode in {dtype} on {device}; null keeps the "
            "weights as they are",
        )
    if lacking is not None:
        raise ConfigError(
            "model.quantization",
            f"{quantization} weights need a back end that has kernels for them; {lacking}; null keeps the weights as "
            "they are",
        )
    for key, width in product_inputs(model_config):
        problem = int8_misfit(width) if quantization == "int8" else "no multiple of 32" if width % 32 else None
        if problem is not None:
            raise ConfigError("model.quantization", f"{key} {width} of this model is {problem}; null takes it")


def _check_fp8_weights(model_config: DecoderConfig, dtype: str, device: str) -> None:
    if device != "cuda" or dtype != "bfloat16":
        raise ConfigError(
            "model.quantization",
            f"fp8 weights are for bfloat16 on GPUs of compute capability 8.9 and later, and this would decode in "
            f"{dtype} on {device}; null keeps the weights as they are",
        )
    for key, width in product_inputs(model_config):
        if width % FP8_STEP:
            problem = f"{key} {width} of this model is no multiple of {FP8_STEP}, as fp8 weights need it"
            raise ConfigError("model.quantization", f"{problem}; null takes it")


def check_kv_cache_dtype(kv_cache_dtype: KVCacheDtype, model_config: DecoderConfig, dtype: str, device: str) -> None:
    """ConfigError where workers on `device` in `dtype` could not store keys and values in this type. What their GPUs
    can do is only known there."""
    if kv_cache_dtype == "auto":
        return
    if device != "cuda" or dtype != "bfloat16":
        raise ConfigError(
            "model.kv_cache_dtype",
            f"{kv_cache_dtype} is for bfloat16 on GPUs of compute capability 8.9 and later, and this would decode in "
            f"{dtype} on {device}; auto stores keys and values as they are",
        )
    if (problem := why_no_scales(model_config)) is not None:
        raise ConfigError(
            "model.kv_cache_dtype", f"{kv_cache_dtype} has no scales for this model: {problem}; auto takes it"
        )


def product_inputs(model_config: DecoderConfig) -> list[tuple[str, int]]:
    """The input widths of a model's matrix products, by the keys of its `config.json` that give them, or by the names
    of linear layers of transformers."""
    if isinstance(model_config, WrappedConfig):
        return [*model_config.linears, ("hidden_size", model_config.hidden_size)]
    ffn = "intermediate_size" if "intermediate_size" in model_config.sizes else "ffn_dim"
    return [
        ("hidden_size", model_config.hidden_size),
        (ffn, model_config.ffn_dim),
        ("word_embed_proj_dim", model_config.embed_dim),
        ("num_attention_heads * head_dim", model_config.q_dim),
    ]


def adapter_path(asked: str | None, model: ResolvedModel) -> str | None:
    """The path by which a worker finds the adapter that the configuration names `asked`."""
    return None if asked is None or model.adapter is None else worker_path(asked, model.adapter)


def worker_path(source: str, folder: Path) -> str:
    """The path by which a worker finds the model: relative if it travels with the job's working_dir, else absolute, or
    the hub id with its revision."""
    if not Path(source).expanduser().exists():
        return pin(source, folder)  # a hub id: each node fetches it once
    has_working_dir = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    return source if has_working_dir and not Path(source).is_absolute() else str(folder.resolve())
