"""Checks before fine-tuning starts: base model, schedules, pairs, output folder. Every error is a `ConfigError`.

Nothing is written here, and Ray is not started.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from actors.training.recipe import TrainConfig, num_steps
from pipeline.config.job import ConfigError
from pipeline.demo.restaurant_prompts import vary_names
from pipeline.formatting import Log
from pipeline.resolve_model import find_model, refuse_wrapped
from pipeline.store.digest import digest_adapter, digest_files
from pipeline.store.model_folder import Files
from pipeline.training.config import HOW, FinetuneConfig, FinetuneModel, TrainSection
from pipeline.training.folder import TrainingFolder, check_no_overlap
from pipeline.training.schedules import check_schedules
from pipeline.training.tokenized_pairs import (
    Corpus,
    blame,
    check_same_tokens,
    digest_pairs,
    encode,
    make_tokenizer,
    refuse_bad_rows,
    scan,
)
from pipeline.training.training_records import Fingerprint, TrainingState
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import check_folder
from skipdecode.config.model import DecoderConfig, SwiftKVConfig
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.families import OPTConfig
from skipdecode.families.llama_swiftkv import as_llama_swiftkv
from skipdecode.training.lora import LoraShape, check_start, linear_names

WARMUP_SHARE = 0.1  # of all steps, where the warm-up that was asked for has no room
CODE_VERSION = 2  # raise when a change alters the weights that the same configuration gives


@dataclass(frozen=True)
class PlannedTraining:
    """A fine-tuning that was found possible."""

    config: FinetuneConfig
    train: TrainConfig
    """The recipe, with the warm-up that `resolve_warmup` chose."""
    folder: TrainingFolder
    earlier: TrainingState | None
    """`training/run.json` of the run to resume."""
    source: Path | None
    """The folder of the model to start from; None: from scratch."""
    adapter: Path | None
    """The folder of the adapter to start from."""
    model_config: DecoderConfig
    """The model's configuration, with the schedule and the SwiftKV shape that the result will carry."""
    teacher: Path | None
    """The folder of the teacher; None: the model itself."""
    tokenizer: Files
    pairs: Corpus
    validation: Corpus
    num_steps: int
    fingerprint: Fingerprint
    lora: LoraShape | None
    """The adapter that is trained; None: the model itself."""


def plan_training(config: FinetuneConfig, log: Log) -> PlannedTraining:
    """Checks everything that needs no cluster, cheapest first."""
    folder, earlier = _check_output(config)
    source, model_config, adapter = _check_model(config.model, log)
    _check_wrapped(config, model_config)
    lora = check_lora(config, model_config)
    if lora is not None and adapter is not None:
        with blame(""):
            assert source is not None, "checked"
            check_start(adapter, lora, model_config, source)
    before, model_config = model_config.swiftkv, replace(model_config, swiftkv=_check_swiftkv(config, model_config))
    if before is not None:
        wanted = "none are asked for (model.swiftkv)" if model_config.swiftkv is None else "another shape is asked for"
        done = "are where training starts" if before == model_config.swiftkv else f"are left out: {wanted}"
        unused = "; train.fit_pairs is not used" if before == model_config.swiftkv and config.train.fit_pairs else ""
        log(f"model.source: SwiftKV's weights in {config.model.source} {done}{unused}")
    model_config = written_as(config, model_config)
    default, trained = check_schedules(config.train, model_config)
    if config.train.trainable == "all":
        model_config = replace(model_config, skip_decode=default, trained_schedules=trained, ffn_skip=None, drafts=None)
        if model_config.swiftkv and all(entry.get("prefill") == "swiftkv" for entry in config.train.schedules):
            log("train.schedules: all have prefill: swiftkv, so the model will need prefill.method=swiftkv")
    elif config.train.default_schedule is not None:  # the model stays as it is, and so does what it carries
        model_config = replace(model_config, skip_decode=default)
    teacher = _check_teacher(config, source, model_config)
    pairs, validation = scan(config.data, "path"), scan(config.data, "validation")
    pairs = replace(pairs, texts=list(vary_names(pairs.texts, config.data.made_names_share, config.train.seed)))
    files, tokenizer = make_tokenizer(source, model_config, pairs.texts, folder if earlier else None)
    if teacher is not None:
        check_same_tokens(teacher, tokenizer, model_config, pairs.texts)
    train, held_out = (encode(found, tokenizer, model_config) for found in (pairs, validation))
    for corpus, name in ((train, "path"), (held_out, "validation")):
        refuse_bad_rows(corpus, f"data.{name}", config.data)
    recipe = train_config(config.train)
    if before is not None and before == model_config.swiftkv:  # they were trained, or fitted
        recipe = replace(recipe, fit_pairs=0)
    steps = num_steps(len(train.tokens), recipe)
    recipe = replace(recipe, warmup_steps=resolve_warmup(recipe.warmup_steps, steps, earlier, log))
    log(
        f"data: {len(train.tokens)} pairs in {steps} steps of {recipe.batch_size}, {len(held_out.tokens)} pairs for "
        f"validation; {len(train.problems) + len(held_out.problems)} bad rows left out"
    )
    prints = _fingerprint(config, source, model_config, teacher, train, held_out)
    prints["train.lora"] = None if lora is None else {**vars(lora), "targets": list(lora.targets)}
    prints["model.adapter"] = None if adapter is None else digest_adapter(adapter)
    return PlannedTraining(
        config,
        recipe,
        folder,
        earlier,
        source,
        adapter,
        model_config,
        teacher,
        files,
        train,
        held_out,
        steps,
        prints,
        lora,
    )


def train_config(section: TrainSection) -> TrainConfig:
    return TrainConfig(**section.model_dump(exclude={"default_schedule", "lora"}))


def resolve_warmup(asked: int, steps: int, earlier: TrainingState | None, log: Log) -> int:
    """The number of warm-up steps: as asked, or a tenth of `steps` if the training is shorter than that.

    A resumed run keeps its own, which `training/run.json` says.
    """
    if earlier is not None:
        return earlier["warmup_steps"]
    resolved = asked if asked < steps else max(1, math.ceil(WARMUP_SHARE * steps))
    if resolved < asked:
        log(
            f"train.warmup_steps: {asked} lowered to {resolved} of {steps} steps, so that the peak learning rate is "
            "reached, and falls again"
        )
    return resolved


def _check_output(config: FinetuneConfig) -> tuple[TrainingFolder, TrainingState | None]:
    folder = TrainingFolder.open(config.output.path)
    others = [(f"data.{name}", path) for name in ("path", "validation") for path in getattr(config.data, name)]
    models = [(f"model.{name}", getattr(config.model, name)) for name in ("source", "adapter", "teacher")]
    check_no_overlap(folder, others + [(key, path) for key, path in models if path is not None])
    existing = next(path for path in (folder.root, *folder.root.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            "output.path", f"{folder.root} cannot be created: {existing} is no folder that we may write to"
        )
    return folder, folder.check(config.output.if_exists)


def _check_model(model: FinetuneModel, log: Log) -> tuple[Path | None, DecoderConfig, Path | None]:
    """The folder of the weights, their configuration, and the folder of the adapter."""
    if model.source is None:
        if model.adapter is not None:
            raise ConfigError("model.adapter", "an adapter is for a trained model; give model.source")
        with blame("model.shape: "):
            return None, OPTConfig(**model.shape.model_dump()), None
    with blame(""):
        return find_model(model.source, model.adapter, log)


def _check_wrapped(config: FinetuneConfig, model_config: DecoderConfig) -> None:
    """ConfigError for what cannot be trained with layers of transformers."""
    if config.train.lora is not None and model_config.implementation == "transformers":
        from skipdecode.model.wrapped.adapter import require_peft  # loads transformers

        with blame(""):
            require_peft("train.lora")
    if config.train.parallel == "fsdp":
        refuse_wrapped(model_config, "train.parallel", "fsdp")
    if isinstance(model_config, WrappedConfig) and model_config.has_router_loss:
        raise ConfigError(
            "model.source",
            f"output_router_logits in config.json of {config.model.source} asks for a loss that balances experts, "
            "which is not supported; set it to false to train without",
        )


def _check_swiftkv(config: FinetuneConfig, model_config: DecoderConfig) -> SwiftKVConfig | None:
    """The shape that the model is given; None: it gets none."""
    wanted = config.model.swiftkv
    if wanted is None:
        if config.train.trainable == "swiftkv":
            raise ConfigError("train.trainable", "swiftkv needs model.swiftkv, the shape of what is to be trained")
        if config.train.fit_pairs:
            raise ConfigError("train.fit_pairs", "fits weights of SwiftKV; give model.swiftkv, or leave it out")
        return None
    if config.model.source is None:
        raise ConfigError("model.swiftkv", "its weights are taken from a trained model's; give model.source")
    with blame("model."):
        shape = wanted.shape(model_config)
    if shape.num_shared(model_config) == 0:
        raise ConfigError(
            "model.swiftkv.kv_layers", f"all {shape.kv_layers} layers keep their own K/V: nothing to train"
        )
    return shape


def written_as(config: FinetuneConfig, model_config: DecoderConfig) -> DecoderConfig:
    """The configuration that will be written, as `output.model_type` says."""
    if config.output.model_type is None:
        return model_config
    try:
        return as_llama_swiftkv(model_config)
    except ValueError as error:
        raise ConfigError("output.model_type", str(error)) from error


def check_lora(config: FinetuneConfig, model_config: DecoderConfig) -> LoraShape | None:
    """The shape of the adapter; None: none is asked for. ConfigError for what it cannot be combined with."""
    asked = config.train.lora
    if asked is None:
        return None
    if config.model.source is None:
        raise ConfigError("train.lora", "an adapter is for a trained model; give model.source, or leave train.lora out")
    if config.model.swiftkv is not None or config.train.trainable != "all":
        raise ConfigError(
            "train.lora",
            "an adapter holds no SwiftKV weights; leave model.swiftkv and train.trainable out, or train.lora",
        )
    if config.train.parallel == "fsdp":
        raise ConfigError("train.parallel", "fsdp does not shard adapters; use ddp, or leave train.lora out")
    if model_config.model_type == "granite":
        raise ConfigError(
            "train.lora", "Granite's multipliers are folded into the weights that adapters change; leave train.lora out"
        )
    known = linear_names(model_config)
    targets = tuple(known) if asked.targets is None else tuple(dict.fromkeys(asked.targets))
    if unknown := [name for name in targets if name not in known]:
        raise ConfigError("train.lora.targets", f"this model has no {unknown[0]!r}; it has {', '.join(known)}")
    return LoraShape(asked.rank, 2.0 * asked.rank if asked.alpha is None else asked.alpha, targets)


def _check_teacher(config: FinetuneConfig, source: Path | None, model_config: DecoderConfig) -> Path | None:
    if config.model.teacher is None:
        is_moving = config.train.trainable == "all" and (config.train.distill or config.train.hidden)
        return source if model_config.swiftkv is not None and is_moving else None
    if not config.train.distill and not config.train.hidden:
        raise ConfigError("model.teacher", "is not asked with train.distill and train.hidden 0")
    with blame(""):
        folder = resolve_source(config.model.teacher, "model.teacher")
    with blame("model.teacher: "):
        taught = read_config(folder)
        check_folder(folder)
        if taught.vocab_size != model_config.vocab_size:
            raise ValueError(
                f"{config.model.teacher} has {taught.vocab_size} token ids, the model {model_config.vocab_size}"
            )
        if taught.max_position_embeddings < model_config.max_position_embeddings:
            raise ValueError(f"{config.model.teacher} has {taught.max_position_embeddings} positions only")
        if config.train.hidden and taught.hidden_size != model_config.hidden_size:
            raise ValueError(
                f"its states are {taught.hidden_size} wide, not {model_config.hidden_size} as train.hidden needs"
            )
    return folder


def _fingerprint(
    config: FinetuneConfig,
    source: Path | None,
    model_config: DecoderConfig,
    teacher: Path | None,
    train: Corpus,
    validation: Corpus,
) -> Fingerprint:
    entries: Fingerprint = {"code_version": CODE_VERSION, "output.dtype": stored_dtype(config, model_config)}
    recipe = config.train.model_dump(mode="json", exclude={*HOW, "lora"})
    recipe["default_schedule"] = model_config.skip_decode
    entries |= {f"train.{key}": value for key, value in recipe.items()}
    if source is None:
        entries |= {f"model.shape.{key}": value for key, value in config.model.shape.model_dump().items()}
    else:
        entries["model.files"] = digest_files(source)  # its tokenizer's too
    entries["model.swiftkv"] = None if model_config.swiftkv is None else vars(model_config.swiftkv)
    entries["model.teacher_files"] = None if teacher is None else digest_files(teacher)
    entries["data.pairs"], entries["data.validation_pairs"] = digest_pairs(train), digest_pairs(validation)
    return entries


def stored_dtype(config: FinetuneConfig, model_config: DecoderConfig) -> str:
    """The dtype of the stored weights, with the default resolved."""
    if config.output.dtype is not None or config.train.trainable == "all":
        return config.output.dtype or ("bfloat16" if config.train.lora is None else "float32")
    return model_config.torch_dtype if model_config.torch_dtype in ("float32", "bfloat16", "float16") else "float32"
