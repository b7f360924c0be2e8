"""The configuration of a model from its files: a Hugging Face folder or a GGUF file. No torch."""

import json
from pathlib import Path

from skipdecode.config.json_files import read_eos
from skipdecode.config.model import DecoderConfig
from skipdecode.families import config_of


def read_config(folder: str | Path) -> DecoderConfig:
    """Reads the config.json of a Hugging Face folder (and EOS of its generation_config.json), or a GGUF file.

    Raises ValueError if config.json is missing or asks for something unsupported.
    """
    if Path(folder).is_file():
        from skipdecode.checkpoint import gguf_file  # imports numpy, which a head node need not have

        return gguf_file.checked(folder, config_of)
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    generation = Path(folder) / "generation_config.json"
    try:
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        eos = None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{generation}: cannot be read: {error}") from error
    try:
        return config_of(raw if eos is None else raw | {"eos_token_id": read_eos("eos_token_id", eos)})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
