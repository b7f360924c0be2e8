"""LoRA adapters of models of transformers: PEFT reads and merges them, and adds those that are to be trained."""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from skipdecode.config.json_files import read_json

KEY = "model.adapter"  # the key that errors blame
CONFIG_FILE = "adapter_config.json"


def merge_adapter(model: Any, folder: Path) -> Any:
    """The model with the adapter in `folder` merged into its weights, in their type: what PEFT's `merge_and_unload`
    makes. On the meta device nothing is merged, and tensors that do not fit are found all the same.

    ValueError names what PEFT cannot read, tensors that do not fit, and NaN or infinity.
    """
    raw = read_json(folder / CONFIG_FILE)
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind != "LORA":
        raise ValueError(f"{KEY}: {folder / CONFIG_FILE}: peft_type is {kind!r}; only 'LORA' is supported")
    require_peft(KEY)
    import peft  # takes seconds

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing keys are an error below; meta tensors are meant
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            adapted = peft.get_peft_model(model, config)
            found = adapted.load_adapter(str(folder), adapted.active_adapter, torch_device="cpu")
        for keys, what in ((found.missing_keys, "missing"), (found.unexpected_keys, "unexpected")):
            if keys:
                raise ValueError(f"{len(keys)} tensors are {what}, the first is {min(keys)!r}")
        return model if model.device.type == "meta" else adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT and torch raise many kinds
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"{KEY}: {folder} cannot be merged into {type(model).__name__}: {text}") from error


def require_peft(key: str) -> None:
    """ValueError, which blames `key`, without PEFT."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{key}: needs the library peft for a model that transformers runs: pip install 'peft>=0.21'")


def add_adapter(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    seed: int,
    start: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Adds PEFT's LoRA modules to the linear layers with these last names, in place.

    They start from `start`, A and B by the names of these layers; without it from A that depends only on the seed, not
    on the device, and B of zeros, so that the model's outputs do not change.
    """
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=list(targets))
    config.lora_alpha = alpha  # type: ignore[assignment]  # a fraction works as well
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.device("cpu"):
        warnings.simplefilter("ignore")  # of `Conv1D`, whose weight is transposed
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for module, matrices in (start or {}).items():
        for which, value in zip("AB", matrices, strict=True):
            model.get_parameter(f"{module}.lora_{which}.default.weight").data.copy_(value)


def linears_of_folder(source: Path) -> dict[str, tuple[int, ...]]:
    """`linears_of` the model in that folder, without its weights."""
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return linears_of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def linears_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Its linear layers by name, with the shapes [out, in] of their weights."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            rows, columns = module.weight.shape
            found[name] = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
    return found
