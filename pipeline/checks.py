"""What is checked before a run starts: checkpoint, schedule, output folder. All errors are `ConfigError`."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow.fs import LocalFileSystem

from actors.generator import choose_dtype
from actors.tokenizer import OPTTokenizer
from pipeline.config import ConfigError, JobConfig
from pipeline.input.files import Listing
from pipeline.run_folder import Note, RunFolder
from skipdecode import cpu_kernels
from skipdecode.config import OPTConfig, Quantization
from skipdecode.hub import resolve_source
from skipdecode.schedule import make_schedule, settle_ffn_skip
from skipdecode.weights import check_folder


@dataclass(frozen=True)
class Model:
    """A checkpoint that was found fit to run, and how it will be decoded."""

    folder: Path
    source: str
    """As the configuration names it."""
    config: OPTConfig
    decode: dict[str, Any]


def check_model(config: JobConfig, note: Note) -> Model:
    """Finds the checkpoint, checks its files against its config, and settles the schedule; ConfigError otherwise."""
    try:
        folder = resolve_source(config.model.source)
        opt = OPTConfig.from_folder(folder)
        check_folder(folder)
        tokenizer = config.model.tokenizer
        OPTTokenizer(resolve_source(tokenizer, "model.tokenizer") if tokenizer else folder, opt)
        decode = resolve_decode(config, opt, note)
        new = config.sampling.max_new_tokens
        make_schedule(decode, num_layers=opt.num_hidden_layers, max_new_tokens=new)
        if config.prefill.method == "swiftkv" and opt.swiftkv is None:
            raise ConfigError(
                "prefill.method: 'swiftkv' needs a checkpoint that carries SwiftKV's weights, and config.json of this "
                "one has no swiftkv; jobs.distill makes one that does, and prefill.method=full needs none"
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if new >= opt.max_position_embeddings:
        raise ConfigError(
            f"sampling.max_new_tokens: {new} leaves no room for a prompt in the model's "
            f"{opt.max_position_embeddings} positions"
        )
    return Model(folder, config.model.source, opt, decode)


def resolve_decode(config: JobConfig, opt: OPTConfig, note: Note) -> dict[str, Any]:
    """The `decode:` mapping that holds: the job's own, else the checkpoint's, else SkipDecode at speedup 2.

    `ffn_skip` is apart from that: it is the job's own, on top of whatever schedule holds.
    """
    given = config.decode.model_dump(exclude_none=True)
    skip = given.pop("ffn_skip", None)
    decode = {"method": "skipdecode"} | given if given else default_decode(opt, note)
    if skip is None:
        return decode
    return decode | {"ffn_skip": resolve_ffn_skip(skip, decode, config.prefill.method, opt, note)}


def resolve_ffn_skip(
    skip: dict[str, Any], decode: dict[str, Any], prefill: str, opt: OPTConfig, note: Note
) -> dict[str, Any]:
    """`decode.ffn_skip` with its defaults, and with the checkpoint's own layers where `calibrated` asks for them.

    `decode`, `prefill`: what lies beneath.
    """
    if skip["mode"] != "calibrated":
        return settle_ffn_skip(skip)
    if "layers" in skip:
        raise ConfigError("decode.ffn_skip.layers: has no meaning with mode 'calibrated'; use mode 'fixed'")
    band = opt.ffn_skip
    if band is None:
        raise ConfigError(
            "decode.ffn_skip.mode: this checkpoint carries no calibrated layers (ffn_skip in its config.json); "
            "jobs.calibrate makes one that does, and mode 'row' needs none"
        )
    if not isinstance(band, dict) or not {"num_layers", "layers", "warmup_tokens"} <= band.keys():
        raise ConfigError(
            "decode.ffn_skip.mode: ffn_skip in the checkpoint's config.json is not what jobs.calibrate writes"
        )
    if band["num_layers"] != opt.num_hidden_layers:
        raise ConfigError(
            f"decode.ffn_skip.mode: the layers in ffn_skip of the checkpoint's config.json were calibrated for "
            f"{band['num_layers']} layers, and this model has {opt.num_hidden_layers}"
        )
    before, now = (band.get("decode", decode), band.get("prefill", "full")), (decode, prefill)
    if before != now:
        names = [f"{decode} with prefill {prefill}" for decode, prefill in (before, now)]
        note(
            f"decode.ffn_skip: the layers were calibrated on top of {names[0]}; on top of {names[1]} their share "
            "and what they cost are others"
        )
    return settle_ffn_skip({"layers": band["layers"], "warmup_tokens": band["warmup_tokens"]} | skip)


def default_decode(opt: OPTConfig, note: Note) -> dict[str, Any]:
    """What holds where the job says nothing."""
    if opt.skip_decode is not None:
        return dict(opt.skip_decode)
    note(
        "decode: this checkpoint carries no skip_decode schedule, so it was not tuned for one; using skipdecode at "
        "speedup 2. Its text will differ from full depth (see agreement in the report); "
        "decode.method=full turns skipping off"
    )
    return {"method": "skipdecode", "speedup": 2}


def resolve_dtype(name: str, device: str) -> str:
    """`auto` settled once, here, so that all workers and all sessions of a run decode in the same type."""
    return str(choose_dtype(name, torch.device(device))).removeprefix("torch.")


def check_quantization(
    quantization: Quantization | None, opt: OPTConfig, dtype: str, device: str, *, is_here: bool = True
) -> None:
    """ConfigError where workers on `device` in `dtype`, as it is settled, could not load the model with it.

    `is_here`: they run on this machine, whose CPU may be asked.
    """
    if quantization is None:
        return
    if device != "cpu" or dtype != "bfloat16":
        raise ConfigError(
            f"model.quantization: {quantization} weights are for bfloat16 on CPUs with AMX, and this would decode in "
            f"{dtype} on {device}; null keeps the weights as they are"
        )
    if is_here and not cpu_kernels.has_tiles():
        raise ConfigError(
            f"model.quantization: {quantization} weights need a CPU with AMX and a C++ compiler; "
            f"{cpu_kernels.why_no_tiles()}; null keeps the weights as they are"
        )
    widths = {"hidden_size": opt.hidden_size, "ffn_dim": opt.ffn_dim, "word_embed_proj_dim": opt.embed_dim}
    for key, width in widths.items():
        if width % 32 or width > cpu_kernels.MAX_INT8_INPUTS:
            raise ConfigError(
                f"model.quantization: {key} {width} of this model is no multiple of 32, or above "
                f"{cpu_kernels.MAX_INT8_INPUTS}; null takes it"
            )


def check_apart(folder: RunFolder, listing: Listing) -> None:
    """ConfigError when input and run folder overlap: --overwrite would delete files, --resume read our rows."""
    if not listing.filesystem.equals(folder.filesystem):
        return
    is_local = isinstance(folder.filesystem, LocalFileSystem)
    root = os.path.realpath(folder.root) if is_local else folder.root
    for given in listing.folders:
        path = os.path.realpath(given) if is_local else given
        if f"{root}/".startswith(f"{path.rstrip('/')}/"):
            raise ConfigError(
                f"output.path: {folder.shown} lies in the input folder {given}, which is read with everything in it; "
                "choose an output.path outside, or give input.path as a pattern like *.parquet"
            )
    for file in listing.files:
        path = os.path.realpath(file.path) if is_local else file.path
        if path.startswith(f"{root}/"):
            raise ConfigError(
                f"output.path: the input file {file.path} lies in {folder.shown}; "
                "choose an output.path that holds nothing of input.path"
            )


def new_folder(path: str) -> Path:
    """Where a checkpoint of `output` goes; ConfigError when something is there, or nothing can be."""
    target = Path(path).expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"output: {target} exists already; choose another output, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: {target} cannot be created: {error}") from error
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"output: {target} cannot be created: {target.parent} is no folder that we may write to")
    return target


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """An empty folder of our own beside `target` (from `new_folder`), which becomes it when the block ends well."""
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    staging.mkdir()
    try:
        yield staging
        if target.is_dir():
            target.rmdir()  # empty, as was checked
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(folder: RunFolder, config: JobConfig) -> dict[str, Any] | None:
    """The state of the run to resume, or None for a new one; ConfigError when the place is taken."""
    mode = config.output.if_exists
    try:
        folder.filesystem.create_dir(folder.root, recursive=True)
    except OSError as error:
        raise ConfigError(f"output.path: {folder.shown} cannot be created: {error}") from error
    if mode == "overwrite" and (strangers := folder.strangers()):
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ConfigError(
            f"output.path: {folder.shown} holds {', '.join(strangers[:3])}{more}, which no run of ours wrote, and "
            "--overwrite will not delete it; move it away, or choose another output.path"
        )
    if mode == "overwrite" or not folder.exists():
        return None
    if mode == "fail":
        raise ConfigError(
            f"output.path: {folder.shown} exists already; use --resume to go on with it, --overwrite to start anew, "
            "or another output.path"
        )
    state = folder.read_state()
    if state is None or not {"fingerprint", "books", "sessions"} <= state.keys():
        raise ConfigError(f"output.path: {folder.shown} exists but holds no run.json of a run to resume")
    return state
