"""Standard tasks under any schedule, by EleutherAI's LM Evaluation Harness (`skipdecode evaluate --tasks`).

Tasks, prompts and metrics are the harness's; the model answers through `skipdecode.lm_eval`. A task whose data are not
on this machine is fetched from the Hugging Face hub by the harness, unless `tasks_path` has a task of one's own on
local files. No Ray: one process decodes.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import Field

from pipeline.cluster.machine import device_facts, device_to_measure, version_of
from pipeline.config.job import (
    ConfigError,
    DecodeConfig,
    JobConfig,
    ModelConfig,
    PrefillConfig,
    SamplingConfig,
    Section,
)
from pipeline.formatting import Json, Log
from pipeline.resolve_model import check_model
from skipdecode.backends.host_memory import num_cores

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


class TasksConfig(Section):
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tasks or groups of the harness, such as gsm8k or arc_easy, or of tasks in `tasks_path`."""
    tasks_path: str | None = None
    """A folder with tasks of one's own, as YAML files of the harness; null: its own tasks alone."""
    model: ModelConfig = ModelConfig()
    decode: DecodeConfig = DecodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question; null: as many as the task says."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """The first documents of each task; null: all."""
    chat: bool = False
    """Questions as messages through the model's chat template."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The longest answer where a task does not say."""
    seed: int = 0
    """For tasks that sample, and for the choice of solved examples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null: all cores."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Rows of a batch."""


class TasksDocument(TypedDict):
    """What `evaluate --tasks` prints as JSON."""

    results: dict[str, dict[str, Json]]
    """By task, metrics as the harness names them (`exact_match,strict-match`, `acc,none`, ...)."""
    versions: dict[str, Json]
    num_fewshot: dict[str, Json]
    num_documents: dict[str, int]
    model: str
    decode: dict[str, Json]
    """The schedule that held."""
    prefill: str
    lm_eval: str
    measured_on: dict[str, Any]


def evaluate_tasks(config: TasksConfig, log: Log) -> TasksDocument:
    """The scores of each task. ConfigError names a key before the model is loaded."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from skipdecode.lm_eval import SkipDecodeLM
    except ImportError as error:
        raise ConfigError("--tasks", f"needs LM Evaluation Harness: pip install 'lm_eval>=0.4.9' ({error})") from error
    import torch

    from skipdecode.api import load

    if config.decode.lossless:
        raise ConfigError("decode.lossless", "has the scores of full depth: use decode.method=full")
    device = device_to_measure(config.device)
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    try:
        checked = check_model(
            JobConfig(model=config.model, decode=config.decode, prefill=config.prefill, sampling=sampling), log
        )
    except ConfigError as error:  # which names the key of a job
        raise error.renamed("sampling.max_new_tokens", "max_new_tokens") from error
    manager = TaskManager(include_path=config.tasks_path)
    _refuse_unknown(manager, config)
    torch.set_num_threads(config.threads or num_cores())
    model = load(
        config.model.source,
        adapter=config.model.adapter,
        tokenizer=config.model.tokenizer,
        dtype=config.model.dtype,
        device=device.type,
        quantization=config.model.quantization,
        kv_cache_dtype=config.model.kv_cache_dtype,
        implementation=config.model.implementation,
    )
    lm = SkipDecodeLM(
        model,
        tokenizer=config.model.tokenizer or config.model.source,
        batch_size=config.batch_size,
        max_gen_toks=config.max_new_tokens,
        prefill=checked.prefill,
        seed=config.seed,
        **config.decode.model_dump(exclude_defaults=True, exclude={"prefix"}),
    )
    found = lm_eval.simple_evaluate(
        lm,
        tasks=list(config.tasks),
        task_manager=manager,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        apply_chat_template=config.chat,
        random_seed=config.seed,
        fewshot_random_seed=config.seed,
        log_samples=False,
    )
    return {
        "results": found["results"],
        "versions": found["versions"],
        "num_fewshot": found["n-shot"],
        "num_documents": {task: count["effective"] for task, count in found["n-samples"].items()},
        "model": config.model.source,
        "decode": checked.decode,
        "prefill": checked.prefill,
        "lm_eval": version_of("lm_eval"),
        "measured_on": dict(device_facts(device)),
    }


def _refuse_unknown(manager: "TaskManager", config: TasksConfig) -> None:
    if unknown := [name for name in config.tasks if not manager.match_tasks([name])]:
        more = "" if config.tasks_path is None else f" or in {config.tasks_path}"
        raise ConfigError("tasks", f"no task {unknown[0]!r} in the harness{more}; `lm-eval ls tasks` lists them")
