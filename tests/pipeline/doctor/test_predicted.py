"""`doctor --gpu`: a table for people, a document for programs, and refusals that name the key."""

import json

import pytest

from jobs.doctor import main

BAD = 2


def test_a_gpu_that_is_not_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "h100", "--price-per-hour", "6"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["measured"] is False
    assert document["gpu"]["price_per_hour"] == 6
    assert document["new_tokens"] == 512
    by_model = {(row["model"], row["schedule"]): row for row in document["predictions"]}
    assert by_model["opt-66b", "full"]["num_gpus"] == 3
    assert by_model["opt-1.3b", "full"]["tokens_per_s"] > 10_000
    assert "predicted, not measured" in err
    assert "layers are dealt out to them (actors.num_gpus)" in err
    assert "llama-3.1-8b" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu", "h900"], "--gpu: no GPU 'h900'"),
        (["--gpu", "h100", "sampling.max_new_tokens=2000"], "sampling.max_new_tokens: 2000 and 256 prompt tokens"),
        (["--gpu", "h100", "--prompt-tokens", "0"], "--prompt-tokens: 0"),
    ],
)
def test_refusals(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == BAD
    assert named in capsys.readouterr().err
