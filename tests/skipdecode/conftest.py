"""Fixtures that the files of this folder share."""

from collections.abc import Callable

import pytest

from skipdecode.engine.static_batch import CHECK_EVERY


@pytest.fixture
def check_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda steps: monkeypatch.setitem(CHECK_EVERY, "cpu", steps)
