"""Compiles the kernels of `cpp/` with the machine's C++ compiler, once per back end. Imports no torch by itself.

Libraries are cached (`skipdecode.user_cache`) with a hash beside them, which finds damaged files; their names depend on
everything that the machine code depends on. Which back end is wanted is up to `skipdecode.backends.choice`.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from skipdecode.user_cache import keep, open_cache, open_own

FOLDER = Path(__file__).parent / "cpp"
# Sums may be reordered, or they could not be vectorised. Not -ffast-math, which links code that flushes subnormal
# numbers to zero in the whole process.
MATH = "-fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -ffinite-math-only -freciprocal-math"
FLAGS = ("-O3", *MATH.split(), "-fopenmp", "-fPIC", "-std=c++17")
# Compiler options by CPU flag. They are named one by one, not by -march=native, so that a machine can compile every
# back end that it can run.
AMD = {"sse4a": "-DIS_AMD"}  # a flag that only AMD's CPUs have
EXTRAS = {
    "avx512": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"} | AMD,
    "amx": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"},
    "avx2": AMD,
}
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mtune=native")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")  # the default is 256
AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
TIMEOUT_S = 600  # of a step that takes ten on an idle machine


class BuildError(RuntimeError):
    """There is no compiler, or it has failed; the message says which."""


def has_slow_bfloat16(flags: Set[str]) -> bool:
    """Whether bfloat16 products outside of AMX are half as fast as float32 ones, as on Intel's CPUs since Sapphire
    Rapids. They are not on AMD's CPUs and on Cooper Lake, which has no FP16."""
    return flags >= {"avx512_bf16", "avx512_fp16"} and not flags & AMD.keys()


def compile_flags(name: str, flags: Set[str]) -> tuple[str, ...]:
    """The compiler's options for a back end on a CPU with these flags."""
    wide = () if name == "avx2" else AVX512
    tiles = AMX if name == "amx" else ()
    extras = [option for flag, option in EXTRAS[name].items() if flag in flags]
    extras += ["-DHAS_PAIRED"] if name == "avx512" and has_slow_bfloat16(flags) else []
    # a namespace of its own, so that a process can load two back ends without sharing their templates
    return (*FLAGS, *AVX2, *wide, *extras, *tiles, f"-DBACKEND_{name.upper()}", f"-Dcpu=cpu_{name}")


@cache
def load(name: str, flags: frozenset[str]) -> ctypes.CDLL:
    """The compiled library of a back end other than `torch`. BuildError if it cannot be compiled or loaded."""
    import torch

    # torch's own OpenMP, so that there is one thread pool, not two that wait for each other
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    options = compile_flags(name, flags)
    compiler = "the compiler"
    try:
        file = f"cpu-{name}-{_digest(options, torch.__version__)}.so"
        if library := _load_kept(file):
            return library
        command = find_compiler()
        if not command:
            raise BuildError("no C++ compiler: install g++ for a faster decode step")
        compiler = command[0]
        with _build_lock(file), tempfile.TemporaryDirectory(prefix="skipdecode-ray-") as folder:
            if library := _load_kept(file):  # compiled by another process meanwhile
                return library
            made = Path(folder) / file
            _compile([*command, *options], openmp, made)
            with contextlib.suppress(OSError):  # a read-only folder: every process compiles for itself
                _keep(made)
            return _load_kept(file) or ctypes.CDLL(str(made))
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: a malformed CXX
        if isinstance(error, BuildError):
            raise
        raise BuildError(f"{compiler}: {error}") from error


def _compile(command: list[str], libraries: Sequence[Path], made: Path) -> None:
    """Compiles the sources in parallel and links them into one library."""
    objects = {source: made.with_name(f"{source.stem}.o") for source in sorted(FOLDER.glob("*.cpp"))}

    def run(*arguments: str | Path) -> None:
        line = [*command, *map(str, arguments)]
        subprocess.run(line, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: run("-c", pair[0], "-o", pair[1]), objects.items()))
    run("-shared", *objects.values(), *libraries, "-o", made)


def find_compiler() -> list[str]:
    """The command of `CXX`, or the first compiler that is installed; empty if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    return named or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]


def _keep(made: Path) -> None:
    """Puts the library and its hash into the cache."""
    content = made.read_bytes()
    with open_cache() as cache:
        if cache is None:
            return
        keep(cache, _hash_of(made.name), hashlib.sha256(content).hexdigest().encode())
        keep(cache, made.name, content)


def _load_kept(name: str) -> ctypes.CDLL | None:
    """The library of that name in the cache; None if it is not there, damaged, or could be another user's."""
    with open_cache() as cache:
        if cache is None:
            return None
        try:
            with os.fdopen(open_own(_hash_of(name), cache), "rb") as file:
                digest = file.read()
            library = open_own(name, cache)
        except OSError:
            return None
    with os.fdopen(library, "rb", closefd=False) as file:
        is_whole = hashlib.sha256(file.read()).hexdigest().encode() == digest  # a truncated one would kill the process
    if is_whole:
        with contextlib.suppress(OSError):  # compiled on another kind of machine, or in a folder mounted noexec
            # by the descriptor whose contents were hashed; left open, since the loader knows libraries by their paths
            return ctypes.CDLL(f"/proc/self/fd/{library}")
    os.close(library)
    return None


@contextlib.contextmanager
def _build_lock(name: str) -> Iterator[None]:
    """Lets one process of a machine compile the library, and the others wait for it, but not for one that hangs."""
    lock = None
    with open_cache() as cache, contextlib.suppress(OSError):  # a read-only folder: every process compiles for itself
        if cache is not None:
            lock = os.open(f"{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=cache)
            deadline = time.monotonic() + TIMEOUT_S
            while not _is_locked(lock) and time.monotonic() < deadline:
                time.sleep(0.1)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hash_of(name: str) -> str:
    return name.removesuffix(".so") + ".sha256"


def _digest(options: Sequence[str], torch_version: str) -> str:
    """A hash of everything that the machine code depends on; machines of several kinds may share a home folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    system = [platform.machine(), *platform.libc_ver(), torch_version, _processor()]
    return hashlib.sha256("\0".join([*options, *system, *texts]).encode()).hexdigest()[:16]


def _processor() -> str:
    """The CPU model, for which code is tuned."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
