"""Makes a tokenizer.json of tokenizer files that transformers alone reads: `tokenizer.model` (SentencePiece),
`tekken.json` (Mistral), or `vocab.json` with `merges.txt`.

transformers' `AutoTokenizer` runs once on a machine, in a process of its own (this file), since it loads torch. What it
makes is kept in a cache, and whoever reads rows loads the light file alone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCES = ("tokenizer.model", "tekken.json", "vocab.json")
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
PACKAGES = {"tokenizer.model": "sentencepiece and protobuf", "tekken.json": "mistral-common"}
"""What transformers needs to read them, which this project does not bring."""


def converted(folder: Path) -> Path:
    """A folder with the tokenizer.json that `AutoTokenizer` makes of the files in `folder`, which has none. ValueError
    says what to do if it makes none."""
    found = [name for name in SOURCES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder}: no tokenizer.json; set model.tokenizer to a folder that has one")
    target = cache_folder() / _digest(folder)
    if (target / "tokenizer.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        command = [sys.executable, "-P", __file__, str(folder), made]  # -P: its folder is no place for imports
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode or not (Path(made) / "tokenizer.json").is_file():
            reason = (done.stderr.strip().splitlines() or ["it wrote none"])[-1][-500:]
            needs = f" (it needs {PACKAGES[found[0]]})" if found[0] in PACKAGES else ""
            raise ValueError(
                f"{folder}: {found[0]} and no tokenizer.json, and transformers makes none of it{needs}: {reason}; or "
                "set model.tokenizer to a folder that has one"
            )
        if not target.exists():
            Path(made).rename(target)  # atomic; another process may be as far
            Path(made).mkdir()  # which the end of the block removes
    return target


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skipdecode" / "tokenizers"


def _digest(folder: Path) -> str:
    """Of all that the result depends on."""
    found = hashlib.sha256(version("transformers").encode())
    for name in (*SOURCES, *OTHERS):
        if (folder / name).is_file():
            found.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return found.hexdigest()


def main(folder: str, target: str) -> None:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    made.backend_tokenizer.save(str(Path(target) / "tokenizer.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
