"""Makes a tokenizer.json of tokenizer files that transformers alone reads: `tokenizer.model` (SentencePiece),
`tekken.json` (Mistral), or `vocab.json` with `merges.txt`.

transformers reads them once on a machine, in a process of its own (this file), since it loads torch. What it makes is
kept in the user's cache (`skipdecode.user_cache`), and whoever reads rows loads the light file alone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SOURCES = ("tekken.json", "tokenizer.model", "vocab.json")
"""Of several the first is read, as `AutoTokenizer` prefers tekken.json for models of Mistral."""
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


def converted(folder: Path) -> str:
    """The tokenizer.json that transformers makes of the files in `folder`, which has none. ValueError says what to do
    if it makes none."""
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
        target = Path(made) / "tokenizer.json"
        # -P: the folder of this file is no place for imports
        command = [sys.executable, "-P", __file__, str(folder / source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode or not target.is_file():
            reason = (done.stderr.strip().splitlines() or ["it wrote none"])[-1][-500:]
            if source == "tokenizer.model" and find_spec("sentencepiece") is None:
                reason = "it needs the package sentencepiece: pip install sentencepiece"
            raise ValueError(
                f"{folder}: {source} and no tokenizer.json, and transformers makes none of it: {reason}; or "
                "set model.tokenizer to a folder that has one"
            )
        return target.read_text(encoding="utf-8")


def _digest(folder: Path) -> str:
    """Of all that the result depends on."""
    found = hashlib.sha256(version("transformers").encode() + Path(__file__).read_bytes())
    for name in (*SOURCES, *OTHERS):
        if (folder / name).is_file():
            found.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return found.hexdigest()


def main(source: Path, target: str) -> None:
    _read(source).save(target)


def _read(source: Path) -> "Tokenizer":
    """The tokenizer of `tekken.json` begins a text with BOS, as mistral-common does.

    `AutoTokenizer` would give it as mistral-common's own class, which has no tokenizer.json, or without BOS, as that
    package is installed or not.
    """
    if source.name != "tekken.json":
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(source.parent, local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = made.backend_tokenizer
        return backend
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.mistral import MistralConverter

    tokenizer: Tokenizer = MistralConverter(str(source)).converted()
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[bos])
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
