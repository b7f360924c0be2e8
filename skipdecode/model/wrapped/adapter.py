"""LoRA adapters of models of transformers, which PEFT reads and merges."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

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
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{KEY}: needs the library peft for a model that transformers runs: pip install 'peft>=0.21'")
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
