"""`jobs.distill` as a library call. First form: a SwiftKV checkpoint whose new weights are the teacher's, not trained.

Where distillation starts, and enough to run, to time and to test SwiftKV; its texts are far from the teacher's.
"""

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from pipeline.config import ConfigError, ModelConfig, Section
from pipeline.training_folder import TOKENIZER_FILES
from skipdecode.config import OPTConfig, SwiftKVConfig
from skipdecode.hub import resolve_source
from skipdecode.weights import check_folder, load_opt, save_opt


class SwiftKVSection(Section):
    kv_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers with K/V of their own, from the bottom; null: half of them."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """Neighbouring layers above that share one K/V (AcrossKV); divides their number."""


class DistillConfig(Section):
    model: ModelConfig = ModelConfig()
    """The teacher; `dtype` auto: as it is stored."""
    swiftkv: SwiftKVSection = SwiftKVSection()
    output: Annotated[str, Field(min_length=1)] = "outputs/swiftkv"


def init_swiftkv(config: DistillConfig) -> dict[str, Any]:
    """Writes the teacher with SwiftKV's weights beside its own: queries copied, K and V the mean over each group."""
    target = Path(config.output).expanduser()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"output: {target} exists already; choose another output, or remove it")
    try:
        folder = resolve_source(config.model.source)
        opt = OPTConfig.from_folder(folder)
        check_folder(folder)
        if opt.swiftkv is not None:
            raise ValueError(f"model.source: {config.model.source} has SwiftKV's weights already")
        kv_layers = config.swiftkv.kv_layers or -(-opt.num_hidden_layers // 2)
        shape = SwiftKVConfig(kv_layers, config.swiftkv.group_size)
        shape.check(opt)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    dtype = getattr(torch, opt.torch_dtype if config.model.dtype == "auto" else config.model.dtype)
    model = load_opt(folder, dtype=dtype).with_swiftkv(shape.kv_layers, shape.group_size)
    staging = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    save_opt(model, staging)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copy2(folder / name, staging / name)
    if target.is_dir():
        target.rmdir()  # empty, as was checked
    os.replace(staging, target)
    extra = [] if model.swift is None else [p.numel() for p in model.swift.parameters()]
    total = sum(p.numel() for p in model.parameters())
    return {"output": str(target), "swiftkv": vars(shape), "new_parameters": sum(extra), "parameters": total}
