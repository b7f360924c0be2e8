"""What a `Generator` is made of: the model, its schedule, the device, and how batches are cut."""

from dataclasses import dataclass
from typing import Any

from skipdecode.config.model import Quantization
from skipdecode.cost.gpu_specs import MEMORY_SHARE


@dataclass(frozen=True)
class GeneratorConfig:
    source: str
    decode: dict[str, Any]
    """The `decode:` mapping, already resolved (never empty)."""
    prefill: str = "full"
    """`swiftkv`: the prompt stops where the checkpoint's SwiftKV says."""
    tokenizer: str | None = None
    adapter: str | None = None
    """The folder of a LoRA adapter for `source`."""
    dtype: str = "auto"
    quantization: Quantization | None = None
    device: str = "auto"
    num_devices: int = 1
    """That the layers lie on, in turns (`skipdecode.model.pipeline_parallel`): of a model that does not fit one of
    them."""
    num_threads: int | None = None
    batch_size: int | None = None
    """None: as many rows as fit, at most MAX_BATCH_ROWS."""
    length_buckets: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    deterministic: bool = False
    baseline_fraction: float = 0.0
    shares_prefixes: bool = False
    """What prompts of a window begin with alike is run once; not where `deterministic`, since whom a row shares with
    must not choose a shape."""
    memory_share: float = MEMORY_SHARE
    """Of a GPU's memory, for weights and caches."""
    has_graphs: bool = True
    """Whether decode steps are captured, on a GPU; their caches then take all of the share."""
