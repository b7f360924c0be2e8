"""`jobs.distill` as a library call: adds SwiftKV's weights to a model and distils them from it.

Training is that of `finetune` with the recipe of the paper as defaults. `init_swiftkv` writes the untrained starting
point, which is enough to run and time SwiftKV, although its texts are far from the teacher's.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from actors.training.trainer import fit_swiftkv
from actors.training.workers import Pair
from pipeline.cluster.progress import LiveLine
from pipeline.config.job import ConfigError
from pipeline.formatting import Json, Log
from pipeline.resolve_model import find_model
from pipeline.store.model_folder import new_folder, tokenizer_files, written_whole
from pipeline.training.config import FinetuneConfig, FinetuneData
from pipeline.training.tokenized_pairs import encode, make_tokenizer, refuse_bad_rows, scan
from pipeline.training.training_plan import stored_dtype, train_config, written_as
from pipeline.training.training_records import fitting
from skipdecode.checkpoint.hub import DEMO
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.model import DecoderConfig

# arXiv 2410.03960, section 3.3, and its authors' training code: the model frozen, KL at temperature 2, Adam without
# weight decay, learning rate 2e-4 falling linearly to 0, one epoch. (There the warm-up is 5 % of the steps.)
DEFAULTS: dict[str, Json] = {
    "model": {"source": DEMO, "swiftkv": {}},
    "train": {
        "schedules": [{"method": "full", "prefill": "swiftkv"}],
        "trainable": "swiftkv",
        "distill": 1.0,
        "temperature": 2.0,
        "epochs": 1,
        "learning_rate": 2e-4,
        "final_learning_rate": 0.0,
        "warmup_steps": 100,
        "betas": [0.9, 0.999],
        "weight_decay": 0.0,
    },
    "output": {"path": "outputs/swiftkv"},
}


def with_defaults(tree: dict[str, Json], defaults: dict[str, Json] | None = None) -> dict[str, Json]:
    """The keys of `tree`, and of the recipe what it does not say. An empty section says nothing."""
    if defaults is None:
        tree = {key: value for key, value in tree.items() if value is not None}
    merged = dict(DEFAULTS if defaults is None else defaults)
    for key, value in tree.items():
        under = merged.get(key)
        merged[key] = with_defaults(value, under) if isinstance(value, dict) and isinstance(under, dict) else value
    return merged


def read_pairs(data: FinetuneData, folder: Path, model_config: DecoderConfig) -> list[Pair]:
    """The pairs of `data.path`, as tokens of the model in `folder`."""
    _, tokenizer = make_tokenizer(folder, model_config, [], None)
    corpus = encode(scan(data, "path"), tokenizer, model_config)
    refuse_bad_rows(corpus, "data.path", data)
    return corpus.tokens


class SwiftKVShape(TypedDict):
    kv_layers: int
    group_size: int


class NewSwiftKV(TypedDict):
    """What `init_swiftkv` reports."""

    output: str
    swiftkv: SwiftKVShape
    new_parameters: int
    parameters: int


def init_swiftkv(config: FinetuneConfig, log: Log) -> NewSwiftKV:
    """Writes the model with SwiftKV's weights beside its own: queries copied, K and V the mean over each group, or with
    `train.fit_pairs` the best ones for so many pairs of `data.path`."""
    try:
        target = new_folder(config.output.path)
    except ConfigError as error:
        raise error.renamed("output", "output.path") from error
    if config.model.source is None or config.model.swiftkv is None:
        raise ConfigError("model", "give source and swiftkv, the model and the shape of what it is given")
    try:
        folder, model_config, adapter = find_model(config.model.source, config.model.adapter, log)
    except ValueError as error:
        raise ConfigError.parse(error) from error
    try:
        shape = config.model.swiftkv.shape(model_config)
    except ValueError as error:
        raise ConfigError.parse(f"model.{error}") from error
    written_as(config, replace(model_config, swiftkv=shape))
    if model_config.swiftkv is not None:
        log(f"model.source: SwiftKV's weights in {config.model.source} are left out, and made anew from its own")
    dtype = getattr(torch, stored_dtype(config, model_config))
    fits = bool(config.train.fit_pairs and shape.num_shared(model_config))
    pairs = read_pairs(config.data, folder, model_config) if fits else []
    loaded = load_model(folder, adapter=adapter, dtype=torch.float32 if fits else dtype)
    model = loaded.with_swiftkv(shape.kv_layers, shape.group_size)
    if fits:
        lines: list[str] = []
        with LiveLine(lambda: lines[-1] if lines else None):
            recipe = train_config(config.train)
            fit_swiftkv(model, pairs, recipe, lambda line: lines.append(fitting(line["fitted"], line["fit_pairs"])))
    with written_whole(target) as staging:
        model.config = written_as(config, model.config)
        save_model(model, staging, dtype=dtype)
        for name, content in tokenizer_files(folder).items():
            (staging / name).write_bytes(content)
    extra = [] if model.swiftkv is None else [p.numel() for p in model.swiftkv.parameters()]
    total = sum(p.numel() for p in model.parameters())
    made: SwiftKVShape = {"kv_layers": shape.kv_layers, "group_size": shape.group_size}
    return {"output": str(target), "swiftkv": made, "new_parameters": sum(extra), "parameters": total}
