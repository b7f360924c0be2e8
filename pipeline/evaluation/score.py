"""Evaluating a generated corpus: its texts against references, and the references under the policy that generated it.

As in the E2E challenge: one hypothesis per distinct prompt, all references of that prompt. A failed row counts as an
empty text. The metrics are `pipeline.evaluation.metrics`, many settings at once `pipeline.evaluation.sweep`. No Ray.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field

from actors.training.trainer import mean_loss
from actors.training.workers import Pair
from pipeline.cluster.machine import device_facts, device_to_measure, version_of
from pipeline.config.job import ConfigError, Section
from pipeline.evaluation.documents import (
    Counts,
    Decode,
    EvaluationDocument,
    LossFigures,
    Measured,
    PolicyFigures,
    PolicyKeys,
)
from pipeline.evaluation.hypotheses import Texts, read_texts
from pipeline.evaluation.metrics import scores, slot_share
from pipeline.formatting import Log
from pipeline.input.training_pairs import encode_pairs, read_pairs
from pipeline.store.digest import digest_adapter, digest_files
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from skipdecode.backends.host_memory import num_cores
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.lora_adapter import resolve_adapter
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.model import ON_CPUS, Quantization
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_dtype
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import Schedule

FLAGS = ("--references", "--prompt-column", "--reference-column")  # as `jobs.evaluate` calls file and columns
NUM_NAMED = 3  # prompts shown of those that have no counterpart


class ReferenceData(Section):
    path: str | None = None
    """CSV, JSONL or Parquet with a prompt and a reference per row."""
    prompt_column: str = "mr"
    """Column of the prompts."""
    reference_column: str = "ref"
    """Column of the references."""


class ScoredData(ReferenceData):
    id_column: Annotated[str, Field(min_length=1)] | None = None
    """Column with the ids of input rows, which replaces `prompt_column` for prompts made by templates or chats."""


class EvaluateConfig(Section):
    generated: str
    """A run folder of `jobs.generate`, or a Parquet file or folder with `prompt` and `generated_text`."""
    data: ScoredData = ScoredData()
    perplexity_pairs: Annotated[int, Field(ge=0)] | None = None
    """Number of (prompt, reference) pairs for the perplexity, drawn with a fixed seed; null: all; 0: no perplexity."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """For the perplexity; null: as the run."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Pairs of a batch, for the perplexity."""


def evaluate(config: EvaluateConfig, log: Log) -> EvaluationDocument:
    """The figures of one corpus; everything that can be wrong is found before anything is computed."""
    if config.data.path is None:
        raise ConfigError("--references", "name the file with the references (CSV, JSONL or Parquet)")
    by_id = config.data.id_column
    flags = FLAGS if by_id is None else (FLAGS[0], "--id-column", FLAGS[2])
    pairs = read_pairs(config.data.path, by_id or config.data.prompt_column, config.data.reference_column, flags)
    folder = RunFolder.open(config.generated)
    state = folder.read_state()
    texts = read_texts(folder, state)
    if state is not None and state["state"] != "finished":
        log(
            f"{config.generated}: the run is not finished; {texts.num_rows} of {state['books']['input']} rows are there"
        )
    if by_id is not None:  # one that no row has stays, and is counted
        found = texts.prompts_of
        pairs = [(prompt, reference) for own, reference in pairs for prompt in found.get(own, [f"id {own}"])]
    references = group_references(pairs)
    chosen = [prompt for prompt in texts.by_prompt if prompt in references]
    if not chosen:
        raise ConfigError(
            "",
            f"no {'prompt' if by_id is None else 'id'} of {config.generated} is in column "
            f"{by_id or config.data.prompt_column!r} of {config.data.path}: "
            f"the run has {_named(texts.by_prompt if by_id is None else texts.prompts_of)}, the references "
            f"{_named(references)}{'' if by_id else '; --id-column goes by ids, e.g. of chats'}",
        )
    counts = _compare(texts, references, chosen, log)
    policy = None if state is None else RunPolicy.of(state)
    perplexity = _perplexity(config, policy, [pair for pair in pairs if pair[0] in texts.by_prompt], log)
    hypotheses = [texts.by_prompt[prompt] for prompt in chosen]
    return {
        "generated": config.generated,
        "references": config.data.path,
        "rows": texts.num_rows,
        **counts,
        **scores(hypotheses, [references[prompt] for prompt in chosen]),
        **slot_share(chosen, hypotheses),
        "layers_per_token": texts.layers_per_token,
        **perplexity,
    }


def measured_on(device: torch.device) -> Measured:
    return {
        **device_facts(device),
        "torch": version_of("torch"),
        "sacrebleu": version_of("sacrebleu"),
        "rouge-score": version_of("rouge-score"),
    }


def group_references(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """All references of each distinct prompt, in file order."""
    grouped: dict[str, list[str]] = {}
    for prompt, reference in pairs:
        grouped.setdefault(prompt, []).append(reference)
    return grouped


def _compare(texts: Texts, references: dict[str, list[str]], chosen: Sequence[str], log: Log) -> Counts:
    """Counts what is scored and what has no counterpart, and says so."""
    lonely = [prompt for prompt in texts.by_prompt if prompt not in references]
    missing = [prompt for prompt in references if prompt not in texts.by_prompt]
    failed = [prompt for prompt in chosen if prompt in texts.failed]
    counts: Counts = {
        "prompts": len(chosen),
        "failed": len(failed),
        "repeated_rows": texts.num_repeated,
        "rows_without_prompt": texts.num_without_prompt,
        "prompts_without_reference": len(lonely),
        "references_without_row": len(missing),
    }
    for what, prompts in (
        ("failed rows, scored as empty texts", failed),
        ("prompts of the run have no reference and are not scored", lonely),
        ("prompts of the references have no row and are not scored", missing),
    ):
        if prompts:
            log(f"{len(prompts)} {what}: {_named(prompts)}")
    return counts


def _named(prompts: Iterable[str]) -> str:
    shown = list(prompts)
    more = f", and {len(shown) - NUM_NAMED} more" if len(shown) > NUM_NAMED else ""
    return ", ".join(repr(prompt) for prompt in shown[:NUM_NAMED]) + more


@dataclass(frozen=True)
class RunPolicy:
    """The model and schedule that a run decoded with, from its run.json."""

    model: str
    files: str
    """Digest of the checkpoint."""
    adapter: str | None
    adapter_files: str
    """Its digest."""
    tokenizer: str | None
    decode: Decode
    prefill: str
    dtype: str
    quantization: Quantization | None
    max_new_tokens: int
    is_chat: bool
    """Its prompts are what the chat template made of them."""

    @classmethod
    def of(cls, state: RunState) -> Self:
        """Reads the policy of a run from its run.json."""
        config, fingerprint = state["config"], state["fingerprint"]
        quantization, given = config["model"]["quantization"], config["input"]
        return cls(
            model=state["model"]["source"],
            files=str(fingerprint["model.files"]),
            adapter=config["model"]["adapter"],
            adapter_files=str(fingerprint["model.adapter"]),
            tokenizer=config["model"]["tokenizer"],
            decode=state["decode"],
            prefill=str(fingerprint["prefill.method"]),
            dtype=str(fingerprint["model.dtype"] if quantization else config["model"]["dtype"]),
            quantization=quantization,
            max_new_tokens=config["sampling"]["max_new_tokens"],
            is_chat=bool(given["chat"] or given["messages_column"]),
        )


@dataclass(frozen=True)
class Policy:
    """The loaded model and schedule of a run."""

    model: Decoder
    tokenizer: Tokenizer
    schedule: Schedule
    is_chat: bool


def _perplexity(config: EvaluateConfig, run: RunPolicy | None, pairs: list[tuple[str, str]], log: Log) -> PolicyFigures:
    """The references under model and schedule of the run; None where left out."""
    is_cpu = config.device == "auto" and run is not None and run.quantization in ON_CPUS
    device = device_to_measure("cpu" if is_cpu else config.device)
    torch.set_num_threads(config.threads or num_cores())
    figures, num_pairs, more = loss_figures(None), 0, PolicyKeys()
    used = None if config.perplexity_pairs == 0 else run
    if used is None:
        log("perplexity: left out" + ("" if run else f"; {config.generated} has no run.json to name the policy"))
    else:
        policy = _load_policy(config, used, device)
        drawn = _draw(config, policy, pairs, log)
        num_pairs, more = len(drawn), {"prefill": used.prefill, "quantization": used.quantization}
        if drawn:
            figures = loss_figures(mean_loss(policy.model, drawn, policy.schedule, config.batch_size))
    return {
        "model": used.model if used else None,
        "decode": used.decode if used else None,
        "perplexity_pairs": num_pairs,
        **figures,
        **more,
        **measured_on(device),
    }


def _draw(config: EvaluateConfig, policy: Policy, pairs: Sequence[tuple[str, str]], log: Log) -> list[Pair]:
    limit = policy.model.config.max_position_embeddings
    encoded = encode_pairs(policy.tokenizer, pairs, is_rendered=policy.is_chat)
    drawn = draw_pairs(encoded, config.perplexity_pairs, limit)
    if len(drawn) < min(len(pairs), config.perplexity_pairs or len(pairs)):
        log(f"perplexity: pairs of more than {limit} tokens do not fit the model and are left out")
    return drawn


def _load_policy(config: EvaluateConfig, run: RunPolicy, device: torch.device) -> Policy:
    """Model and schedule of a run; ConfigError when the files are not those of the run any more."""
    dtype = choose_dtype(config.dtype or run.dtype, device)
    try:
        folder = resolve_source(run.model)
        if digest_files(folder) != run.files:
            raise ValueError(f"{run.model}: the checkpoint there is no longer the one that the run used")
        if run.adapter is not None and digest_adapter(resolve_adapter(run.adapter)) != run.adapter_files:
            raise ValueError(f"{run.adapter}: the adapter there is no longer the one that the run used")
        model = load_model(folder, adapter=run.adapter, device=device, dtype=dtype, quantization=run.quantization)
        if run.quantization:
            model.pack(run.quantization)
        encoder = Tokenizer(run.tokenizer or folder, model.config)
    except ValueError as error:
        raise ConfigError("perplexity", f"{error}; --no-perplexity leaves it out") from error
    schedule = make_schedule(
        run.decode,
        num_layers=model.config.num_hidden_layers,
        max_new_tokens=run.max_new_tokens,  # rows with a limit of their own ran another schedule
        swiftkv_from=model.config.swiftkv_layer(run.prefill),
    )
    return Policy(model, encoder, schedule, run.is_chat)


def draw_pairs(encoded: Sequence[Pair], count: int | None, max_tokens: int) -> list[Pair]:
    """`count` pairs (None: all), drawn as the trainer draws its validation pairs, less those that do not fit and empty
    prompts of a model without BOS."""
    drawn = list(encoded) if count is None else random.Random(0).sample(encoded, min(count, len(encoded)))
    return [(p, response) for p, response in drawn if p and len(p) + len(response) - 1 <= max_tokens]


def loss_figures(loss: float | None) -> LossFigures:
    """`loss` in nats per response token (EOS included), and `perplexity`."""
    return {"loss": loss, "perplexity": None if loss is None else math.exp(loss)}
