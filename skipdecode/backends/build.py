"""The kernels of `cpp/`, compiled once per machine and back end by the C++ compiler that is there; no torch at import.

Which back end it is to be decides `skipdecode.backends.choice`. Libraries are kept in the user's cache folder, with
their hash beside them; their names change with all that the machine code depends on.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "cpp"
# Sums may be reordered, which is what makes them vectors. Not -ffast-math: at linking it adds code that takes subnormal
# numbers away from the whole process.
MATH = "-fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -ffinite-math-only -freciprocal-math"
FLAGS = ("-O3", *MATH.split(), "-fopenmp", "-fPIC", "-std=c++17")
# What each back end may use beyond AVX2, by the CPU's flag. Named one by one, not -march=native, so that a machine can
# make every back end that it can run.
AMD = {"sse4a": "-DIS_AMD"}  # which only AMD's cores have
EXTRAS = {
    "avx512": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"} | AMD,
    "amx": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"},
    "avx2": AMD,
}
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mtune=native")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")  # compilers choose 256
AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
TIMEOUT_S = 120


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message says which."""


def has_slow_bfloat16(flags: Set[str]) -> bool:
    """Whether a CPU takes as long for a pair of bfloat16 as for four float32, outside of AMX: Intel's since Sapphire
    Rapids. AMD's do not, nor does Cooper Lake, which has no FP16."""
    return flags >= {"avx512_bf16", "avx512_fp16"} and not flags & AMD.keys()


def compile_flags(name: str, flags: Set[str]) -> tuple[str, ...]:
    """The compiler's flags for a back end on a CPU with these flags, without sources and output."""
    wide = () if name == "avx2" else AVX512
    tiles = AMX if name == "amx" else ()
    extras = [option for flag, option in EXTRAS[name].items() if flag in flags]
    extras += ["-DHAS_PAIRED"] if name == "avx512" and has_slow_bfloat16(flags) else []
    # a namespace of its own: where a process loads two back ends, the second must not find the first one's templates
    return (*FLAGS, *AVX2, *wide, *extras, *tiles, f"-DBACKEND_{name.upper()}", f"-Dcpu=cpu_{name}")


@cache
def load(name: str, flags: frozenset[str]) -> ctypes.CDLL:
    """The compiled kernels of a back end other than `torch`. BuildError where they cannot be had."""
    import torch

    # torch's own OpenMP by its file, so that there is one pool of threads, not two that wait for each other
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    options = compile_flags(name, flags)
    compiler = "the compiler"
    try:
        kept = _cache_folder() / f"cpu-{name}-{_digest(options, torch.__version__)}.so"
        if _is_whole(kept):
            with contextlib.suppress(OSError):  # made on another kind of machine, or in a folder that runs nothing
                return ctypes.CDLL(str(kept))
        command = find_compiler()
        if not command:
            raise BuildError("no C++ compiler: install g++ for a faster decode step")
        compiler = command[0]
        with tempfile.TemporaryDirectory(prefix="skipdecode-ray-") as folder:
            made = Path(folder) / kept.name
            _compile([*command, *options], openmp, made)
            with contextlib.suppress(OSError):  # a folder that cannot be written to: compiled anew by each process
                _keep(made, kept)
                return ctypes.CDLL(str(kept))
            return ctypes.CDLL(str(made))
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: of a CXX cut short
        if isinstance(error, BuildError):
            raise
        raise BuildError(f"{compiler}: {error}") from error


def _compile(command: list[str], libraries: Sequence[Path], made: Path) -> None:
    """Every source on its own, as many at a time as there are cores, and then all into one library."""
    objects = {source: made.with_name(f"{source.stem}.o") for source in sorted(FOLDER.glob("*.cpp"))}

    def run(*arguments: str | Path) -> None:
        line = [*command, *map(str, arguments)]
        subprocess.run(line, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: run("-c", pair[0], "-o", pair[1]), objects.items()))
    run("-shared", *objects.values(), *libraries, "-o", made)


def find_compiler() -> list[str]:
    """`CXX`, or the first compiler there is; empty where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    return named or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]


def _keep(made: Path, kept: Path) -> None:
    """Whole or not at all, since several workers of a machine may start at once; with its hash beside it."""
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = made.read_bytes()
    for path, data in ((_hash_of(kept), hashlib.sha256(content).hexdigest().encode()), (kept, content)):
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)


def _is_whole(kept: Path) -> bool:
    """A library cut short, by a full disk or a machine that went down, would end the process that loads it."""
    try:
        return hashlib.sha256(kept.read_bytes()).hexdigest() == _hash_of(kept).read_text()
    except OSError:
        return False


def _hash_of(kept: Path) -> Path:
    return kept.with_suffix(".sha256")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipdecode-ray"


def _digest(options: Sequence[str], torch_version: str) -> str:
    """Of all that the machine code depends on; a home folder may be shared by machines of several kinds."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    system = [platform.machine(), *platform.libc_ver(), torch_version, _processor()]
    return hashlib.sha256("\0".join([*options, *system, *texts]).encode()).hexdigest()[:16]


def _processor() -> str:
    """The CPU's kind, for which code is tuned."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
