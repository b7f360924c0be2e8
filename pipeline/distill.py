"""`jobs.distill` as a library call. First form: a SwiftKV checkpoint whose new weights are the teacher's, not trained.

Where distillation starts, and enough to run, to time and to test SwiftKV; its texts are far from the teacher's.
"""

import shutil
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from pipeline.checks import new_folder, written_whole
from pipeline.config import ConfigError, Section, SwiftKVSection
from pipeline.training_folder import TOKENIZER_FILES
from skipdecode.config import OPTConfig
from skipdecode.hub import resolve_source
from skipdecode.weights import check_folder, load_opt, save_opt


class TeacherConfig(Section):
    source: str = "models/opt-e2e"
    """A folder or a hub id in Hugging Face OPT layout; its tokenizer goes along."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights that are written; auto: as they are stored."""


class DistillConfig(Section):
    model: TeacherConfig = TeacherConfig()
    swiftkv: SwiftKVSection = SwiftKVSection()
    output: Annotated[str, Field(min_length=1)] = "outputs/swiftkv"


def init_swiftkv(config: DistillConfig) -> dict[str, Any]:
    """Writes the teacher with SwiftKV's weights beside its own: queries copied, K and V the mean over each group."""
    target = new_folder(config.output)
    try:
        folder = resolve_source(config.model.source)
        opt = OPTConfig.from_folder(folder)
        check_folder(folder)
        if opt.swiftkv is not None:
            raise ValueError(f"model.source: {config.model.source} has SwiftKV's weights already")
        shape = config.swiftkv.shape(opt)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stored = opt.torch_dtype if opt.torch_dtype in ("float32", "bfloat16", "float16") else "float32"
    dtype = getattr(torch, stored if config.model.dtype == "auto" else config.model.dtype)
    model = load_opt(folder, dtype=dtype).with_swiftkv(shape.kv_layers, shape.group_size)
    with written_whole(target) as staging:
        save_opt(model, staging)
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copy2(folder / name, staging / name)
    extra = [] if model.swift is None else [p.numel() for p in model.swift.parameters()]
    total = sum(p.numel() for p in model.parameters())
    return {"output": str(target), "swiftkv": vars(shape), "new_parameters": sum(extra), "parameters": total}
