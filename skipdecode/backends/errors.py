"""What errors of devices mean."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or host lacks memory: torch's error, or that of the driver, which has many types."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error)
