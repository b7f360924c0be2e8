"""What a worker's `Generator` is made with."""

from dataclasses import dataclass
from typing import Any

from skipdecode.config.model import KVCacheDtype, Quantization, WantedImplementation
from skipdecode.cost.gpu_specs import MEMORY_SHARE


@dataclass(frozen=True)
class GeneratorConfig:
    source: str
    decode: dict[str, Any]
    """The `decode:` mapping, already resolved (never empty)."""
    prefill: str = "full"
    """`swiftkv`: the prompt stops at the layer that the checkpoint's SwiftKV names."""
    tokenizer: str | None = None
    adapter: str | None = None
    """The folder of a LoRA adapter for `source`."""
    implementation: WantedImplementation = "auto"
    dtype: str = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    device: str = "auto"
    num_devices: int = 1
    """Devices that the layers are spread over (`skipdecode.model.pipeline_parallel`), for a model too large for one."""
    num_threads: int | None = None
    batch_size: int | None = None
    """None: as many rows as fit into memory, at most MAX_BATCH_ROWS."""
    length_buckets: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    deterministic: bool = False
    """Fixed batch shapes, so that a row's bits do not depend on the rows around it."""
    baseline_fraction: float = 0.0
    """Share of the batches that are also decoded at full depth."""
    shares_prefixes: bool = False
    """Run common prefixes of prompts once; ignored if `deterministic`, since it changes the shapes of batches."""
    memory_share: float = MEMORY_SHARE
    """The share of a GPU's memory for weights and caches."""
    has_graphs: bool = True
    """Capture decode steps as CUDA graphs, whose caches then take the whole share."""
    require_kernels: bool = False
    """Refuse to load where decoding would be slower than it could (`Generator.why_slow`)."""

    def precision(self, dtype: str) -> str:
        """The numeric formats of a model in `dtype` for display: `bfloat16`, or `bfloat16, int8 weights`."""
        parts = [dtype]
        if self.quantization is not None:
            parts.append(f"{self.quantization} weights")
        if self.kv_cache_dtype != "auto":
            parts.append(f"{self.kv_cache_dtype} keys and values")
        return ", ".join(parts)
