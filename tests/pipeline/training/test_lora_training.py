"""`train.lora` of `jobs.finetune`: what is refused before the start, the folder that comes out, resume, workers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.finetune import main
from pipeline.config.job import ConfigError, JobConfig, build_config, read_tree
from pipeline.resolve_model import check_model
from pipeline.training.config import FinetuneConfig
from pipeline.training.distill import init_swiftkv
from pipeline.training.training_plan import plan_training
from skipdecode.checkpoint.weights import adapter_of, load_model
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth
from skipdecode.schedules.trained import SCHEDULE_FILE, TRAINED_FILE
from skipdecode.training.lora import LoraShape, add_lora, lora_modules, save_adapter
from tests.support.finetune_helpers import arguments, curve, validations, write_pairs

LORA = "train.lora={rank: 4, targets: [q_proj, v_proj, fc1]}"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def lora_arguments(source: Path, pairs: Path, output: Path, *more: str, **train: Any) -> list[str]:
    given = arguments(pairs, output, f"model.source={source}", LORA, *more, **{"warmup_steps": 2} | train)
    return [one for one in given if not one.startswith("model.shape=")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"source": None}}, "train.lora: .*give model.source"),
    ({"model": {"swiftkv": {"kv_layers": 3}}}, "train.lora: an adapter holds no SwiftKV weights"),
    ({"train": {"trainable": "swiftkv"}}, "train.lora: an adapter holds no SwiftKV weights"),
    ({"train": {"parallel": "fsdp"}}, "train.parallel: fsdp does not shard adapters"),
    ({"train": {"lora": {"targets": ["q_proj", "gate_proj"]}}}, "train.lora.targets: .*no 'gate_proj'; it has q_proj"),
    ({"train": {"lora": {"targets": []}}}, "train.lora.targets: "),
    ({"train": {"lora": {"rank": 0}}}, "train.lora.rank: "),
    ({"train": {"lora": {"dropout": 0.1}}}, "train.lora.dropout: unknown key"),
]


def tree_of(source: Path, pairs: Path, output: Path, more: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"source": str(source)}, "train": {"lora": {}}, "output": {"path": str(output)}}
    tree["data"] = {"path": str(pairs), "validation": str(pairs)}
    return tree | {name: tree[name] | values for name, values in more.items()}


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=[str(more) for more, _ in REFUSED])
def test_what_does_not_go_with_it(
    tiny_checkpoint: Path, pairs: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_training(build_config(FinetuneConfig, tree_of(tiny_checkpoint, pairs, tmp_path / "out", more)), print)


def test_what_is_settled(tiny_checkpoint: Path, pairs: Path, tmp_path: Path) -> None:
    """All linear layers and twice the rank; a training of before there were adapters has the same fingerprint."""
    planned = plan_training(build_config(FinetuneConfig, tree_of(tiny_checkpoint, pairs, tmp_path / "a", {})), print)
    assert planned.lora is not None
    names = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    assert planned.fingerprint["train.lora"] == {"rank": 16, "alpha": 32.0, "targets": names}
    whole = tree_of(tiny_checkpoint, pairs, tmp_path / "a", {"train": {"lora": None}})
    assert plan_training(build_config(FinetuneConfig, whole), print).fingerprint["train.lora"] is None


START: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"rank": 4},
        {"rank": 8},
        "model.adapter: has rank 4 and alpha 8 at 'model.decoder.*asks for 8 and 16; an adapter",
    ),
    ({"rank": 4}, {"rank": 4, "alpha": 4}, "model.adapter: has rank 4 and alpha 8 .*asks for 4 and 4"),
    ({"targets": ["fc1"]}, {"targets": ["fc1", "fc2"]}, "model.adapter: train.lora.targets .*has none for .*fc2'"),
    ({"targets": ["fc1", "fc2"]}, {"targets": ["fc1"]}, "model.adapter: train.lora.targets .*has one for .*fc2'"),
]


def adapter_like(source: Path, folder: Path, shape: dict[str, Any]) -> Path:
    """An adapter that changes what the model computes, as a training would have left it."""
    model, targets = load_model(source), shape.get("targets", ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"])
    lora = LoraShape(shape.get("rank", 16), 2.0 * shape.get("rank", 16), tuple(targets))
    add_lora(model, lora, seed=3)
    generator = torch.Generator().manual_seed(4)
    for module in lora_modules(model):
        for b in module.b.values():
            b.data.copy_(0.05 * torch.randn(b.shape, generator=generator))
    folder.mkdir()
    save_adapter(model.state_dict(), folder, model.config, lora, str(source))
    return folder


@pytest.mark.parametrize(("made", "asked", "message"), START, ids=[str(asked) for _, asked, _ in START])
def test_an_adapter_of_another_shape_is_not_trained_on(
    tiny_checkpoint: Path, pairs: Path, tmp_path: Path, made: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    folder = adapter_like(tiny_checkpoint, tmp_path / "adapter", made)
    more = {"model": {"adapter": str(folder)}, "train": {"lora": asked}}
    with pytest.raises(ConfigError, match=message):
        plan_training(build_config(FinetuneConfig, tree_of(tiny_checkpoint, pairs, tmp_path / "out", more)), print)


def test_an_adapter_to_start_from_is_what_the_model_computes(
    tiny_checkpoint: Path, pairs: Path, tmp_path: Path
) -> None:
    """Beside the weights as in them; and it is part of the fingerprint."""
    folder = adapter_like(tiny_checkpoint, tmp_path / "adapter", {"rank": 4})
    more = {"model": {"adapter": str(folder)}, "train": {"lora": {"rank": 4}}}
    planned = plan_training(
        build_config(FinetuneConfig, tree_of(tiny_checkpoint, pairs, tmp_path / "out", more)), print
    )
    assert planned.lora is not None
    assert planned.fingerprint["model.adapter"] is not None
    model = load_model(tiny_checkpoint)
    add_lora(model, planned.lora, 1, adapter_of(folder, model))
    batch = teacher_batch([([5, 6, 7, 8], [9, 10, 11]), ([6, 9], [12, 5, 7])], 1)
    full = FullDepth(model.config.num_hidden_layers)
    plain, merged, begun = (
        teacher_forced_logits(one, batch, full).detach()
        for one in (load_model(tiny_checkpoint), load_model(tiny_checkpoint, adapter=folder), model)
    )
    assert not torch.allclose(plain, merged, rtol=0, atol=0.01), "the adapter does something"
    torch.testing.assert_close(begun, merged, rtol=0, atol=1e-5)


def test_swiftkv_is_taken_from_the_model_with_its_adapter(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = adapter_like(tiny_checkpoint, tmp_path / "adapter", {"rank": 4})
    model = {"source": str(tiny_checkpoint), "adapter": str(folder), "swiftkv": {"kv_layers": 3}}
    tree = {"model": model, "output": {"path": str(tmp_path / "swiftkv"), "dtype": "float32"}}
    init_swiftkv(build_config(FinetuneConfig, tree), print)
    made, merged = load_model(tmp_path / "swiftkv"), load_model(tiny_checkpoint, adapter=folder)
    for name, value in merged.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name


@pytest.mark.ray
@pytest.mark.slow
def test_a_training_its_resume_and_two_workers(
    tiny_checkpoint: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "adapter"
    before = {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()}
    assert main(lora_arguments(tiny_checkpoint, pairs, output)) == 0
    assert f"(model.adapter={output})" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()} == before
    names = {"adapter_config.json", "adapter_model.safetensors", SCHEDULE_FILE, TRAINED_FILE, "tokenizer.json"}
    assert {path.name for path in output.iterdir()} == names | {"training.json", "training"}
    losses = [sum(one.values()) for one in validations(output).values()]
    assert losses[-1] < 0.8 * losses[0]
    assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_checkpoint)

    tree = read_tree(None, [f"model.source={tiny_checkpoint}", f"model.adapter={output}"])
    notes: list[str] = []
    model = check_model(build_config(JobConfig, tree), notes.append)
    assert model.decode == {"method": "skipdecode", "speedup": 2, "horizon": 7}
    assert notes == [], "it was tuned for what it carries"

    copied = shutil.copytree(output, tmp_path / "copied")
    state = json.loads((copied / "training/run.json").read_text())
    del state["record"]
    (copied / "training/run.json").write_text(json.dumps(state | {"state": "running"}))
    (copied / "training/checkpoints/step-000000024.pt").unlink()
    (copied / "adapter_model.safetensors").unlink()
    assert main(lora_arguments(tiny_checkpoint, pairs, copied, "--resume")) == 0
    assert curve(copied) == pytest.approx(curve(output), abs=1e-6)
    other = tmp_path / "two"
    assert main(lora_arguments(tiny_checkpoint, pairs, other, "workers.num_workers=2", accumulate=2)) == 0
    assert curve(other) == pytest.approx(curve(output), abs=1e-4)
    ours = [load_model(tiny_checkpoint, adapter=folder).state_dict() for folder in (output, copied, other)]
    for name, value in ours[0].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[2][name], value, rtol=0, atol=1e-3)
    assert main(lora_arguments(tiny_checkpoint, pairs, copied, "--resume", "train.lora.rank=5")) == 2
    assert "train.lora: the run was started with" in capsys.readouterr().err
    on, begin = tmp_path / "on", f"model.adapter={output}"
    slow = {"epochs": 1, "learning_rate": 1e-6, "final_learning_rate": 0, "validate_every": 1}
    assert main(lora_arguments(tiny_checkpoint, pairs, on, begin, **slow)) == 0
    assert next(iter(validations(on).values())) == pytest.approx(list(validations(output).values())[-1], abs=1e-4)
    assert main(lora_arguments(tiny_checkpoint, pairs, on, "--resume", **slow)) == 2
    assert "model.adapter: the run was started with" in capsys.readouterr().err
