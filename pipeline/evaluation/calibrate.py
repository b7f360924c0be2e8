"""`jobs.calibrate` as a library call: finds, on sample prompts, what a model can skip, and stores it with the model.

The output is a copy of the checkpoint (weights are linked where the filesystem can) with `ffn_skip` or `drafts` in its
`config.json`, and the measurements under `calibration/`. Everything runs in this process on one device; measuring is
done by `actors.measuring.ffn_calibration` and `actors.measuring.draft_search`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from actors.failures import RowFailure
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.measuring.ffn_calibration import Candidate, Pair, Progress, Sample, propose_layers, propose_rule
from pipeline.cluster.machine import device_facts, device_to_measure, version_of
from pipeline.config.job import (
    ConfigError,
    DecodeConfig,
    InputConfig,
    JobConfig,
    ModelConfig,
    PrefillConfig,
    SamplingConfig,
    Section,
)
from pipeline.evaluation.calibrate_drafts import check_carried, find_drafts
from pipeline.evaluation.calibrated_folder import write_checkpoint
from pipeline.evaluation.documents import (
    CalibrationDocument,
    CalibrationFacts,
    DraftsDocument,
    FFNSkip,
    Proposal,
    SimilarityLine,
)
from pipeline.formatting import Json, Log
from pipeline.input.sample_prompts import read_prompts
from pipeline.plots import new_figure, save_figure
from pipeline.resolve_model import ResolvedModel, check_model
from pipeline.store.model_folder import new_folder, written_whole
from skipdecode.backends.host_memory import num_cores
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRESS_S = 5.0


class CalibrateConfig(Section):
    target: Literal["ffn_skip", "drafts"] = "ffn_skip"
    """ffn_skip: which feed-forward blocks can be skipped. drafts: which layers draft best for `decode.lossless`."""
    model: ModelConfig = ModelConfig()
    decode: DecodeConfig = DecodeConfig(method="full")
    """The schedule to which skipping is added; for target=drafts it must be full depth."""
    prefill: PrefillConfig = PrefillConfig()
    input: InputConfig = InputConfig()
    """Sample prompts, read as by `generate`; bad rows are left out."""
    num_prompts: Annotated[int, Field(ge=1)] = 128
    """The number of sample prompts: the first distinct ones of the input."""
    skip_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """target=ffn_skip: the share of the feed-forward blocks of decode steps to skip."""
    warmup_tokens: Annotated[int, Field(ge=0)] = 25
    """target=ffn_skip: the first decode steps, which skip nothing."""
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1, 8, 32)
    """target=drafts: batch sizes to optimise for; drafts are chosen by their mean gain over these."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens of each sample answer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Rows of a batch."""
    output: Annotated[str, Field(min_length=1)] = "outputs/calibrated"
    """The checkpoint to write."""


OF_TARGET = {"ffn_skip": ("skip_share", "warmup_tokens"), "drafts": ("batch_sizes",)}
"""Keys that only one target uses."""


def calibrate(config: CalibrateConfig, log: Log) -> CalibrationDocument | DraftsDocument:
    """Measures, proposes, and writes the checkpoint; returns the contents of `calibration/calibration.json`."""
    started = time.monotonic()
    check_keys(config)
    target = new_folder(config.output)
    device = device_to_measure(config.device)
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    # drafts are verified at full depth, which needs the whole prompt whatever the checkpoint was released to run with
    prefill = PrefillConfig(method="full") if config.target == "drafts" else config.prefill
    try:
        model = check_model(
            JobConfig(model=config.model, decode=config.decode, prefill=prefill, sampling=sampling), log
        )
    except ConfigError as error:  # which names the key of a job
        raise error.renamed("sampling.max_new_tokens", "max_new_tokens") from error
    if config.target == "drafts":
        check_carried(model)
    elif (why := model.config.why_whole_layers) is not None:
        raise ConfigError("target", f"feed-forward blocks cannot be skipped: {why}; target=drafts needs none")
    prompts = read_prompts(config.input, config.num_prompts)
    generator, pairs = write_texts(config, model, prompts, log)

    def facts(num_prompts: int, num_tokens: int) -> CalibrationFacts:
        return {
            **device_facts(device),
            "torch": version_of("torch"),
            "model": config.model.source,
            "decode": model.decode,
            "prefill": model.prefill,
            "prompts": num_prompts,
            "tokens": num_tokens,
            "config": config.model_dump(mode="json"),
            "elapsed_s": time.monotonic() - started,
        }

    if config.target == "drafts":
        found = find_drafts(
            generator,
            pairs,
            batch_size=config.batch_size,
            batch_sizes=config.batch_sizes,
            max_new_tokens=config.max_new_tokens,
            log=log,
        )
        drafts: DraftsDocument = {**facts(found.sample.num_prompts, found.sample.num_tokens), **found.figures()}
        with written_whole(target) as staging:
            write_checkpoint(staging, model, {"drafts": found.carried()}, drafts)
        return drafts
    sample, layers, rule = propose(generator, pairs, config, log)
    document: CalibrationDocument = {
        **facts(sample.num_prompts, sample.num_tokens),
        "calibrated": _figures(layers),
        "row": _figures(rule),
    }
    with written_whole(target) as staging:
        write_checkpoint(staging, model, {"ffn_skip": _carried(document, model)}, document)
        write_similarity(staging / "calibration", sample, document)
    return document


def check_keys(config: CalibrateConfig) -> None:
    """Raises ConfigError for keys that contradict each other."""
    if config.decode.ffn_skip is not None:
        raise ConfigError("decode.ffn_skip", "is what calibration looks for; leave it out")
    if config.decode.lossless:
        raise ConfigError("decode.lossless", "calibration decodes by the schedule itself; leave it out")
    if "prefix" in config.decode.model_fields_set:
        raise ConfigError("decode.prefix", "calibration shares no prefixes; leave it out")
    if config.model.quantization is not None:
        raise ConfigError("model.quantization", "calibration measures the unquantized weights; leave it null")
    for target, keys in OF_TARGET.items():
        if wrong := [key for key in keys if target != config.target and key in config.model_fields_set]:
            raise ConfigError(wrong[0], f"has no meaning with target={config.target}; leave it out, or target={target}")
    if config.target != "drafts":
        return
    given = {key: getattr(config.decode, key) for key in sorted(config.decode.model_fields_set)}
    if any(value is not None for key, value in given.items() if (key, value) != ("method", "full")):
        raise ConfigError("decode", f"drafts are for full depth, and looked for by target=drafts; leave out {given}")
    if config.prefill.method == "swiftkv":
        raise ConfigError("prefill.method", "full depth, which drafts are for, has no SwiftKV prompt; use full")
    if twice := [size for at, size in enumerate(config.batch_sizes) if size in config.batch_sizes[:at]]:
        raise ConfigError("batch_sizes", f"{twice[0]} is there twice; name each size once")


def propose(
    generator: Generator, pairs: Sequence[Pair], config: CalibrateConfig, log: Log
) -> tuple[Sample, Candidate, Candidate]:
    """The measured sample and two proposals: a fixed set of blocks to skip, and a threshold for the row rule."""
    sample = Sample(generator.model, generator.schedule(config.max_new_tokens), pairs, config.batch_size)
    log(f"sample: {sample.num_prompts} prompts, {sample.num_tokens} tokens that a decode step made")
    try:
        layers = propose_layers(sample, config.skip_share, config.warmup_tokens, _progress(log, "fixed layers"))
        rule = propose_rule(sample, config.skip_share, config.warmup_tokens, _progress(log, "row rule"))
    except ValueError as error:
        raise ConfigError.parse(error) from error
    return sample, layers, rule


def write_texts(
    config: CalibrateConfig, model: ResolvedModel, prompts: list[str], log: Log
) -> tuple[Generator, list[Pair]]:
    """Decodes the prompts under the given schedule; prompts that do not fit the model are left out."""
    generator = Generator(
        GeneratorConfig(
            source=str(model.folder),
            tokenizer=config.model.tokenizer,
            adapter=None if model.adapter is None else str(model.adapter),
            decode=model.decode,
            prefill=model.prefill,
            implementation=model.config.implementation,
            dtype=config.model.dtype,
            device=config.device,
            num_threads=config.threads or num_cores(),
            batch_size=config.batch_size,
        )
    )
    max_prompt = model.config.max_position_embeddings - config.max_new_tokens
    encoded = generator.tokenizer.encode(prompts)
    tokens = [ids for ids in encoded if 0 < len(ids) <= max_prompt]
    if num_empty := encoded.count([]):
        log(f"{num_empty} prompts without tokens were left out: this model has no token that begins a text")
    if num_long := len(prompts) - len(tokens) - num_empty:
        log(f"{num_long} prompts with more than {max_prompt} tokens were left out")
    if not tokens:
        raise ConfigError("input.path", f"every prompt has more than {max_prompt} tokens, or none")
    requests = [Request(str(n), ids, Sampling(config.max_new_tokens)) for n, ids in enumerate(tokens)]
    answers = generator(requests).answers
    failed = [answer for answer in answers if isinstance(answer, RowFailure)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} prompts could not be decoded: {failed[0].error_message}")
    pairs = [(ids, a.tokens) for ids, a in zip(tokens, answers, strict=True) if not isinstance(a, RowFailure)]
    if all(len(made) < 2 for _, made in pairs):
        raise ConfigError("input.path", "the model ends every one of these prompts with its first token")
    return generator, pairs


def write_similarity(folder: Path, sample: Sample, document: CalibrationDocument) -> None:
    """Writes the similarities of every block as Parquet and as a heat map."""
    table = cast("list[SimilarityLine]", sample.table())
    pq.write_table(pa.Table.from_pylist(table), folder / "similarity.parquet")
    save_figure(heat_map(table, document["calibrated"]["ffn_skip"]), folder, "similarity")


def heat_map(table: Sequence[SimilarityLine], skipped: FFNSkip) -> "Figure":
    """1 - cosine (logarithmic) of each block's input and output, by layer and decode step; lines mark skipped
    blocks."""
    import numpy as np
    from matplotlib.colors import LogNorm

    shape = (max(line["layer"] for line in table) + 1, max(line["step"] for line in table) + 1)
    moved = np.full(shape, np.nan)
    for line in table:
        moved[line["layer"], line["step"]] = max(1.0 - line["mean"], 1e-6)
    figure, (axes,) = new_figure(8, 4.5)
    image = axes.imshow(moved, aspect="auto", origin="lower", norm=LogNorm(), cmap="cividis", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="1 - cos(h, h + FFN(h)), mean")
    if skipped["warmup_tokens"] < shape[1]:
        for layer in skipped["layers"]:
            axes.plot([skipped["warmup_tokens"], shape[1] - 1], [layer, layer], color="white", linewidth=0.8)
    axes.set(
        xlabel="decode step", ylabel="layer", title="How far a feed-forward block moves the state; lines: calibrated"
    )
    return figure


def _carried(document: CalibrationDocument, model: ResolvedModel) -> dict[str, Json]:
    """The entry `ffn_skip` of `config.json`."""
    found = document["calibrated"]
    layers: list[Json] = [*found["ffn_skip"]["layers"]]
    return {
        "num_layers": model.config.num_hidden_layers,
        "layers": layers,
        "warmup_tokens": found["ffn_skip"]["warmup_tokens"],
        "skip_share": found["skip_share"],
        "decode": model.decode,
        "prefill": document["prefill"],
    }


def _figures(candidate: Candidate) -> Proposal:
    """A proposal in the form of `decode.ffn_skip`, with its effect on the sample."""
    return {
        "ffn_skip": cast("FFNSkip", candidate.schedule.keys),
        "skip_share": candidate.skip_share,
        "divergence": candidate.divergence,
        "token_match": candidate.token_match,
    }


def _progress(log: Log, what: str) -> Progress:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S or done == total:
            last = time.monotonic()
            log(f"progress: {what}: {done}/{total} passes")

    return tell
