"""LoRA adapters as PEFT saves them, with random A and B, and what they make of a Hugging Face model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

SEED = 3


def write_adapter(folder: Path, model: PreTrainedModel, ranks: Mapping[str, int], **keys: Any) -> Path:
    """The folder. `ranks`: of the modules that are changed, by whole name; `keys`: of adapter_config.json, over those
    of rank 4, alpha 8 on `q_proj`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "anything", "r": 4}
    config |= {"lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "fan_in_fan_out": False}
    config |= {"use_rslora": False, "use_dora": False, "modules_to_save": None, "lora_dropout": 0.05}
    config |= {"inference_mode": True, "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config | keys))
    generator, tensors = torch.Generator().manual_seed(SEED), dict[str, torch.Tensor]()
    for name, rank in ranks.items():
        rows, columns = model.get_submodule(name).weight.shape
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def merge_by_hand(model: PreTrainedModel, folder: Path, scales: Mapping[str, float]) -> PreTrainedModel:
    """The model, changed in place: W + scale * B A for the modules of `scales`, which are all that the file has."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, scale in scales.items():
        a, b = (tensors.pop(f"base_model.model.{name}.lora_{which}.weight") for which in "AB")
        model.get_submodule(name).weight += scale * b @ a
    assert not tensors
    return model
