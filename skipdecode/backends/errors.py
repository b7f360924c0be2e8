"""What errors of devices mean."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or host lacks memory: torch's error, or that of the driver, which has many types."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)
