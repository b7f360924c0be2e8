"""What a retry refuses to take for its own; the verb on real runs is in `test_verify`."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from pipeline.config.job import ConfigError
from pipeline.generate import retry


@pytest.mark.parametrize("num_left", [3, 1])
def test_rows_that_are_neither_good_nor_failed_are_not_retried(num_left: int) -> None:
    """They were lost: retried as if they had failed, their files would be exchanged for files of other rows."""
    planned: Any = SimpleNamespace(folder=SimpleNamespace(shown="out/run"))
    state: Any = {"sessions": [{"id": "s1"}]}
    work = SimpleNamespace(num_left=num_left, plan=None)
    with (
        patch.object(retry, "find_work", lambda *_, **__: work),
        patch.object(retry, "stream_rows", lambda *_: pytest.fail("it generates")),
        pytest.raises(ConfigError, match=r"out/run: -?1 rows are neither good nor failed; jobs\.verify names them"),
    ):
        retry._generate(planned, state, [], 2, None, print)  # type: ignore[arg-type]
