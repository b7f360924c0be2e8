"""What another user could have put into the cache folder is not taken: HOME may be /tmp. Kernels: test_cpu_choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.backends.device import TRITON_CACHE, use_own_triton_cache
from skipdecode.checkpoint import tokenizer_conversion
from skipdecode.user_cache import own_folder

FOREIGN = 65534


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that ours is made in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spoil(path: Path, how: str) -> None:
    """Makes a file or folder one that another user could have written."""
    if how == "of another":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(path, FOREIGN, -1)
    elif how == "link":
        path.rename(path.with_name("moved"))
        path.symlink_to(path.with_name("moved"))
    else:
        path.chmod(0o777)


FAULTS = pytest.mark.parametrize("how", ["of another", "for all", "link"])


@FAULTS
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_tokenizer_that_others_could_have_written_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    """Else they would decide which tokens a text becomes."""
    (tmp_path / "vocab.json").write_text("{}")
    made = iter(["first", "second", "third"])
    monkeypatch.setattr(tokenizer_conversion, "_convert", lambda *_: next(made))
    assert [tokenizer_conversion.converted(tmp_path) for _ in range(2)] == ["first", "first"]
    (kept,) = (cache / "skipdecode-ray").iterdir()
    kept.write_text("of a stranger")
    assert tokenizer_conversion.converted(tmp_path) == "of a stranger", "whose files these are is all that is checked"
    spoil(kept.parent if what == "folder" else kept, how)
    assert tokenizer_conversion.converted(tmp_path) == "second"
    is_kept = what == "file"
    assert tokenizer_conversion.converted(tmp_path) == ("second" if is_kept else "third"), "a file is replaced"


@FAULTS
@pytest.mark.parametrize("name", ["skipdecode-ray/triton", "skipdecode-ray", "."])
def test_a_library_gets_no_folder_into_which_others_can_write(cache: Path, name: str, how: str) -> None:
    assert own_folder("triton") == cache / "skipdecode-ray/triton"
    if (name, how) == (".", "link"):
        spoil(cache, how)
        assert own_folder("triton") == cache / "skipdecode-ray/triton", "a link that its owner made"
        return
    spoil(cache / name, how)
    other = own_folder("triton")
    assert cache not in other.parents
    assert (other.stat().st_uid, other.stat().st_mode & 0o777) == (os.geteuid(), 0o700)


def test_triton_keeps_its_kernels_there_unless_a_folder_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRITON_CACHE, str(tmp_path))
    use_own_triton_cache()
    assert os.environ[TRITON_CACHE] == str(tmp_path)
    monkeypatch.setenv(TRITON_CACHE, "")
    use_own_triton_cache()
    assert os.environ[TRITON_CACHE] == str(cache / "skipdecode-ray/triton")
    knobs = pytest.importorskip("triton.knobs", reason="Linux alone has Triton")
    assert knobs.cache.dir == os.environ[TRITON_CACHE]


def test_a_temporary_folder_goes_with_its_process(cache: Path) -> None:
    cache.mkdir()
    (cache / "skipdecode-ray").write_text("no folder")
    code = "from skipdecode.user_cache import own_folder; path = own_folder('triton'); print(path, path.is_dir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).exists()
