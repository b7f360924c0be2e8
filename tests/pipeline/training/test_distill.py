"""`jobs.distill` on Ray Train and a toy task: the model teaches what SwiftKV adds to it, and stays as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.training.trainer import mean_loss
from jobs.distill import main as distill
from jobs.finetune import main as finetune
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.training.distill import DEFAULTS, with_defaults
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.schedule import FullDepth, SwiftKVPrefill
from tests.support.finetune_helpers import arguments, curve, log, validations, write_pairs
from tests.support.tiny_models import VOCAB

SHAPE = ["model.swiftkv={kv_layers: 1, group_size: 5}"]
DEMO = Path(__file__).parents[3] / "models/opt-e2e"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def teacher(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats a word, with all its layers."""
    output = tmp_path_factory.mktemp("teacher") / "model"
    recipe = {"epochs": 60, "validate_every": 60, "log_every": 20, "schedules": [{"method": "full"}]}
    assert finetune(arguments(pairs, output, **recipe)) == 0
    return output


def given(pairs: Path, teacher: Path, output: Path, *more: str) -> list[str]:
    """Arguments of `jobs.distill`: 40 steps, all logged."""
    data = f"data={{path: {pairs}, validation: {pairs}}}"
    recipe = "train={epochs: 10, learning_rate: 0.01, warmup_steps: 5, log_every: 1, validate_every: 8, horizon: 7, "
    recipe += "checkpoint_every: 9, precision: float32}"
    return [f"model.source={teacher}", data, recipe, "workers.threads=1", *SHAPE, "-o", str(output), *more]


@pytest.mark.ray
@pytest.mark.slow
def test_it_recovers_the_teacher_and_leaves_it_as_it_was(tmp_path: Path, capsys: Capture) -> None:
    """The demo model, on texts of its own: their loss with the prompt under SwiftKV, before and after."""
    rows = [row["prompt"] for row in make_prompts(128)]
    generator = Generator(GeneratorConfig(str(DEMO), {"method": "full"}, dtype="float32", num_threads=2))
    prompts = generator.tokenizer.encode(rows)
    made = generator([Request(str(i), tokens, Sampling(32)) for i, tokens in enumerate(prompts)]).answers
    tokens = [
        (prompt, answer.tokens) for prompt, answer in zip(prompts, made, strict=True) if isinstance(answer, Completion)
    ]
    lines = [
        {"prompt": row, "response": generator.tokenizer.decode(own)} for row, (_, own) in zip(rows, tokens, strict=True)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = ["train={epochs: 5, batch_size: 16, learning_rate: 0.003, warmup_steps: 5, validate_every: 20}"]
    data = f"data={{path: {tmp_path / 'pairs.jsonl'}, validation: {tmp_path / 'pairs.jsonl'}}}"
    asked = [f"model.source={DEMO}", data, *recipe, "workers.threads=2", "model.swiftkv={kv_layers: 12, group_size: 2}"]
    assert distill([*asked, "-o", str(tmp_path / "start"), "--init-only"]) == 0
    assert distill([*asked, "-o", str(tmp_path / "fit"), "--init-only", "train.fit_pairs=128"]) == 0
    assert distill([*asked, "-o", str(tmp_path / "model")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document["best"]["validation_loss"]) == ["full swiftkv"]
    schedule = SwiftKVPrefill(FullDepth(24), 12)
    losses = [mean_loss(load_model(tmp_path / name), tokens, schedule, 64) for name in ("start", "model", "fit")]
    best = mean_loss(load_model(DEMO), tokens, FullDepth(24), 64)
    assert losses[1] - best < 0.3 * (losses[0] - best)
    assert losses[2] - best < 0.9 * (losses[0] - best), "least squares, and no training"
    before, after = (load_file(folder / "model.safetensors") for folder in (DEMO, tmp_path / "model"))
    assert all(torch.equal(after[name], value) for name, value in before.items() if "swiftkv" not in name)
    config, own = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "model", DEMO))
    assert config["swiftkv"] == {"kv_layers": 12, "group_size": 2}
    assert config["skip_decode"] == own["skip_decode"], "the model is what it was, and so is what it carries"


@pytest.mark.ray
@pytest.mark.slow  # test_train_distributed resumes the same loop, test_finetune the same job
def test_resume_goes_on_from_the_last_checkpoint(pairs: Path, teacher: Path, tmp_path: Path) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for output in (whole, halved):
        assert distill(given(pairs, teacher, output)) == 0
    state = json.loads((halved / "training/run.json").read_text())
    del state["record"]
    (halved / "training/run.json").write_text(json.dumps(state | {"state": "running"}))
    newest = max((halved / "training/checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1000])  # torn
    assert distill(given(pairs, teacher, halved, "--resume")) == 0
    starts = [record["step"] for record in log(halved) if "start" in record]
    assert starts[0] == 0 < starts[1] < 40
    assert curve(halved) == pytest.approx(curve(whole), abs=1e-6)
    assert validations(halved)[40] == pytest.approx(validations(whole)[40], abs=1e-6)


@pytest.mark.ray
@pytest.mark.slow
def test_joint_training_from_a_checkpoint_that_has_been_distilled(pairs: Path, teacher: Path, tmp_path: Path) -> None:
    """All weights, both ways for the prompt, under skipping, taught by the frozen model; old SwiftKV weights go."""
    assert distill(given(pairs, teacher, tmp_path / "start", "--init-only", "model.swiftkv={kv_layers: 3}")) == 0
    schedules = "[{method: full}, {method: full, prefill: swiftkv}, {speedup: 2, prefill: swiftkv}]"
    joint = [f"train.schedules={schedules}", "train.trainable=all", "train.distill=0.5"]
    assert distill(given(pairs, tmp_path / "start", tmp_path / "model", *joint)) == 0
    assert list(validations(tmp_path / "model")[40]) == ["full", "full swiftkv", "2 swiftkv"]
    assert max(validations(tmp_path / "model")[40].values()) < 0.05
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert (config["swiftkv"], config["skip_decode"]) == ({"kv_layers": 1, "group_size": 5}, {"method": "full"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.swiftkv.kv_layers=6"], "model.swiftkv.kv_layers: all 6 layers keep their own K/V: nothing to train"),
        (["model.swiftkv.kv_layers=7"], "model.swiftkv.kv_layers is 7, and the model has 6 layers"),
        (["model.swiftkv=null"], "train.trainable: swiftkv needs model.swiftkv"),
        (
            ["model.swiftkv=null", "train.trainable=all", "train.fit_pairs=9"],
            "train.fit_pairs: fits weights of SwiftKV; give model.swiftkv",
        ),
        (["model.source=null"], "model.swiftkv: its weights are taken from a trained model's; give model.source"),
        (["train.schedules=[{method: full}]"], "train.schedules[0]: without prefill: swiftkv it runs nothing that"),
        (["train.schedules=[{method: full}]", "train.trainable=all"], "train.schedules: none has prefill: swiftkv"),
        (["train.schedules=[{prefill: swift}]"], "train.schedules[0].prefill: 'swift' is not one of full, swiftkv"),
        (["model.teacher=/nowhere"], "model.teacher: '/nowhere' is not a folder"),
        (["train.distill=0", "model.teacher={base}"], "model.teacher: is not asked with train.distill and"),
        (["model.teacher={stranger}"], f"has {VOCAB + 8} token ids, the model {VOCAB}"),
        (["train.default_schedule={method: full, prefill: swiftkv}"], "train.default_schedule.prefill: a checkpoint"),
        (["model.teacher={output}"], "model.teacher: {output}"),
        (["train.betas=[0.9]"], "train.betas"),
        (["train.temperature=.inf"], "train.temperature"),
        (
            ["train.schedules=[{speedup: 2, prefill: swiftkv}, {prefill: swiftkv, method: skipdecode, speedup: 2}]"],
            "train.schedules[1]: {'prefill': 'swiftkv', 'method': 'skipdecode', 'speedup': 2} is there twice",
        ),
    ],
)
def test_a_bad_key_is_named_and_nothing_is_started(
    pairs: Path,
    checkpoint_factory: Callable[..., Path],
    tmp_path: Path,
    capsys: Capture,
    overrides: list[str],
    message: str,
) -> None:
    base, stranger = checkpoint_factory("125m"), checkpoint_factory("125m", vocab_size=VOCAB + 8)
    names = {"{base}": str(base), "{stranger}": str(stranger), "{output}": str(tmp_path / "model")}
    for name, path in names.items():
        overrides, message = [text.replace(name, path) for text in overrides], message.replace(name, path)
    assert distill(given(pairs, base, tmp_path / "model", *overrides)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_what_is_given_stands_above_the_recipe() -> None:
    tree = with_defaults({"train": {"epochs": 3, "betas": [0.5, 0.6]}, "model": {"source": "a"}, "workers": {"x": 1}})
    assert (tree["train"]["epochs"], tree["train"]["betas"], tree["train"]["temperature"]) == (3, [0.5, 0.6], 2.0)
    assert tree["model"] == {"source": "a", "swiftkv": {}}
    assert tree["workers"] == {"x": 1}
    assert DEFAULTS["train"]["epochs"] == 1, "the defaults themselves stay"
