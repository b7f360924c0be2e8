"""`jobs.finetune` on a toy task: it learns, keeps the schedule in the checkpoint, and Hugging Face opens the result."""

import json
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM

from jobs.finetune import main
from skipdecode.config import OPTConfig
from skipdecode.generate import Request, generate
from skipdecode.plan import make_schedule
from skipdecode.sampling import Sampling
from skipdecode.weights import load_opt

SHAPE = "model.shape={vocab_size: 300, hidden_size: 32, num_hidden_layers: 6, num_attention_heads: 2, ffn_dim: 64}"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"say {word}", "response": word * 2} for word in ("ab", "cd", "ef", "gh")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 64))
    return path


def finetune(pairs: Path, output: Path, *more: str) -> int:
    data = f"data={{path: {pairs}, validation: {pairs}}}"
    train = "train={epochs: 60, batch_size: 64, learning_rate: 0.01, warmup_steps: 10, \
        validate_every: 60, horizon: 7}"
    return main(["--config", "/dev/null", SHAPE, data, train, "workers.threads=1", "-o", str(output), *more])


def test_it_learns_every_speed(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    assert finetune(pairs, folder) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["best"]["validation_loss"]) == {
        "full",
        "skipdecode 2",
        "skipdecode 3",
        "skipdecode 4",
        "skipdecode 5",
    }
    assert all(loss < 0.05 for loss in result["best"]["validation_loss"].values()), result["best"]
    config = OPTConfig.from_folder(folder)
    assert config.skip_decode == {"method": "skipdecode", "speedup": 2, "horizon": 7}
    assert OPTForCausalLM.from_pretrained(folder).config.skip_decode == config.skip_decode
    from actors.tokenizer import OPTTokenizer

    tokenizer, model = OPTTokenizer(folder, config), load_opt(folder, dtype=torch.float32)
    for decode in ({"method": "full"}, {"speedup": 2}, {"speedup": 5}):
        schedule = make_schedule(decode, num_layers=6, max_new_tokens=8)
        request = Request("", tokenizer.encode(["say ef"])[0], Sampling(max_new_tokens=8))
        assert tokenizer.decode(generate(model, [request], schedule).completions[0].tokens) == "efef"


@pytest.mark.parametrize(
    ("line", "override", "message"),
    [
        ('{"prompt": "a", "response": ""}', "", "row 256 has an empty response"),
        ('{"prompt": "a"}', "", "row 256 has an empty response"),
        ("", "data.response_column=answer", "data.response_column: "),
        ("", "train.epochs=0", "train.epochs: "),
        ("", "model.shape.max_position_embeddings=4", "the longest pair has"),
    ],
)
def test_bad_pairs_are_named(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, override: str, message: str
) -> None:
    with pairs.open("a") as file:
        file.write(line)
    assert finetune(pairs, tmp_path / "model", *[override] * bool(override)) == 2
    assert message in capsys.readouterr().err
