"""`jobs.doctor`: says what is there, what would be chosen, and what is wrong, each with its remedy."""

import json
import os
from pathlib import Path

import pytest
import torch

from actors.generator import Generator, GeneratorConfig
from jobs.doctor import main
from pipeline import doctor


def test_it_says_what_a_worker_would_choose(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"model.source={tiny_checkpoint}", "sampling.max_new_tokens=40", "decode.speedup=2", "model.dtype=float32"]
    assert main([*keys, "-o", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["problems"] == []
    assert "nothing is wrong" in captured.err
    choice, machine = document["choice"], document["machine"]
    assert (choice["layers"], choice["dtype"], choice["device"]) == (6, "float32", "cpu")
    worker = Generator(
        GeneratorConfig(str(tiny_checkpoint), {"method": "skipdecode", "speedup": 2}, dtype="float32", device="cpu")
    )
    assert choice["batch_size"] == {"32": worker.batch_size(32, 40), "64": worker.batch_size(64, 40)}
    assert machine["torch"] == torch.__version__
    assert 0 < machine["free_memory_bytes"] <= machine["memory_bytes"]
    assert machine["usable_cores"] == len(os.sched_getaffinity(0))
    assert not (tmp_path / "run").exists(), "it changes nothing"


def test_it_says_all_that_is_wrong_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").touch()
    keys = ["model.source=/nowhere", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "run"),
            "actors.num_actors=3", "actors.num_gpus=1"]  # fmt: skip
    assert main(keys) == 1
    captured = capsys.readouterr()
    text = "\n".join(json.loads(captured.out.splitlines()[-1])["problems"])
    for part in ("model.source: '/nowhere'", "none.jsonl: no such file", "exists already; use --resume",
                 "actors.num_actors: 3 actors with 1 GPUs each"):  # fmt: skip
        assert part in text
        assert part in captured.err
    assert "4 problems" in captured.err


def test_a_bad_key_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode.spedup=3"]) == 2
    assert "did you mean 'speedup'?" in capsys.readouterr().err


def test_a_missing_or_old_dependency_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["numpy>=99", "no-such-package>=1", "torch>=2"]\n')
    monkeypatch.setattr(doctor, "PROJECT", project)
    old, missing = doctor.wrong_versions()
    assert "wanted >=99" in old
    assert missing == "no-such-package is not installed; pip install 'no-such-package>=1'"


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.init", lambda **_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(doctor.ConfigError, match=r"RAY_ADDRESS: 127\.0\.0\.1:1 does not answer \(refused\)"):
        doctor.ray_facts()


def test_the_list_of_verbs_names_every_one_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    from jobs.__main__ import main as list_verbs
    from jobs.__main__ import verbs

    jobs = Path(__file__).parent.parent / "jobs"
    assert set(verbs()) == {path.stem for path in jobs.glob("*.py")} - {"__init__", "__main__", "cli"}
    assert list_verbs() == 0
    lines = capsys.readouterr().err.splitlines()
    for verb in verbs():
        (line,) = [line for line in lines if line.startswith(f"  {verb} ")]
        assert len(line.split(maxsplit=1)[1]) > 20
