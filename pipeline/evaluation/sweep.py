"""Quality against speed: one set of prompts, decoded with every model and every schedule of a configuration.

In this process, with the same `Generator` that the workers of a run hold (their tokens are equal by test), and without
Ray. Every batch is decoded at full depth of the same model too, so speedup and agreement are measured on all of them.
The metrics are `pipeline.evaluation.metrics`; table and plot are `pipeline.evaluation.sweep_report`.
"""

import copy
import operator
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import pyarrow as pa
import torch
from pydantic import Field

from actors.generator import Generator, GeneratorConfig, RowFailure, WindowResult, choose_device, choose_dtype
from actors.trainer import mean_loss
from pipeline.checkpoint import check_model, check_quantization, resolve_decode
from pipeline.cluster import num_cores
from pipeline.config import ConfigError, DecodeConfig, InputConfig, JobConfig, Section
from pipeline.demo_corpus import make_prompts
from pipeline.evaluation.metrics import rouge_rows, scores, slot_share
from pipeline.evaluation.score import VERSIONS, ReferenceData, draw_pairs, group_references, loss_figures
from pipeline.evaluation.sweep_report import headline, write_json, write_report
from pipeline.input.pairs import encode_pairs, read_pairs
from pipeline.input.prompts import read_prompts
from pipeline.machine import provenance
from pipeline.report.batches import BatchTotals, agreement, speedup
from pipeline.report.records import BATCH_SCHEMA
from pipeline.units import Json, Note
from skipdecode.config import Quantization
from skipdecode.generate import Request
from skipdecode.sampling import Sampling
from skipdecode.schedule import listed_schedule

MADE_PROMPTS = 500  # without references
SPEED_BATCHES = 4  # for each of `speed_at`, both ways
E2E_DATA = (
    "the E2E NLG challenge data (github.com/tuetschek/e2e-dataset, CC BY-SA 4.0; devset.csv with columns mr and ref) "
    "are not part of this project; download the file and name it with data.path=... (make quality E2E=...)"
)


class SweepData(ReferenceData):
    path: str | None = "data/devset.csv"
    """null: prompts made by `pipeline.demo_corpus`, and no references."""
    has_references: bool = True
    """false: `path` holds prompts alone, in any form that jobs.generate reads."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first distinct prompts."""


class SweepDecode(DecodeConfig):
    name: str | None = None
    """Beside the label in table and plot; null: from the schedule."""
    prefill: Literal["full", "swiftkv"] = "full"
    """How the prompt runs: full, or swiftkv."""


class SweepRun(Section):
    label: str
    """Name of the model in table and plot."""
    model: str
    """A folder or a hub id."""
    quantization: Quantization | None = None
    """int8: weights of 8 bits, as `model.quantization` of a job."""
    decode: Annotated[tuple[SweepDecode, ...], Field(min_length=1)]


class SweepConfig(Section):
    data: SweepData = SweepData()
    runs: Annotated[tuple[SweepRun, ...], Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens of an answer at most."""
    perplexity_pairs: Annotated[int, Field(ge=0)] = 512
    """(prompt, reference) pairs for the loss under each schedule; 0: none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type that the decoder computes in."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Rows of a batch."""
    speed_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Batch sizes to measure the speed at too, on as many prompts as it takes for SPEED_BATCHES batches."""
    ignore_eos: bool = False
    """Every row gets `max_new_tokens`: for random weights, of which speed is all there is to measure."""
    plot_against: Literal["speedup", "ffn_skip_share"] = "speedup"
    """The x axis of the plot."""
    output: str = "outputs/quality"
    """Folder of table, plot and figures."""


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    name: str
    decode: dict[str, Any]
    prefill: str


@dataclass(frozen=True)
class Corpus:
    prompts: list[str]
    references: list[list[str]] | None
    pairs: list[tuple[str, str]]
    """(prompt, reference) of all `prompts`, for the loss."""

    @property
    def slot_share(self) -> float | None:
        """What the references themselves reach."""
        share: float | None = slot_share([p for p, _ in self.pairs], [text for _, text in self.pairs])["slot_share"]
        return share


def run_sweep(config: SweepConfig, note: Note, command: str) -> dict[str, Any]:
    """Decodes and scores everything; writes `quality.json` (what comes back), `.md`, `.svg`, `.png` into `output`."""
    device = choose_device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no CUDA device; use device=cpu")
    corpus = load_corpus(config.data, note)
    dtype = str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    settings = [check_run(config, index, dtype, device.type, note) for index in range(len(config.runs))]
    try:
        Path(config.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{config.output} cannot be created: {error}") from error
    rows: list[Json] = []
    document = provenance(device, VERSIONS) | {
        "dtype": dtype,
        "command": command,
        "config": config.model_dump(mode="json"),
        "prompts": len(corpus.prompts),
        "references": len(corpus.pairs),
        "slot_share_of_references": corpus.slot_share,
        "rows": rows,
    }
    for row in measure_all(config, settings, corpus, note):
        rows.append(row)
        write_json(document, Path(config.output))  # an interrupted sweep keeps what it has
    write_report(document, Path(config.output))
    return document


def measure_all(
    config: SweepConfig, settings: Sequence[Sequence[Setting]], corpus: Corpus, note: Note
) -> Iterator[dict[str, Any]]:
    """The lines of the table, one by one; each checkpoint is loaded once. `settings`: those of each entry of `runs`."""
    total, done = sum(map(len, settings)), 0
    for run, own in zip(config.runs, settings, strict=True):
        generator = Generator(generator_config(config, run))
        encoded = encode_pairs(generator.tokenizer, corpus.pairs, generator.model.config.eos_token_id)
        pairs = draw_pairs(encoded, config.perplexity_pairs, generator.model.config.max_position_embeddings)
        plain = generator if run.quantization is None else Generator(generator_config(config, run, plain=True))
        full_texts = texts_of(plain.with_decode({"method": "full"}, prefill="full"), corpus.prompts, config)
        del plain
        for setting in own:
            started = time.monotonic()
            row: dict[str, Any] = {
                "label": run.label,
                "name": setting.name,
                "model": run.model,
                "quantization": run.quantization,
                "decode": setting.decode,
                "prefill": setting.prefill,
            }
            tuned = generator.with_decode(setting.decode, prefill=setting.prefill)
            row |= measure(tuned, corpus, full_texts, pairs, config)
            row["speed_at"] = {
                str(size): speed(tuned.with_decode(setting.decode, size), corpus, config)["speedup"]
                for size in config.speed_at
            }
            row["elapsed_s"] = time.monotonic() - started
            done += 1
            note(f"[{done}/{total}] {headline(row)}")
            yield row


def check_run(config: SweepConfig, index: int, dtype: str, device: str, note: Note) -> list[Setting]:
    """The settings of one entry of `runs`, its checkpoint and schedules found fit; ConfigError otherwise."""
    run = config.runs[index]
    base = {"model": {"source": run.model}, "sampling": {"max_new_tokens": config.max_new_tokens}}
    try:
        model = check_model(JobConfig.model_validate(base | {"decode": {"method": "full"}}), note)
        check_quantization(run.quantization, model.config, dtype, device)
    except ConfigError as error:
        raise ConfigError("", f"runs.{index}.model ({run.label}): {error}") from error
    settings = []
    for number, given in enumerate(run.decode):
        own = {"decode": given.model_dump(exclude={"name", "prefill"}), "prefill": {"method": given.prefill}}
        try:
            decode = resolve_decode(JobConfig.model_validate(base | own), model.config, note)
            listed_schedule(model.config, decode | {"prefill": given.prefill}, config.max_new_tokens)
        except ValueError as error:
            raise ConfigError("", f"runs.{index}.decode.{number} ({run.label}): {error}") from error
        name = given.name
        if name is None:
            name = schedule_name(decode) + ", SwiftKV" * (given.prefill == "swiftkv")
        settings.append(Setting(f"{run.label} {name}".strip(), decode, given.prefill))
    return settings


def schedule_name(decode: dict[str, Any]) -> str:
    """`full depth`, `3x`, `10/6` (most and fewest layers), or the constant number of layers."""
    if "ffn_skip" in decode:
        skip = decode["ffn_skip"]
        found = next((f" {skip[key]}" for key in ("threshold", "share") if key in skip), "")
        return f"{schedule_name({k: v for k, v in decode.items() if k != 'ffn_skip'})}, FFN {skip['mode']}{found}"
    if decode["method"] == "full":
        return "full depth"
    if "max_layers" in decode:
        return f"{decode['max_layers']}/{decode['min_layers']}"
    return str(decode["layers"]) if "layers" in decode else f"{decode.get('speedup', 2):g}x"


def load_corpus(data: SweepData, note: Note) -> Corpus:
    """All distinct prompts with their references; without a file, prompts made on the spot."""
    if data.path is None:
        note(f"data.path is null, so no references, no BLEU, ROUGE or loss: {E2E_DATA}")
        return Corpus([row["prompt"] for row in make_prompts(data.limit or MADE_PROMPTS)], None, [])
    if not data.has_references:
        source = InputConfig(path=(data.path,), prompt_column=data.prompt_column)
        try:
            return Corpus(read_prompts(source, data.limit or sys.maxsize), None, [])
        except ConfigError as error:  # it speaks of a job's keys
            raise ConfigError.parse(str(error).replace("input.", "data.")) from error
    if not Path(data.path).is_file():
        raise ConfigError("data.path", f"no file {data.path}; {E2E_DATA}; data.path=null does without references")
    keys = ("data.path", "data.prompt_column", "data.reference_column")
    pairs = read_pairs(data.path, data.prompt_column, data.reference_column, keys)
    grouped = dict(list(group_references(pairs).items())[: data.limit])
    return Corpus(list(grouped), list(grouped.values()), [pair for pair in pairs if pair[0] in grouped])


def generator_config(config: SweepConfig, run: SweepRun, *, plain: bool = False) -> GeneratorConfig:
    """`plain`: without quantization."""
    return GeneratorConfig(
        source=run.model,
        quantization=None if plain else run.quantization,
        decode={"method": "full"},
        dtype=config.dtype,
        device=config.device,
        num_threads=config.threads or num_cores(),
        batch_size=config.batch_size,
        baseline_fraction=1.0,
    )


def measure(
    generator: Generator,
    corpus: Corpus,
    full_texts: Sequence[str],
    pairs: Sequence[tuple[list[int], list[int]]],
    config: SweepConfig,
) -> dict[str, Any]:
    """One line of the table: texts scored, loss of the references, layers and speedup.

    `rougeL_to_full`, `equal_to_full` (a share): against the texts of the same model at full depth and not quantized,
    `full_texts`. They say what was kept, where references reward a plainer text than the model's own.
    """
    result = decode(generator, corpus.prompts, config)
    texts = texts_in(generator, result)
    schedule = generator.schedule(config.max_new_tokens)
    row: dict[str, Any] = {"failed": sum(isinstance(answer, RowFailure) for answer in result.answers)}
    row |= speed_figures(result, is_full=schedule == generator.full)
    if corpus.references:
        row |= scores(texts, corpus.references)
        row["rougeL_rows"] = [round(value, 3) for value in rouge_rows(texts, corpus.references)["rougeL"]]
    kept = rouge_rows(texts, [[text] for text in full_texts])["rougeL"]  # 0 for two empty texts
    row["rougeL_to_full"] = fmean(100.0 if a == b else r for a, b, r in zip(texts, full_texts, kept, strict=True))
    row["equal_to_full"] = fmean(map(operator.eq, texts, full_texts))
    row |= loss_figures(mean_loss(generator.model, pairs, schedule, config.batch_size) if pairs else None)
    return row | slot_share(corpus.prompts, texts)


def texts_of(generator: Generator, prompts: Sequence[str], config: SweepConfig) -> list[str]:
    """What the generator makes of the prompts, without a measurement."""
    alone = copy.copy(generator)
    alone.config = replace(generator.config, baseline_fraction=0.0)
    return texts_in(alone, decode(alone, prompts, config))


def texts_in(generator: Generator, result: WindowResult) -> list[str]:
    return ["" if isinstance(a, RowFailure) else generator.tokenizer.decode(a.tokens) for a in result.answers]


def decode(generator: Generator, prompts: Sequence[str], config: SweepConfig) -> WindowResult:
    """All prompts in one window: sorted by length, every batch at full depth too."""
    sampling = Sampling(max_new_tokens=config.max_new_tokens, ignore_eos=config.ignore_eos)
    tokens = generator.tokenizer.encode(prompts)
    return generator([Request(str(row), ids, sampling) for row, ids in enumerate(tokens)])


def speed(generator: Generator, corpus: Corpus, config: SweepConfig) -> dict[str, Any]:
    """`speed_figures` of another batch size, on a sample of the prompts."""
    count = SPEED_BATCHES * generator.batch_size(1, config.max_new_tokens)
    prompts = [*corpus.prompts] * -(-count // len(corpus.prompts))
    result = decode(generator, prompts[:count], config)
    return speed_figures(result, is_full=generator.schedule(config.max_new_tokens) == generator.full)


def prefill_speedup(batches: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Time for the prompts at full depth over time for them, over the batches decoded both ways; and as predicted."""
    pairs = [b for b in batches if b["full_prefill_s"] is not None]
    found: dict[str, float | None] = {"measured": None, "predicted": None}
    for name, infix in (("measured", ""), ("predicted", "predicted_")):
        own = sum(b[f"{infix}prefill_s"] for b in pairs)
        found[name] = sum(b[f"full_{infix}prefill_s"] for b in pairs) / own if own else None
    return found


def speed_figures(result: WindowResult, *, is_full: bool) -> dict[str, Any]:
    """Layers per decode step as run, tokens per second, speedup and agreement; full depth is 1 by definition."""
    table = pa.Table.from_pylist(result.batches, schema=BATCH_SCHEMA)
    batches, totals = table.to_pylist(), BatchTotals.of([table])
    steps = sum(b["output_tokens"] - b["rows"] for b in batches)
    seconds = sum(b["prefill_s"] + b["decode_s"] for b in batches)
    measured, agrees, prefill = speedup(totals), agreement(totals), prefill_speedup(batches)
    if is_full:
        measured |= {"measured": 1.0, "measured_decode": 1.0, "predicted": 1.0}
        agrees |= {"exact_rows": 1.0, "token_match": 1.0}
        prefill = {"measured": 1.0, "predicted": 1.0}
    layers, ffns = sum(b["layers_run"] for b in batches), sum(b["ffns_run"] for b in batches)
    rows = sum(b["rows"] for b in batches)
    return {
        "rows_per_s": rows / seconds if seconds else None,
        "prefill_ms_per_row": 1e3 * sum(b["prefill_s"] for b in batches) / rows if rows else None,
        "decode_ms_per_row": 1e3 * sum(b["decode_s"] for b in batches) / rows if rows else None,
        "cache_bytes_per_row": sum(b["cache_bytes"] for b in batches) / rows if rows else None,
        "speedup_prefill": prefill,
        "layers_per_token": layers / steps if steps else None,
        "ffn_skip_share": 1 - ffns / layers if layers else None,
        "output_tokens_per_s": sum(b["output_tokens"] for b in batches) / seconds if seconds else None,
        "speedup": measured,
        "agreement": agrees,
    }
