"""What a user gets for bad configuration: exit code 2 at once, and a message that names the key."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from jobs.generate import main

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Generate = Callable[..., Done]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """`generate(*arguments)` calls the verb in this process."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(list(arguments))
        return Done(code, *capsys.readouterr())

    return call


def program(*arguments: str) -> Done:
    """The verb as a user runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.generate", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    return path


def refused(done: Done, message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "exit code 2: bad configuration or input, nothing was started" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.spedup=3"], "decode.spedup: unknown key; did you mean 'speedup'?"),
        (["decode.speedup=7"], "decode.speedup: 7.0 has no preset"),
        (["decode.max_layers=9", "decode.min_layers=2"], "layers of the model=6"),
        (["decode.max_layers=3"], "decode.min_layers: needed beside max_layers"),
        (["decode.method=unified"], "decode.layers: method 'unified' needs"),
        (["sampling.max_new_tokens=128"], "sampling.max_new_tokens: 128 leaves no room"),
        (["model.source=/nowhere"], "model.source: '/nowhere' is not a folder"),
        (["model.source=nobody/no-such-model"], "model.source: 'nobody/no-such-model' is no folder here"),
        (["input.path=/nowhere/x.jsonl"], "input.path"),
        (["decode.method=full", "decode.speedup=2"], "give decode.method=skipdecode"),
        (["input=foo", "input.limit=3"], "input.limit: input is a value, not a section"),
        (["output.path=/proc/nowhere"], "output.path: /proc/nowhere cannot be created"),
    ],
)
def test_bad_configuration_needs_no_ray(
    generate: Generate, tiny_checkpoint: Path, source: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    fixed = [f"model.source={tiny_checkpoint}", f"input.path={source}", f"output.path={tmp_path / 'run'}"]
    refused(generate(*fixed, *overrides), message)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actors.num_actors=64"], "actors.num_actors: 64 actors on CPUs need a core each"),
        (["actors.num_cpus=1000"], "actors.num_actors: 1 actors with 1000 CPUs each"),
        (["actors.num_gpus=1"], "actors.num_actors: 1 actors with 1 GPUs each need 1 GPUs, the cluster has 0"),
        (["input.prompt_column=text"], "input.prompt_column"),
    ],
)
def test_what_cannot_fit_is_refused_before_the_start(
    generate: Generate, tiny_checkpoint: Path, source: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    fixed = [f"model.source={tiny_checkpoint}", f"input.path={source}", f"output.path={tmp_path / 'run'}"]
    refused(generate(*fixed, *overrides), message)


@pytest.mark.ray
@pytest.mark.parametrize("text", [None, "", "\n \n"], ids=["missing", "empty", "blank"])
def test_an_input_without_rows_leaves_no_folder_behind(
    generate: Generate, tiny_checkpoint: Path, tmp_path: Path, text: str | None
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "run"
    if text is not None:
        path.write_text(text)
    refused(generate(f"model.source={tiny_checkpoint}", "-i", str(path), "-o", str(output)), str(path))
    assert not output.exists()
    output.mkdir()
    refused(generate(f"model.source={tiny_checkpoint}", "-i", str(path), "-o", str(output)), str(path))
    assert output.exists(), "it was there before"


def test_an_output_folder_that_exists(generate: Generate, tiny_checkpoint: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/precious.txt").write_text("mine")
    fixed = [f"model.source={tiny_checkpoint}", "-i", str(source), "-o", str(tmp_path / "run")]
    refused(generate(*fixed), "exists already; use --resume to go on with it, --overwrite to start anew")
    refused(generate(*fixed, "--resume"), "holds no run.json of a run to resume")
    assert (tmp_path / "run/precious.txt").read_text() == "mine"


def test_inputs_in_the_run_folder_are_not_overwritten(
    generate: Generate, tiny_checkpoint: Path, source: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own/data/prompts.jsonl"
    own.parent.mkdir(parents=True)
    own.write_bytes(source.read_bytes())
    state = tmp_path / "own/run.json"
    fixed = [f"model.source={tiny_checkpoint}", "-i", str(own.parent), "-o", str(tmp_path / "own"), "--overwrite"]
    refused(generate(*fixed), "holds data, which no run of ours wrote")
    state.write_text('{"books": {}, "fingerprint": {}, "sessions": {}}')
    refused(generate(*fixed), "holds data/prompts.jsonl, which no run of ours wrote")
    assert own.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("given", ["in", "in/**", "in/../in"])
def test_an_output_folder_inside_an_input_folder(
    generate: Generate, tiny_checkpoint: Path, tmp_path: Path, given: str
) -> None:
    """The first run would work, and then its own rows would be input."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"prompt": "x"}\n')
    fixed = [f"model.source={tiny_checkpoint}", "-i", str(tmp_path / given), "-o", str(tmp_path / "in/out/run")]
    refused(generate(*fixed), "lies in the input folder")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing tensor", "tensor 'model.decoder.layers.2.fc1.weight' is missing"),
        ("wrong shape", "tensor 'model.decoder.layers.2.fc1.weight' is [3, 3], config.json asks for [96, 48]"),
        ("torn file", "cannot be read"),
        ("no tokenizer", "no tokenizer.json"),
    ],
)
def test_a_damaged_checkpoint(
    generate: Generate, tiny_checkpoint: Path, source: Path, tmp_path: Path, damage: str, message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_checkpoint.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    name = "model.decoder.layers.2.fc1.weight"
    if damage == "missing tensor":
        del tensors[name]
        save_file(tensors, weights)
    elif damage == "wrong shape":
        tensors[name] = tensors[name][:3, :3].contiguous()
        save_file(tensors, weights)
    elif damage == "torn file":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        (model / "tokenizer.json").unlink()
    refused(generate(f"model.source={model}", "-i", str(source), "-o", str(tmp_path / "run")), message)


@pytest.mark.ray
@pytest.mark.slow
def test_the_documents_last_line_is_json_and_the_rest_is_stderr(
    tiny_checkpoint: Path, source: Path, tmp_path: Path
) -> None:
    done = program(f"model.source={tiny_checkpoint}", "-i", str(source), "-o", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["completed"] == 1
    assert "full depth: this checkpoint carries no schedule" in done.stderr
    assert "progress: 1/1 rows (100 %)" in done.stderr
