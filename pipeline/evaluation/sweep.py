"""Quality against speed: decodes one set of prompts with every model and every schedule of a configuration.

It runs in this process without Ray, with the same `Generator` that the workers of a run use. Speedup and agreement are
measured on the batches that are decoded at full depth, too: all, or the share that `baseline_fraction` names.
The metrics are `pipeline.evaluation.metrics`; table and plot are `pipeline.evaluation.sweep_report`.
"""

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from actors.failures import RowFailure
from actors.generator import Generator, WindowResult
from actors.generator_config import GeneratorConfig
from actors.training.trainer import mean_losses
from pipeline.cluster.machine import device_to_measure
from pipeline.config.job import ConfigError, DecodeConfig, JobConfig, Section
from pipeline.evaluation.documents import Decode, ReferenceScores, SettingFigures, SweepDocument, SweepRow
from pipeline.evaluation.metrics import rouge_rows, scores, slot_share
from pipeline.evaluation.score import draw_pairs, loss_figures, measured_on
from pipeline.evaluation.speed import speed_figures
from pipeline.evaluation.sweep_corpus import Corpus, SweepData, load_corpus
from pipeline.evaluation.sweep_report import headline, write_json, write_report
from pipeline.formatting import Log, count
from pipeline.input.training_pairs import encode_pairs
from pipeline.report.document import Speedup
from pipeline.resolve_model import check_kv_cache_dtype, check_model, check_quantization, resolve_decode
from skipdecode.backends.choice import choose
from skipdecode.backends.host_memory import num_cores
from skipdecode.config.model import KVCacheDtype, Quantization
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.from_config import METHODS, listed_schedule

LOSS_ROWS = 16  # pairs per batch of the loss, which holds keys and values of all layers
SPEED_BATCHES = 4  # batches that are timed for each size of `speed_at`


class SweepDecode(DecodeConfig):
    name: str | None = None
    """Name in table and plot, shown after the label; null: made from the schedule, and from its method if the model
    runs several."""
    prefill: Literal["full", "swiftkv"] = "full"
    """Method of the prompt: full or swiftkv."""


class SweepRun(Section):
    label: str
    """Name of the model in table and plot."""
    model: str
    """A folder or a hub id."""
    adapter: str | None = None
    """The folder of a LoRA adapter for it; null: none."""
    quantization: Quantization | None = None
    """int8, int4 or fp8 quantizes the weights, like `model.quantization` of a job."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8 stores keys and values in 8 bits, like `model.kv_cache_dtype` of a job; losses are taken without a cache."""
    decode: Annotated[tuple[SweepDecode, ...], Field(min_length=1)]

    @property
    def is_plain(self) -> bool:
        """Whether weights, keys and values are as they are."""
        return self.quantization is None and self.kv_cache_dtype == "auto"


class SweepConfig(Section):
    data: SweepData = SweepData()
    runs: Annotated[tuple[SweepRun, ...], Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum tokens of an answer."""
    perplexity_pairs: Annotated[int, Field(ge=0)] = 512
    """Number of (prompt, reference) pairs for the loss under each schedule; 0: no loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type that the decoder computes in."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Rows of a batch."""
    baseline_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a setting's batches that are decoded at full depth, too, to measure speedup and agreement; the first,
    third
    and fifth always are. All texts are scored."""
    speed_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Further batch sizes to measure the speedup at, with four batches each."""
    ignore_eos: bool = False
    """Generates `max_new_tokens` for every row; for random weights, where only speed matters."""
    plot_against: Literal["speedup", "ffn_skip_share"] = "speedup"
    """The x axis of the plot."""
    output: str = "outputs/quality"
    """Folder of table, plot and figures."""


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    name: str
    decode: Decode
    prefill: str


def run_sweep(config: SweepConfig, log: Log, command: str) -> SweepDocument:
    """Decodes and scores all settings; writes `quality.json` (which is returned), `.md`, `.svg` and `.png` to
    `output`."""
    device = device_to_measure(config.device)
    corpus = load_corpus(config.data, log)
    dtype = dtype_name(choose_dtype(config.dtype, device))
    settings = [check_run(config, index, dtype, device.type, log) for index in range(len(config.runs))]
    try:
        Path(config.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{config.output} cannot be created: {error}") from error
    document: SweepDocument = {
        **measured_on(device),
        "dtype": dtype,
        "command": command,
        "config": config.model_dump(mode="json"),
        "prompts": len(corpus.prompts),
        "references": len(corpus.pairs),
        "slot_share_of_references": corpus.slot_share,
        "rows": [],
    }
    for row in measure_all(config, settings, corpus, log):
        document["rows"].append(row)
        write_json(document, Path(config.output))  # an interrupted sweep keeps what it has
    write_report(document, Path(config.output))
    return document


def measure_all(
    config: SweepConfig, settings: Sequence[Sequence[Setting]], corpus: Corpus, log: Log
) -> Iterator[SweepRow]:
    """Yields the rows of the table. `settings` holds the settings of each entry of `runs`."""
    total, done = sum(map(len, settings)), 0
    for run, own in zip(config.runs, settings, strict=True):
        for row in measure_run(config, run, own, corpus, log):
            done += 1
            log(f"[{done}/{total}] {headline(row)}")
            yield row


def measure_run(
    config: SweepConfig, run: SweepRun, settings: Sequence[Setting], corpus: Corpus, log: Log
) -> Iterator[SweepRow]:
    """Yields the rows of one entry of `runs`, whose checkpoint is loaded once and freed before the next is loaded."""
    generator = Generator(generator_config(config, run))
    encoded = encode_pairs(generator.tokenizer, corpus.pairs)
    pairs = draw_pairs(encoded, config.perplexity_pairs, generator.model.config.max_position_embeddings)
    plain = generator if run.is_plain else Generator(generator_config(config, run, plain=True))
    started = time.monotonic()
    full = decode(plain.with_decode({"method": "full"}, prefill="full"), corpus.prompts, config)
    full_s = time.monotonic() - started
    full_texts = texts_in(plain, full)
    del plain
    given = [setting.decode | {"prefill": setting.prefill} for setting in settings]
    schedules = [listed_schedule(generator.model.config, one, config.max_new_tokens) for one in given]
    if pairs:
        name, num_pairs = run.label or run.model, count(len(pairs), "reference")
        log(f"{name}: full depth took {full_s:.0f} s; now the loss of {num_pairs}")
    losses = mean_losses(generator.model, pairs, schedules, LOSS_ROWS) if pairs else [None] * len(settings)
    for setting, loss in zip(settings, losses, strict=True):
        started = time.monotonic()
        tuned = generator.with_decode(setting.decode, prefill=setting.prefill)
        known = full if run.is_plain and is_full_depth(tuned, config) else None
        row: SweepRow = {
            "label": run.label,
            "name": setting.name,
            "model": run.model,
            "adapter": run.adapter,
            "quantization": run.quantization,
            "kv_cache_dtype": run.kv_cache_dtype,
            "decode": setting.decode,
            "prefill": setting.prefill,
            **measure(tuned, corpus, full_texts, loss, config, known),
            "speed_at": {str(size): speed(tuned, size, corpus, config) for size in config.speed_at},
            "elapsed_s": 0.0,
        }
        row["elapsed_s"] = time.monotonic() - started + (0.0 if known is None else full_s)
        yield row


def is_full_depth(generator: Generator, config: SweepConfig) -> bool:
    return generator.schedule(config.max_new_tokens) == generator.full


def check_run(config: SweepConfig, index: int, dtype: str, device: str, log: Log) -> list[Setting]:
    """The settings of one entry of `runs`; raises ConfigError if its checkpoint or a schedule is not usable."""
    run = config.runs[index]
    base = {
        "model": {"source": run.model, "adapter": run.adapter},
        "sampling": {"max_new_tokens": config.max_new_tokens},
    }
    try:
        model = check_model(JobConfig.model_validate(base | {"decode": {"method": "full"}}), log)
        check_quantization(run.quantization, model.config, dtype, device, choose().lacks(run.quantization))
        check_kv_cache_dtype(run.kv_cache_dtype, model.config, dtype, device)
    except ConfigError as error:
        raise ConfigError(f"runs.{index}.model ({run.label})", str(error)) from error
    decodes = []
    for number, given in enumerate(run.decode):
        if "prefix" in given.model_fields_set:
            key = f"runs.{index}.decode.{number}.prefix ({run.label})"
            raise ConfigError(key, "a sweep shares no prefixes; leave it out")
        own = {"decode": given.model_dump(exclude={"name", "prefill"}), "prefill": {"method": given.prefill}}
        try:
            decodes.append(resolve_decode(JobConfig.model_validate(base | own), model.config, log))
            listed_schedule(model.config, decodes[-1] | {"prefill": given.prefill}, config.max_new_tokens)
        except ValueError as error:
            raise ConfigError(f"runs.{index}.decode.{number} ({run.label})", str(error)) from error
    settings = []
    for given, decode, made in zip(run.decode, decodes, schedule_names(decodes), strict=True):
        name = made + ", SwiftKV" * (given.prefill == "swiftkv") if given.name is None else given.name
        settings.append(Setting(f"{run.label} {name}".strip(), decode, given.prefill))
    return settings


def schedule_names(decodes: Sequence[Decode]) -> list[str]:
    """`full depth`, `3x`, `10/6` (most and fewest layers), or the constant number of layers; for other methods, and
    where the schedules are of several methods, the method comes first: `early_exit 3x`."""
    methods = {decode["method"] for decode in decodes} - {"full"}
    return [_schedule_name(decode, has_method=len(methods) > 1) for decode in decodes]


def _schedule_name(decode: Decode, *, has_method: bool) -> str:
    method = str(decode["method"])
    keys = METHODS[method].keys
    if method == "full":
        name = "full depth"
    elif "max_layers" in decode:
        name = f"{decode['max_layers']}/{decode['min_layers']}"
    elif isinstance(layers := decode.get("layers"), list | tuple):
        name = f"{len(layers)} chosen"
    elif layers is not None:
        name = str(layers)
    elif "speedup" in keys:
        name = f"{decode.get('speedup', 2):g}x"
    else:
        name, has_method = " ".join(str(decode[key]) for key in keys if decode.get(key) is not None), True
    if has_method and method != "full":
        name = f"{method} {name}".strip()
    skip = decode.get("ffn_skip")
    if isinstance(skip, dict):
        name += f", FFN {skip['mode']}" + (f" {skip['threshold']}" if "threshold" in skip else "")
    return name


def generator_config(config: SweepConfig, run: SweepRun, *, plain: bool = False) -> GeneratorConfig:
    """The generator of one entry of `runs`; with `plain`, without quantization."""
    return GeneratorConfig(
        source=run.model,
        adapter=run.adapter,
        quantization=None if plain else run.quantization,
        kv_cache_dtype="auto" if plain else run.kv_cache_dtype,
        decode={"method": "full"},
        dtype=config.dtype,
        device=config.device,
        num_threads=config.threads or num_cores(),
        batch_size=config.batch_size,
        baseline_fraction=config.baseline_fraction,
    )


def measure(
    generator: Generator,
    corpus: Corpus,
    full_texts: Sequence[str],
    loss: float | None,
    config: SweepConfig,
    known: WindowResult | None = None,
) -> SettingFigures:
    """The figures of one setting: scores of its texts, `loss` of the references, layers and speedup.

    `rougeL_to_full` and `equal_to_full` compare with `full_texts`, the texts of the same model at full depth.
    `known` is
    the result of decoding if it is there already.
    """
    result = decode(generator, corpus.prompts, config) if known is None else known
    texts = texts_in(generator, result)
    similarity = rouge_rows(texts, [[text] for text in full_texts])["rougeL"]  # 0 for two empty texts
    return {
        "failed": sum(isinstance(answer, RowFailure) for answer in result.answers),
        **speed_figures(result, config.batch_size, is_full=is_full_depth(generator, config)),
        **(reference_scores(texts, corpus.references) if corpus.references else ReferenceScores()),
        "rougeL_to_full": fmean(100.0 if a == b else r for a, b, r in zip(texts, full_texts, similarity, strict=True)),
        "equal_to_full": fmean(map(operator.eq, texts, full_texts)),
        **loss_figures(loss),
        **slot_share(corpus.prompts, texts),
    }


def reference_scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> ReferenceScores:
    rows = rouge_rows(texts, references)["rougeL"]
    return {**scores(texts, references), "rougeL_rows": [round(value, 3) for value in rows]}


def texts_in(generator: Generator, result: WindowResult) -> list[str]:
    return ["" if isinstance(a, RowFailure) else generator.tokenizer.decode(a.tokens) for a in result.answers]


def decode(generator: Generator, prompts: Sequence[str], config: SweepConfig) -> WindowResult:
    """Decodes all prompts as one window, in batches of similar lengths."""
    sampling = Sampling(max_new_tokens=config.max_new_tokens, ignore_eos=config.ignore_eos)
    tokens = generator.tokenizer.encode(prompts)
    return generator([Request(str(row), ids, sampling) for row, ids in enumerate(tokens)])


def speed(generator: Generator, size: int, corpus: Corpus, config: SweepConfig) -> Speedup:
    """The speedup in batches of `size` rows of any length, on a sample of the prompts."""
    longest = generator.model.config.max_position_embeddings
    alike = generator.with_decode(generator.config.decode, size, length_buckets=[longest])
    prompts = [*corpus.prompts] * -(-SPEED_BATCHES * size // len(corpus.prompts))
    result = decode(alike, prompts[: SPEED_BATCHES * size], config)
    return speed_figures(result, size, is_full=is_full_depth(alike, config))["speedup"]
