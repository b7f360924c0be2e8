"""Fine-tuning as a job: its configuration, and the call of the training loop on its pairs.

First form: reads the pairs into memory and trains in this process.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config import ConfigError, Section, build_config, read_tree
from pipeline.pairs import encode_pairs, read_pairs


class ModelShape(Section):
    """A model made from scratch, with a byte-level BPE tokenizer trained on the pairs."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    ffn_dim: int = 512
    max_position_embeddings: int = 2048


class FinetuneModel(Section):
    source: str | None = None
    """The checkpoint to start from; null: from scratch, in `shape`."""
    shape: ModelShape = ModelShape()


class FinetuneData(Section):
    path: str = "data/train.csv"
    validation: str = "data/validation.csv"
    prompt_column: str = "prompt"
    response_column: str = "response"
    made_names_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of E2E pairs whose names are replaced by made ones (`pipeline.demo_corpus`); 0 for any other data."""


class TrainSection(Section):
    schedules: tuple[dict[str, Any], ...] = (
        {"method": "full"},
        {"method": "skipdecode", "speedup": 2},
        {"method": "skipdecode", "speedup": 3},
        {"method": "skipdecode", "speedup": 4},
        {"method": "skipdecode", "speedup": 5},
    )
    horizon: Annotated[int, Field(ge=1)] = 63
    epochs: Annotated[float, Field(gt=0)] = 3
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Pairs per optimiser step, over all workers."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Micro-batches that a worker's share of a step is cut into."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    final_learning_rate: Annotated[float, Field(ge=0)] = 2e-5
    warmup_steps: Annotated[int, Field(ge=1)] = 300
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the loss that compares with full depth's own distribution instead of the data."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: bool = False
    """Activation checkpointing."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    log_every: Annotated[int, Field(ge=1)] = 20
    checkpoint_every: Annotated[int, Field(ge=1)] = 200
    validate_every: Annotated[int, Field(ge=1)] = 500
    validation_rows: Annotated[int, Field(ge=1)] = 512
    seed: int = 0
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""


class FinetuneConfig(Section):
    model: FinetuneModel = FinetuneModel()
    data: FinetuneData = FinetuneData()
    train: TrainSection = TrainSection()
    output: str = "outputs/finetuned"


def load_finetune_config(path: str | None, overrides: list[str]) -> FinetuneConfig:
    return build_config(FinetuneConfig, read_tree(path, overrides))


def finetune(config: FinetuneConfig, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains and writes `config.output`; gives back the record of the best validation."""
    import torch

    from actors.tokenizer import OPTTokenizer, train_tokenizer
    from actors.trainer import Hooks, TrainConfig, Weights, init_weights, model_of, train
    from pipeline.demo_corpus import vary_names
    from skipdecode.config import OPTConfig
    from skipdecode.model import OPT
    from skipdecode.weights import load_opt, save_opt

    data = config.data
    pairs = read_pairs(data.path, data.prompt_column, data.response_column)
    pairs = list(vary_names(pairs, data.made_names_share, config.train.seed))
    validation = read_pairs(data.validation, data.prompt_column, data.response_column)
    torch.set_num_threads(config.train.threads or os.cpu_count() or 1)
    if config.model.source is None:
        opt_config = OPTConfig(**config.model.shape.model_dump())
        train_tokenizer((text for pair in pairs for text in pair), opt_config.vocab_size, config.output)
        model = OPT(opt_config)
        init_weights(model, config.train.seed)
        tokenizer = OPTTokenizer(config.output, opt_config)
    else:
        try:
            model = load_opt(config.model.source)
            opt_config = model.config
            tokenizer = OPTTokenizer(config.model.source, opt_config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        _copy_tokenizer(config.model.source, config.output)
    encoded = encode_pairs(tokenizer, pairs, opt_config.eos_token_id)
    encoded_validation = encode_pairs(tokenizer, validation, opt_config.eos_token_id)
    longest = max(len(p) + len(r) for p, r in encoded + encoded_validation)
    if longest > opt_config.max_position_embeddings:
        raise ConfigError(
            f"data: the longest pair has {longest} tokens, the model {opt_config.max_position_embeddings} positions"
        )
    fields = config.train.model_dump(exclude={"threads"})

    def keep_best(weights: Weights, record: dict[str, Any]) -> None:
        stored = replace(
            opt_config, skip_decode={"method": "skipdecode", "speedup": 2, "horizon": config.train.horizon}
        )
        save_opt(model_of(weights, stored), config.output, dtype=torch.bfloat16)

    hooks = Hooks(report, keep_best, checkpoint=lambda state, record: None)
    best = train(model, encoded, encoded_validation, TrainConfig(**fields), hooks)
    return {"output": config.output, "num_pairs": len(pairs), "best": best}


def _copy_tokenizer(source: str, folder: str) -> None:
    from skipdecode.weights import resolve_source

    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"):
        found = resolve_source(source) / name
        if found.is_file():
            (Path(folder) / name).write_bytes(found.read_bytes())
