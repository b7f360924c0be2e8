"""The device of a measurement."""

import pytest
import torch

from pipeline.cluster.machine import device_to_measure
from pipeline.config.tree import ConfigError


def test_a_device_that_torch_does_not_see_is_bad_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"^device: torch sees no CUDA device; use cpu$"):
        device_to_measure("cuda")
    assert device_to_measure("cpu") == torch.device("cpu")
