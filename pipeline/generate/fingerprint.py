"""The fingerprint: a flat record of everything that decides the rows of a run, with which a resumed run is compared.

Two changes go unnoticed: file contents that change while path, size and time stay the same (on a disk; an object store
has an etag, too), and bytes of weight files above 4 MiB that are in none of the samples.
"""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from actors.templates.chat_template import ChatTemplate
from pipeline.config.input import PROMPT_SOURCES
from pipeline.config.job import DecodeConfig, JobConfig
from pipeline.formatting import Json
from pipeline.input.input_plan import InputPlan
from pipeline.store.digest import describe_difference, digest_adapter, digest_files, refuse_differences
from pipeline.store.run_state import FileEntry, Fingerprint, RunState
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.lora_adapter import resolve_adapter
from skipdecode.config.model import Implementation
from skipdecode.schedules.lossless import KEYS as LOSSLESS_KEYS

CODE_VERSION = 9  # raise when a change alters the tokens or rows that the same configuration gives
IMPLEMENTATION = "model.implementation"
INPUT_KEYS = (
    "chat",
    "system",
    "chat_template_kwargs",
    "continue_final_message",
    "sampling_column",
    "id_column",
    "too_long",
    "limit",
)
NUM_SHOWN = 3  # input files that an error names


def fingerprint(
    config: JobConfig,
    decode: dict[str, Json],
    model_folder: Path,
    dtype: str,
    plan: InputPlan,
    chat: ChatTemplate | None = None,
    *,
    implementation: Implementation,
    prefill: str,
) -> Fingerprint:
    """`decode`, `dtype`, `implementation`, `prefill`: as resolved, never "auto"; `chat`: None where no prompt goes
    through it. A resumed run must agree in every entry."""
    entries: Fingerprint = {"code_version": CODE_VERSION, "model.dtype": dtype, IMPLEMENTATION: implementation}
    entries |= _settings(config, decode, prefill)
    if config.sampling.deterministic:
        entries["actors.batch_size"] = config.actors.batch_size
        entries["actors.length_buckets"] = list(config.actors.length_buckets)
    entries["model.files"] = digest_files(model_folder)
    entries["model.adapter"] = config.model.adapter and digest_adapter(resolve_adapter(config.model.adapter))
    tokenizer = config.model.tokenizer
    entries["model.tokenizer"] = tokenizer and digest_files(resolve_source(tokenizer, "model.tokenizer"))
    entries["input.chat_template"] = hashlib.sha256(chat.source.encode()).hexdigest() if chat else None
    entries["input.format"] = plan.listing.format
    entries["input.files"] = _digest_rows(list_files(plan))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in entries.items()}


def _settings(config: JobConfig, decode: dict[str, Json], prefill: str) -> Fingerprint:
    """The entries that the configuration alone decides."""
    entries: Fingerprint = {"model.quantization": config.model.quantization, "decode.prefix": config.decode.prefix}
    entries["model.kv_cache_dtype"] = config.model.kv_cache_dtype
    skip = decode.get("ffn_skip")
    entries |= {f"decode.{key}": value for key, value in decode.items() if key not in ("ffn_skip", *LOSSLESS_KEYS)}
    entries["prefill.method"] = prefill
    entries["decode.lossless"] = bool(decode.get("lossless"))  # how many tokens are drafted, if any, changes none
    entries |= {f"decode.ffn_skip.{key}": value for key, value in (skip if isinstance(skip, dict) else {}).items()}
    for section, names in (
        ("sampling", None),
        ("input", (*PROMPT_SOURCES, *INPUT_KEYS)),
        ("output", ("reasoning_parser",)),
        ("limits", ("max_line_bytes",)),
    ):
        values: dict[str, Json] = getattr(config, section).model_dump(mode="json")
        entries |= {f"{section}.{key}": value for key, value in values.items() if names is None or key in names}
    return entries


def defaults() -> Fingerprint:
    """What an entry means in the fingerprint of an older version (1.0 or newer) that did not have it yet: the default
    of its configuration key. An entry that no configuration key decides belongs here, too, when it is added."""
    return {IMPLEMENTATION: "own"} | _settings(JobConfig(), DecodeConfig().model_dump(mode="json"), "full")


def list_files(plan: InputPlan) -> list[FileEntry]:
    """The input as `run.json` has it: name, size in bytes, time of the last change in ns, etag, documents; per file."""
    return [
        [file.name, file.size_bytes, file.mtime_ns, etag, num_documents]
        for file, etag, num_documents in zip(plan.listing.files, plan.etags, plan.num_documents_per_file, strict=True)
    ]


def _digest_rows(rows: Sequence[FileEntry]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(("\0".join(map(str, row)) + "\n").encode())
    return total.hexdigest()


def compare_fingerprints(state: RunState, now: Fingerprint, plan: InputPlan, free: Collection[str] = ()) -> None:
    """ConfigError that names each entry in which `now` differs from the run of `state` (run.json), with both values.

    A key that the run lacks means its default (`defaults`). `free`: keys that may differ.
    """
    default, lines = defaults(), list[str]()
    before = {key: default[key] for key in now if key in default} | state["fingerprint"]
    if before.get("input.files") != now.get("input.files"):
        files = compare_files(state["input"]["files"], list_files(plan))
        lines = [f"input.files: {line}" for line in files]
    refuse_differences(before, now, {"input.files", *free}, lines)


def compare_files(before: Sequence[FileEntry], now: Sequence[FileEntry]) -> list[str]:
    """A line for each of the first files that differ between two listings (`list_files`), and one for the rest."""
    old, new = ({str(row[0]): _describe_file(row) for row in rows} for rows in (before, now))
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    lines = [describe_difference(name, old.get(name), new.get(name)) for name in itertools.islice(names, NUM_SHOWN)]
    if not names and [row[0] for row in before] != [row[0] for row in now]:
        return ["the same files come in another order"]
    return [*lines, f"{len(names) - NUM_SHOWN} more files differ"] if len(names) > NUM_SHOWN else lines


def _describe_file(row: FileEntry) -> str:
    _, size_bytes, mtime_ns, etag, num_rows = row
    return f"{size_bytes} bytes, mtime {mtime_ns} ns, {num_rows} rows" + (f", etag {etag}" if etag else "")
