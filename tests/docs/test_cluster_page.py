"""The first commands of docs/cluster.md, on a machine where nobody has made a token yet."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands

pytestmark = pytest.mark.slow
WHAT_THE_HEAD_ASKS = """
from ray._private.authentication import authentication_token_setup as setup
setup.maybe_enable_token_auth_if_token_available()
setup.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
"""
"""The first steps of `ray start` (ray.scripts.scripts), which would then listen on every interface."""


def test_the_head_finds_the_token_that_the_page_makes(tmp_path: Path) -> None:
    mode, token, head = [command.text for command in commands(ROOT / "docs" / "cluster.md")][:3]
    assert head == "ray start --head"
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    env |= {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    head = f"{shlex.quote(sys.executable)} -c {shlex.quote(WHAT_THE_HEAD_ASKS)}"

    def run(*lines: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["bash", "-ec", "\n".join(lines)], env=env, capture_output=True, text=True, timeout=300)

    refused = run(mode, head)
    assert refused.returncode != 0
    assert "AuthenticationError" in refused.stderr
    done = run(mode, token, head)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
