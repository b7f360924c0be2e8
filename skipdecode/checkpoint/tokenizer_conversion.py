"""Makes a tokenizer.json of tokenizer files that transformers alone reads: `tokenizer.model` (SentencePiece),
`tekken.json` (Mistral), or `vocab.json` with `merges.txt`.

transformers' `AutoTokenizer` runs once on a machine, in a process of its own (this file), since it loads torch. What it
makes is kept in the user's cache (`skipdecode.user_cache`), and whoever reads rows loads the light file alone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

SOURCES = ("tokenizer.model", "tekken.json", "vocab.json")
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
PACKAGES = {"tokenizer.model": "sentencepiece and protobuf", "tekken.json": "mistral-common"}
"""What transformers needs to read them, which this project does not bring."""


def converted(folder: Path) -> str:
    """The tokenizer.json that `AutoTokenizer` makes of the files in `folder`, which has none. ValueError says what to
    do if it makes none."""
    from skipdecode.user_cache import keep, open_cache, open_own  # here: this file is a program, too

    found = [name for name in SOURCES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder}: no tokenizer.json; set model.tokenizer to a folder that has one")
    name = f"tokenizer-{_digest(folder)}.json"
    with open_cache() as cache:
        if cache is not None:
            with suppress(OSError), os.fdopen(open_own(name, cache), "rb") as kept:
                return kept.read().decode()
        text = _convert(folder, found[0])
        if cache is not None:
            with suppress(OSError):  # a read-only folder: every process converts for itself
                keep(cache, name, text.encode())
    return text


def _convert(folder: Path, source: str) -> str:
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-P", __file__, str(folder), made]  # -P: its folder is no place for imports
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode or not (Path(made) / "tokenizer.json").is_file():
            reason = (done.stderr.strip().splitlines() or ["it wrote none"])[-1][-500:]
            needs = f" (it needs {PACKAGES[source]})" if source in PACKAGES else ""
            raise ValueError(
                f"{folder}: {source} and no tokenizer.json, and transformers makes none of it{needs}: {reason}; or "
                "set model.tokenizer to a folder that has one"
            )
        return (Path(made) / "tokenizer.json").read_text(encoding="utf-8")


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
