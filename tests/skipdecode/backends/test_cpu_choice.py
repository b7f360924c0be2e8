"""Which back end is chosen, what follows from it, and what if it cannot be had; the compiler and its cache."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import skipdecode
from skipdecode.backends import build, choice
from skipdecode.backends.choice import NEEDS, BackendError
from skipdecode.model.devices import choose_dtype
from tests.support.cpu_backends import BACKENDS, NAMES

ROOT = Path(skipdecode.__file__).parents[1]
SKYLAKE = NEEDS["avx512"] | {"sse2"}
CPUS = {  # flags -> possible names, automatic dtype of the first, whether that one has int8
    "sapphire rapids": (NEEDS["amx"] | {"avx512_vnni"}, ["amx", "avx512", "avx2", "torch"], "bfloat16", True),
    "its amx hidden": (
        SKYLAKE | {"avx512_bf16", "avx512_vnni", "avx512_fp16"},
        ["avx512", "avx2", "torch"],
        "bfloat16",
        True,
    ),
    "zen 4": (SKYLAKE | {"avx512_bf16", "avx512_vnni", "sse4a"}, ["avx512", "avx2", "torch"], "bfloat16", True),
    "ice lake": (SKYLAKE | {"avx512_vnni"}, ["avx512", "avx2", "torch"], "float32", False),
    "haswell": (NEEDS["avx2"], ["avx2", "torch"], "float32", False),
    "arm": (frozenset(), ["torch"], "float32", False),
}
compiled = pytest.mark.skipif(choice.choose().name == "torch", reason=choice.choose().reason)


@pytest.mark.parametrize("cpu", CPUS)
def test_what_a_cpu_can_run(cpu: str) -> None:
    flags, names, dtype, has_int8 = CPUS[cpu]
    assert list(choice.possible(flags)) == names
    first = choice.make_backend(choice.possible(flags)[0], "", frozenset(flags))
    assert first.dtype == dtype
    assert (first.no_int8 is None) == has_int8
    assert has_int8 or first.name in str(first.no_int8)


def test_a_slow_bfloat16_is_said_and_widened() -> None:
    """Intel's since Sapphire Rapids multiply float32 faster."""
    for cpu, (flags, names, _, _) in CPUS.items():
        is_slow = cpu == "its amx hidden"
        assert ("slow BF16" in choice.describe_cpu(flags)) == is_slow
        for name in set(names) - {"torch"}:
            is_widened = "-DHAS_PAIRED" in build.compile_flags(name, flags)
            assert is_widened == (is_slow and name == "avx512")


@pytest.mark.parametrize("name", ["avx2", "torch"])
def test_no_back_end_but_two_has_int8(name: str) -> None:
    zen4 = frozenset(CPUS["zen 4"][0])
    chosen = choice.make_backend("avx2" if name == "avx2" else "torch", "", zen4)
    assert chosen.no_int8 is not None
    assert chosen.dtype == ("float32" if name == "avx2" else "bfloat16")  # oneDNN multiplies it


def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    automatic = choice.choose()
    assert automatic.reason
    assert str(automatic).startswith(automatic.name)
    assert choose_dtype("auto", torch.device("cpu")) == getattr(torch, automatic.dtype)
    for off in ("off", "0", "torch", "OFF"):
        monkeypatch.setenv(choice.VARIABLE, off)
        assert choice.choose().name == "torch"
        assert choice.choose().reason.startswith(f"forced by {choice.VARIABLE}")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_possible_back_end_can_be_forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, name.upper())
    assert choice.choose().name == name
    assert choose_dtype("auto", torch.device("cpu")) == getattr(torch, choice.choose().dtype)


def test_an_impossible_name_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cpu_flags", lambda: frozenset(NEEDS["avx2"]))
    for wrong, word in (("neon", "unknown"), ("avx512", "cannot run here"), ("amx", "cannot run here")):
        monkeypatch.setenv(choice.VARIABLE, wrong)
        with pytest.raises(BackendError, match=rf"{wrong} .*{word}.*AVX2; no AVX-512.*avx2, torch"):
            choice.choose()


FALLS_BACK = """
import torch
from skipdecode.backends import choice
from skipdecode.backends import cpu_kernels
from skipdecode.model.sampler import argmax
assert not cpu_kernels.is_available(torch.ones(1)) and choice.choose().name == 'torch'
assert argmax(torch.tensor([[0.0, 2.0]])).tolist() == [1]
print(choice.choose())
"""


def run(code: str, folder: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", choice.VARIABLE)}
    env |= {"XDG_CACHE_HOME": str(folder)} | settings
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=False, capture_output=True, text=True)


@compiled
def test_without_a_compiler_torch_does_the_work(tmp_path: Path) -> None:
    for settings, word in (({"PATH": str(tmp_path)}, "no C++ compiler"), ({"CXX": "/bin/false"}, "/bin/false failed")):
        done = run(FALLS_BACK, tmp_path, **settings)
        assert done.returncode == 0, done.stderr
        assert word in done.stdout
    code = "from skipdecode.backends import choice; choice.choose()"
    done = run(code, tmp_path, CXX="/bin/false", SKIPDECODE_KERNELS=NAMES[0])
    assert "BackendError" in done.stderr
    assert "/bin/false failed" in done.stderr


@compiled
@pytest.mark.slow
def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    """The compiler is a script that gives out the library that we have: what is tested is the cache."""
    name = choice.choose().name
    made = os.path.realpath(build.load(name, choice.cpu_flags())._name)
    script = tmp_path / "compiler.sh"
    script.write_text(f'for last; do :; done; case "$last" in *.so) cp {made} "$last";; *) : > "$last";; esac\n')
    code = f"from skipdecode.backends.choice import choose; assert choose().name == '{name}', choose()"
    settings = {"CXX": f"/bin/sh {script}", "SKIPDECODE_KERNELS": name}
    assert run(code, tmp_path, **settings).returncode == 0
    (library,) = tmp_path.glob("*/*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])  # loading this would be a bus error
    done = run(code, tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert len(library.read_bytes()) == len(whole)
    assert run(code, tmp_path, PATH="", CXX="", SKIPDECODE_KERNELS=name).returncode == 0  # kept


@compiled
def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes here: the lock belongs to the open file."""
    name, flags = choice.choose().name, choice.cpu_flags()
    made = Path(os.path.realpath(build.load(name, flags)._name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    targets: list[Path] = []

    def compile_slowly(command: list[str], libraries: list[Path], target: Path) -> None:
        targets.append(target)
        time.sleep(0.5)
        shutil.copy(made, target)

    monkeypatch.setattr(build, "_compile", compile_slowly)
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: build.load.__wrapped__(name, flags), range(3)))
    assert len(targets) == 1


@compiled
@pytest.mark.parametrize("fault", ["folder of another", "folder for all", "file of another", "file for all", "link"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In HOME=/tmp another user can be the first to make the folder, with any library and its hash."""
    made = Path(os.path.realpath(build.load(choice.choose().name, choice.cpu_flags())._name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._keep(made)
    library = tmp_path / "skipdecode-ray" / made.name
    assert sorted(library.parent.iterdir()) == sorted([library, library.with_suffix(".sha256")])
    assert build._load_kept(made.name) is not None
    changed = library.parent if "folder" in fault else library
    if "of another" in fault:
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(changed, 65534, -1)
    elif fault == "link":
        library.rename(tmp_path / "moved")
        library.symlink_to(tmp_path / "moved")
    else:
        changed.chmod(0o777)
    assert build._load_kept(made.name) is None
    build._keep(made)
    is_kept = build._load_kept(made.name) is not None
    assert is_kept == ("folder" not in fault), "a file is replaced, a folder is not used"


@pytest.mark.parametrize(
    ("cpu", "effort"),
    [
        *((cpu, ("-fsyntax-only",)) for cpu in ("sapphire rapids", "haswell")),
        *(pytest.param(cpu, ("-O0", "-c"), marks=pytest.mark.slow) for cpu in CPUS if cpu != "arm"),
    ],
)
def test_the_source_compiles_for_cpus_that_are_not_here(cpu: str, effort: tuple[str, ...], tmp_path: Path) -> None:
    """What this machine can run has been compiled, and is tested; the rest is compiled at least."""
    flags = frozenset(CPUS[cpu][0])
    name = choice.possible(flags)[0]
    options = build.compile_flags(name, flags)
    command = build.find_compiler()
    if not command:
        pytest.skip("no C++ compiler")
    if name in choice.possible() and options == build.compile_flags(name, choice.cpu_flags()):
        pytest.skip("this machine runs it")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run([*command, *options, "-O0", "-c", str(probe), "-o", os.devnull], check=False).returncode:
        pytest.skip("this compiler does not know that CPU")
    for source in sorted(build.FOLDER.glob("*.cpp")):
        done = subprocess.run(
            [*command, *options, *effort, str(source), "-o", os.devnull],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
