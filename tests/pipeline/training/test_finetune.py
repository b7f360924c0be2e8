"""`jobs.finetune` on Ray Train and a toy task: it learns, writes a whole model folder, and goes on where it stopped."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import OPTForCausalLM

from jobs.finetune import main
from pipeline.store import lease
from pipeline.store.run_folder import RunFolder
from pipeline.training.config import TrainSection
from pipeline.training.schedules import check_schedules
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.families.opt import OPTConfig
from skipdecode.schedules.from_config import make_schedule
from tests.support.finetune_helpers import arguments, curve, log, validations, write_pairs

LONG = "".join(random.Random(0).choices("0123456789XYZ", k=6000))
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def undisturbed(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 24 steps. Do not change it; `copied` gives one to change."""
    output = tmp_path_factory.mktemp("finetune") / "model"
    assert main(arguments(pairs, output)) == 0
    return output


@pytest.fixture
def copied(undisturbed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "model"))


@pytest.mark.ray
@pytest.mark.slow
def test_it_learns_every_speed(pairs: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "model"
    assert main(arguments(pairs, folder, epochs=60, validate_every=60, log_every=20)) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["output"] == str(folder)
    assert not result["was_finished"]
    names = {"full", *(f"skipdecode {speedup}" for speedup in (2, 3, 4, 5))}
    assert set(result["best"]["validation_loss"]) == names
    assert all(loss < 0.05 for loss in result["best"]["validation_loss"].values()), result["best"]
    assert "progress: step 240/240 (100 %)" in err
    config = read_config(folder)
    assert config.skip_decode == {"method": "skipdecode", "speedup": 2, "horizon": 7}
    assert OPTForCausalLM.from_pretrained(folder).config.skip_decode == config.skip_decode
    falling = [{"method": "skipdecode", "speedup": speedup, "horizon": 7} for speedup in (2, 3, 4, 5)]
    assert config.trained_schedules == [{"method": "full"}, *falling]
    tokenizer, model = Tokenizer(folder, config), load_model(folder, dtype=torch.float32)
    for decode in ({"method": "full"}, {"speedup": 2}, {"speedup": 5}):
        schedule = make_schedule(decode, num_layers=6, max_new_tokens=8)
        request = Request("", tokenizer.encode(["say ef"])[0], Sampling(max_new_tokens=8))
        assert tokenizer.decode(generate(model, [request], schedule).completions[0].tokens) == "efef"


@pytest.mark.parametrize("mode", [[], ["--resume"], ["--overwrite"]])
def test_one_run_at_a_time_trains_in_a_folder(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, mode: list[str]
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    with lease.Lease(RunFolder.open(str(tmp_path / "model")), "other", print):
        assert main([*arguments(pairs, tmp_path / "model"), *mode]) == 2
    assert "output.path: run other (process" in capsys.readouterr().err
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.ray
def test_what_lies_beside_the_model(undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "training.json",
        "training",
    }
    training = undisturbed / "training"
    assert {path.name for path in training.iterdir()} == {
        "checkpoints",
        "log.jsonl",
        "loss.png",
        "loss.svg",
        "run.json",
    }
    assert sorted(path.name for path in (training / "checkpoints").iterdir()) == [
        "step-000000020.pt",
        "step-000000024.pt",
    ]
    assert list(curve(undisturbed)) == list(range(1, 25))
    assert list(validations(undisturbed)) == [8, 16, 24]
    record = json.loads((undisturbed / "training.json").read_text())
    assert record["best"]["mean"] == min(sum(v.values()) / 5 for v in validations(undisturbed).values())
    assert (record["pairs"], record["validation_pairs"], record["skipped_rows"], record["steps"]) == (256, 256, 0, 24)
    assert [session["from_step"] for session in record["sessions"]] == [0]
    assert record["config"]["train"]["learning_rate"] == 0.01


def stop_in_the_middle(output: Path) -> None:
    """As if the driver had been killed behind step 20: the state says so, and the checkpoint of the end is torn."""
    path = output / "training/run.json"
    state = json.loads(path.read_text())
    del state["record"]
    path.write_text(json.dumps(state | {"state": "running"}))
    newest = output / "training/checkpoints/step-000000024.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    (output / "training.json").unlink()


@pytest.mark.ray
@pytest.mark.slow
def test_resume_goes_on_from_the_last_whole_checkpoint(pairs: Path, undisturbed: Path, copied: Path) -> None:
    stop_in_the_middle(copied)
    with (copied / "training/log.jsonl").open("a") as file:
        file.write('{"step": 99, "train_')  # torn by the kill
    assert main(arguments(pairs, copied, "--resume", "train.checkpoint_every=7")) == 0
    assert [record["step"] for record in log(copied) if "start" in record] == [0, 20]
    assert curve(copied) == pytest.approx(curve(undisturbed), abs=1e-6)
    assert validations(copied)[24] == pytest.approx(validations(undisturbed)[24], abs=1e-6)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (copied, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.ray
@pytest.mark.slow
def test_two_workers_and_accumulation_change_nothing(pairs: Path, undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert main(arguments(pairs, output, "workers.num_workers=2", accumulate=2, recompute=True)) == 0
    assert next(record["start"]["workers"] for record in log(output) if "start" in record) == 2
    assert curve(output) == pytest.approx(curve(undisturbed), abs=1e-5)
    assert validations(output)[24] == pytest.approx(validations(undisturbed)[24], abs=1e-5)


@pytest.mark.ray
def test_a_finished_run_is_left_alone(pairs: Path, copied: Path, capsys: Capture) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    assert main(arguments(pairs, copied, "--resume")) == 0
    out, err = capsys.readouterr()
    assert "finished before, nothing to do" in err
    assert json.loads(out)["was_finished"]
    assert main(arguments(pairs, copied)) == 2
    assert "exists already; use --resume to go on with it, --overwrite to start anew" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


@pytest.mark.ray
@pytest.mark.slow
def test_overwrite_starts_anew_and_deletes_only_what_a_run_wrote(
    pairs: Path, copied: Path, tmp_path: Path, capsys: Capture
) -> None:
    """With bad rows among the pairs, which are left out when that is asked for."""
    (copied / "notes.txt").write_text("mine")
    path = tmp_path / "pairs.jsonl"
    path.write_text(pairs.read_text() + '{"prompt": "a"}\n{"prompt": "", "response": ""}\n{"torn')
    changes = (f"data.path={path}", "data.bad_rows=skip", "train.schedules=[{method: unified, layers: 3}]")
    assert main(arguments(pairs, copied, "--overwrite", *changes, epochs=1)) == 0
    out, err = capsys.readouterr()
    assert "256 pairs in 4 steps" in err
    assert "3 bad rows left out" in err
    assert json.loads(out.splitlines()[-1])["skipped_rows"] == 3
    assert list(curve(copied)) == [1, 2, 3, 4]
    assert (copied / "notes.txt").read_text() == "mine"
    assert read_config(copied).skip_decode == {"method": "unified", "layers": 3}


def test_overwrite_does_not_touch_what_no_run_of_ours_wrote(
    pairs: Path, tiny_checkpoint: Path, capsys: Capture
) -> None:
    assert main(arguments(pairs, tiny_checkpoint, "--overwrite")) == 2
    assert "no run of ours wrote it, and --overwrite will not delete it" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.schedules=[{method: full}]",
            "train.schedules: the run was started with [{'method': 'full'}, {'method':",
        ),
        ("train.horizon=9", "train.horizon: the run was started with 7, now it is 9"),
        ("train.default_schedule={speedup: 3}", "train.default_schedule: the run was started with {'method': 'skip"),
        ("train.seed=1", "train.seed: the run was started with 0, now it is 1"),
        ("train.batch_size=32", "train.batch_size: the run was started with 64, now it is 32"),
        ("train.draw=all", "train.draw: the run was started with 'one', now it is 'all'"),
        ("train.distill=0.5", "train.distill: the run was started with 0.0, now it is 0.5"),
        ("model.shape.num_hidden_layers=8", "model.shape.num_hidden_layers: the run was started with 6, now it is 8"),
        ("model.source={tiny}", "model.files: the run was started with None, now it is '"),
        ("data.path={other}", "data.pairs: the run was started with '"),
    ],
)
def test_resume_refuses_another_run(
    pairs: Path, undisturbed: Path, tiny_checkpoint: Path, tmp_path: Path, capsys: Capture, override: str, message: str
) -> None:
    other = write_pairs(tmp_path / "other.jsonl", repeats=32)
    override = (
        override.format(tiny=tiny_checkpoint, other=other)
        if "{tiny}" in override or "{other}" in override
        else override
    )
    assert main(arguments(pairs, undisturbed, "--resume", override)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "use --overwrite or another output.path" in err


@pytest.mark.ray
def test_workers_and_speed_may_change_on_resume(pairs: Path, undisturbed: Path, capsys: Capture) -> None:
    more = ("workers.num_workers=2", "train.accumulate=3", "train.log_every=5", "train.recompute=true")
    assert main(arguments(pairs, undisturbed, "--resume", *more)) == 0
    assert "finished before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=0", "train.epochs: "),
        ("train.epoch=1", "train.epoch: unknown key; did you mean 'epochs'?"),
        ("train.schedules=[{method: skipdecode, speedup: 7}]", "train.schedules[0].speedup: 7 has no preset"),
        ("train.schedules=[{method: full}, {spedup: 2}]", "train.schedules[1].spedup: has no meaning with method"),
        ("train.schedules=[{method: fast}]", "train.schedules[0].method: 'fast' is not one of"),
        ("train.schedules=[{method: unified, layers: 9}]", "train.schedules[0].layers"),
        ("train.schedules=[]", "train.schedules: "),
        ("train.schedules=[{method: full}, {method: full}]", "train.schedules[1]: {'method': 'full'} is there twice"),
        ("train.default_schedule={speedup: 7}", "train.default_schedule.speedup: 7 has no preset"),
        ("model.shape.num_attention_heads=5", "model.shape: hidden_size 32 is not a multiple of num_attention_heads 5"),
        ("model.source=/nowhere", "model.source: '/nowhere' is not a folder"),
        ("-os3://bucket/model", "output.path: s3://bucket/model: a model is written to a folder"),
        ("data.path=/nowhere.jsonl", "data.path: "),
        ("data.validation=/nowhere.csv", "data.validation: "),
        ("data.response_column=answer", "data.response_column: "),
        ("data.prompt_column=question", "data.prompt_column: "),
        ("data.prompt_column=response", "data.response_column: is the prompt column too ('response')"),
    ],
)
def test_a_bad_key_is_named_and_nothing_is_started(
    pairs: Path, tmp_path: Path, capsys: Capture, override: str, message: str
) -> None:
    assert main(arguments(pairs, tmp_path / "model", override)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workers.num_workers=1000", "workers.num_workers: 1000 workers need a core each, the cluster has"),
        ("workers.num_cpus=1000", "workers.num_workers: 1 workers with 1000 CPUs each need 1000 CPUs"),
        ("workers.use_gpu=true", "workers.use_gpu: true, but the cluster has no GPU"),
    ],
)
def test_workers_that_the_cluster_has_no_room_for_are_not_waited_for(
    pairs: Path, tmp_path: Path, capsys: Capture, override: str, message: str
) -> None:
    assert main(arguments(pairs, tmp_path / "model", override)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "response": ""}', "line 257: column 'response' is empty"),
        ('{"prompt": "a"}', "line 257: column 'response' is missing or null"),
        ('{"prompt": null, "response": "b"}', "line 257: column 'prompt' is missing or null"),
        ('{"prompt": "a", "response": 3}', "line 257: column 'response' must be a string, got a number"),
        ('{"prompt": "a", "resp', "line 257: not valid JSON"),
        (json.dumps({"prompt": "a", "response": LONG}), "line 257: 2 prompt and "),
    ],
)
def test_bad_rows_are_named(pairs: Path, tmp_path: Path, capsys: Capture, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(pairs.read_text() + line)
    assert main(arguments(path, tmp_path / "model")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "data.path: 1 bad rows; repair them, or leave them out with data.bad_rows=skip" in err
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_of_another_shape_is_refused(
    pairs: Path, checkpoint_factory: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    broken = Path(shutil.copytree(checkpoint_factory("125m"), tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"ffn_dim": 128}))
    assert main(arguments(pairs, tmp_path / "model", f"model.source={broken}")) == 2
    err = capsys.readouterr().err
    assert "fc1" in err
    assert "config.json asks for" in err


def test_the_base_must_not_lie_in_the_output(pairs: Path, tiny_checkpoint: Path, capsys: Capture) -> None:
    assert main(arguments(pairs, tiny_checkpoint, "--overwrite", f"model.source={tiny_checkpoint}")) == 2
    assert "model.source: " in capsys.readouterr().err
    assert (tiny_checkpoint / "model.safetensors").is_file()


@pytest.mark.ray
@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_at_once(pairs: Path, tmp_path: Path, capsys: Capture) -> None:
    more = ("train.max_grad_norm=1e30", "train.warmup_steps=1")
    assert main(arguments(pairs, tmp_path / "model", *more, learning_rate=1e30)) == 1
    assert "lower train.learning_rate" in capsys.readouterr().err
    state = json.loads((tmp_path / "model/training/run.json").read_text())
    assert state["state"] == "interrupted"


@pytest.mark.parametrize(
    ("schedules", "default", "stored"),
    [
        ([{"method": "full"}], None, {"method": "full"}),
        ([{"speedup": 3}, {"method": "skipdecode", "speedup": 2}], None, {"speedup": 2}),
        ([{"method": "full"}, {"speedup": 3}, {"speedup": 4}], None, {"speedup": 3}),
        ([{"method": "full"}], {"max_layers": 5, "min_layers": 3}, {"max_layers": 5, "min_layers": 3}),
        ([{"method": "early_exit", "speedup": 3}], None, {"method": "early_exit", "speedup": 3}),
    ],
)
def test_which_schedule_the_checkpoint_carries(schedules: list[dict], default: dict | None, stored: dict) -> None:
    section = TrainSection(schedules=tuple(schedules), default_schedule=default, horizon=9)
    expected = {"method": "skipdecode"} | stored
    if expected["method"] != "full":
        expected["horizon"] = 9
    carried, trained = check_schedules(section, OPTConfig(num_hidden_layers=24))
    assert carried == expected
    assert [one.get("speedup", "full") for one in trained] == [one.get("speedup", "full") for one in schedules]
    assert all(one["method"] == "full" or one["horizon"] == 9 for one in trained)
