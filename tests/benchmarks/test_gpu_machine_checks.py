"""What `make gpu` reads of nvidia-smi."""

import subprocess

import pytest

from benchmarks.gpu import machine_checks
from benchmarks.gpu.machine_checks import nvidia_smi, parse_cuda, parse_devices, versions

TWO = """\
index, name, driver_version, memory.total [MiB], power.draw [W], mig.mode.current
0, NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, 70.21 W, Disabled
1, NVIDIA L4, 580.65.06, 23034 MiB, [N/A], [Not Supported]
"""
HEAD = "| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |\n"


def test_devices_by_the_names_of_their_fields() -> None:
    first, second = parse_devices(TWO)
    assert first["memory.total"] == "81559 MiB"
    assert first["mig.mode.current"] == "Disabled"
    assert second == {
        "index": "1", "name": "NVIDIA L4", "driver_version": "580.65.06", "memory.total": "23034 MiB",
        "power.draw": None, "mig.mode.current": None,
    }  # fmt: skip
    assert parse_devices("index, name\n") == []
    assert parse_devices("") == []


@pytest.mark.parametrize("text", [HEAD, HEAD.replace("CUDA Version", "CUDA UMD Version")])
def test_the_cuda_of_the_driver(text: str) -> None:
    assert parse_cuda(text) == "13.0"
    assert parse_cuda("NVIDIA-SMI has failed") is None


def test_all_of_it_and_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_asked", lambda *arguments: TWO if arguments else HEAD)
    found = nvidia_smi()
    assert (found["driver"], found["cuda"], len(found["devices"])) == ("580.65.06", "13.0", 2)  # type: ignore[arg-type]

    def refuses(*_arguments: str) -> str:
        raise subprocess.CalledProcessError(2, "nvidia-smi", output='Field "mig" is not a valid field to query.\n\n')

    monkeypatch.setattr(machine_checks, "_asked", refuses)
    assert nvidia_smi() == {"problem": 'Field "mig" is not a valid field to query.', "devices": []}
    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert nvidia_smi() == {"problem": "nvidia-smi is not on PATH", "devices": []}


def test_versions_of_what_is_and_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(versions()["torch"])[0].isdigit()

    def absent(name: str) -> str:
        raise machine_checks.PackageNotFoundError(name)

    monkeypatch.setattr(machine_checks, "version", absent)
    assert versions()["triton"] is None
