"""Reads a model's configuration from its files: a Hugging Face folder or a GGUF file. Imports torch only for a model
that none of our families takes."""

from pathlib import Path
from typing import Any

from skipdecode.config.json_files import read_json, read_mapping
from skipdecode.config.model import DecoderConfig, TokenizerRules, WantedImplementation
from skipdecode.families import FAMILIES, config_of

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
ADAPTER_FILE, TOKENIZER_FILE = "adapter_config.json", "tokenizer_config.json"
EOS = "eos_token_id"
GREEDY_KEYS: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
    "max_time": None,
}
"""Keys of generation_config.json by which transformers' greedy `generate` gives another text, and the values without
effect besides null (transformers 5.24, `generation/utils.py`)."""


SAMPLING_KEYS = ("repetition_penalty", "min_new_tokens")
"""Those that `sampling` has by the same name."""


def read_config(folder: str | Path, implementation: WantedImplementation = "auto") -> DecoderConfig:
    """Reads the config.json of a Hugging Face folder (and EOS of its generation_config.json), or a GGUF file.

    Raises ValueError if config.json is missing or asks for something unsupported. What no family of ours takes, and
    what `implementation` says, is left to transformers, which is only imported then.
    """
    if Path(folder).is_file():
        if implementation == "transformers":
            raise ValueError("model.implementation: 'transformers' reads folders, and this is a GGUF file; use own")
        from skipdecode.checkpoint import gguf_file  # imports numpy, which a head node need not have

        return gguf_file.checked(folder, config_of)
    path = Path(folder) / CONFIG_FILE
    raw = _read_raw(path)
    eos = read_mapping(path.with_name(GENERATION_FILE)).get(EOS)
    try:
        return _config_by(implementation, Path(folder), raw if eos is None else raw | {EOS: eos})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _config_by(implementation: WantedImplementation, folder: Path, raw: dict[str, Any]) -> DecoderConfig:
    refused: ValueError | None = None
    if implementation != "transformers":
        try:
            return config_of(raw)
        except ValueError as error:
            if implementation == "own" or not raw.get("model_type"):
                raise
            refused = error
    from skipdecode.model.wrapped.examine import read_wrapped  # loads torch and transformers

    family = FAMILIES.get(raw.get("model_type", ""))
    try:
        return read_wrapped(folder, raw, TokenizerRules() if family is None else family.tokenizer)
    except ValueError as error:
        if refused is None:
            raise
        raise ValueError(f"{refused}; nor by way of transformers: {error}") from error


def config_remarks(folder: Path, config: DecoderConfig) -> list[str]:
    """What of config.json and generation_config.json has no effect, or another one than in transformers; a line
    each."""
    if folder.is_file():
        return []
    raw, remarks = _read_raw(folder / CONFIG_FILE), []
    is_apart = (folder / GENERATION_FILE).is_file()
    name = GENERATION_FILE if is_apart else CONFIG_FILE
    generation = read_mapping(folder / name)
    values = {key: generation.get(key) for key in GREEDY_KEYS}
    changed = [key for key, value in values.items() if value not in (None, [], {}) and value != GREEDY_KEYS[key]]
    if changed:
        listed = ", ".join(f"{key}={values[key]!r:.40}" for key in changed)
        remedy = "".join(f"; sampling.{key}={values[key]} applies it" for key in SAMPLING_KEYS if key in changed)
        remarks.append(
            f"{folder / name}: {listed} has no effect here, while transformers' generate applies it: greedy texts "
            f"differ (docs/models.md){remedy}"
        )
    if generation.get(EOS) is None and config.eos_token_ids:
        whose = f"of {CONFIG_FILE}" if raw.get(EOS) is not None else f"that {config.model_type} has by default"
        remarks.append(
            f"{folder / name}: no {EOS}; texts end at {config.eos_token_ids}, {whose}, while transformers' generate "
            "goes on"
        )
    elif not config.eos_token_ids:
        remarks.append(f"{folder}: no {EOS}: texts end at sampling.max_new_tokens alone")
    if (unused := _unused_end(folder, config)) is not None:
        content, number = unused
        remarks.append(
            f"{folder / TOKENIZER_FILE}: its eos_token {content!r} ({number}) ends no text here, nor in transformers' "
            f"generate ({config.eos_token_ids} does); sampling.stop_token_ids=[{number}] ends answers at it"
        )
    if config.rope is not None and config.rope.scaling == "longrope":
        remarks.append(
            f"{folder / CONFIG_FILE}: with longrope a row may have {config.max_position_embeddings} tokens, where its "
            "frequencies would change (docs/models.md)"
        )
    if raw.get("auto_map"):
        remarks.append(
            f"{folder / CONFIG_FILE}: auto_map names code of its own, which is not run: the model is decoded as "
            f"{config.architecture}"
        )
    return remarks


def _unused_end(folder: Path, config: DecoderConfig) -> tuple[str, str] | None:
    """The EOS token that the tokenizer names, and its id, if it is none of those that end a text."""
    try:
        settings = read_mapping(folder / TOKENIZER_FILE)
    except ValueError:  # who loads the tokenizer says so, if it is the one that is used
        return None
    token, added = settings.get("eos_token"), settings.get("added_tokens_decoder")
    content = token.get("content") if isinstance(token, dict) else token
    if not content or not config.eos_token_ids or not isinstance(added, dict):
        return None
    contents = {key: value.get("content") for key, value in added.items() if isinstance(value, dict)}
    ids = [key for key, one in contents.items() if one == content and key not in map(str, config.eos_token_ids)]
    return (str(content), ids[0]) if ids else None


def _read_raw(path: Path) -> dict[str, Any]:
    """The contents of a config.json; ValueError says what a folder without one may be."""
    if not path.is_file():
        if path.with_name(ADAPTER_FILE).is_file():
            base = read_mapping(path.with_name(ADAPTER_FILE)).get("base_model_name_or_path") or "<its base model>"
            raise ValueError(f"{path.parent} is an adapter: model.adapter={path.parent} model.source={base}")
        raise ValueError(f"{path}: no such file; expected a Hugging Face model folder")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(raw).__name__}")
    return raw
