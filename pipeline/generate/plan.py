"""Planning a run: model, output, input and cluster are checked, cheapest first, and every `auto` is resolved.

All that can be wrong before decoding starts is found here and raised as ConfigError (exit code 2). Side effects: a
model or tokenizer may be downloaded, the output folder is created (and removed again if the run is refused), Ray is
started or joined, SIGTERM gets its handler, and the index of the input's ids is put into Ray's object store. Which rows
are done already is found later, in `resume`.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from actors.templates.chat_template import ChatTemplate
from actors.templates.chat_template_files import load_chat_template
from pipeline.cluster.node_backends import find_backends, reason_against, reason_for_torch, resolve_dtype
from pipeline.cluster.pool import Cluster, Pool, find_pool, start_ray, unseen_gpus
from pipeline.config.job import ConfigError, JobConfig
from pipeline.formatting import Log, count
from pipeline.generate.check_paths import check_no_overlap, check_output, has_all_rows, removed_on_refusal
from pipeline.generate.fingerprint import fingerprint
from pipeline.generate.row_index import EntriesRef, scan_input, sum_input
from pipeline.generate.sharing import find_endpoint, shared_pool
from pipeline.generate.stage_config import asked_of
from pipeline.generate.stopping import stop_on_sigterm
from pipeline.input.expansion import Expansion
from pipeline.input.files import Listing, list_input
from pipeline.input.input_plan import InputPlan, columns_of, plan_input, unread_partitions, unused_sampling
from pipeline.input.prompt_templates import Prompter, unknown_names
from pipeline.input.sample_prompts import remark_on_bos, remark_on_last_messages
from pipeline.input.scan import FileScan
from pipeline.resolve_model import (
    ResolvedModel,
    check_exact_drafts,
    check_kv_cache_dtype,
    check_model,
    check_quantization,
)
from pipeline.stages.endpoint_model import EndpointName, SharedEndpoint
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import Fingerprint, RunState
from skipdecode.backends.choice import VARIABLE
from skipdecode.checkpoint.hub import resolve_source

REMEDY = "set input.chat_template to a file that has one"
UNUSED = (
    "input.chat: the model has a chat template, and prompts are given as they are; input.chat=true makes each a "
    "message of a user. Leave it false where prompts hold the template already, or the model was tuned without it"
)


@dataclass(frozen=True)
class PlannedRun:
    """A validated run, ready to start."""

    config: JobConfig
    model: ResolvedModel
    dtype: str
    folder: RunFolder
    earlier: RunState | None
    """`run.json` of the run to resume."""
    input: InputPlan
    entries: Sequence[EntriesRef]
    """Index entries of the input's rows (`row_index`); empty if no row has to be looked up."""
    pool: Pool
    fingerprint: Fingerprint
    id_sum: int | None
    """The sum of the ids of the input's rows, to reconcile the output with; None if it was not computed."""
    is_finished: bool
    """True if the run in the folder was finished before and its files are still there."""
    started_at: float
    """When its first session began, in epoch seconds; templates render it as the current time."""
    prompter: Prompter | None
    """Renders prompts from templates and messages; None where prompts are a column's text."""
    endpoint: SharedEndpoint | None = None
    """Decodes the rows; None: workers of the run do."""


def plan_run(config: JobConfig, log: Log, index_all: bool = False, endpoint: EndpointName | None = None) -> PlannedRun:
    """Plans the run; raises ConfigError if it is not possible.

    `index_all`: index every row, which a resume or a retry needs. `endpoint`: is to decode the rows, if it can.
    """
    model = check_model(config, log)
    folder = RunFolder.open(config.output.path)
    with removed_on_refusal(folder):
        return _plan(config, model, folder, log, index_all, endpoint)


def _plan(
    config: JobConfig,
    model: ResolvedModel,
    folder: RunFolder,
    log: Log,
    index_all: bool,
    endpoint: EndpointName | None,
) -> PlannedRun:
    chat = find_chat_template(config, model)
    earlier = check_output(folder, config)
    expansion = Expansion.of(config.input, config.sampling)
    listing = list_input(config.input, config.limits.max_line_bytes, expansion)
    check_no_overlap(folder, listing)
    cluster = start_ray(log)
    stop_on_sigterm()
    log(f"ray: {cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs" + (" (embedded)" if cluster.is_embedded else ""))
    if (remark := unseen_gpus(config.actors, cluster)) is not None:
        log(remark)
    shared = None if endpoint is None else find_endpoint(endpoint, config, model, earlier_dtype(earlier), log)
    if shared is None:
        pool = find_pool(config.actors, cluster)
        dtype = resolve_run_dtype(config, model, earlier_dtype(earlier), cluster, pool)
    else:
        pool, dtype = shared_pool(shared, cluster), shared.terms["dtype"]
    is_finished = earlier is not None and earlier["state"] == "finished" and has_all_rows(folder, earlier, log)
    is_open = earlier is not None and not is_finished
    scans, entries = scan_input(listing, config.input, index_all or is_open, log, sum_ids=index_all or not is_finished)
    plan = plan_input(listing, scans, config.input)
    check_asked_columns(plan, config)
    id_sum = sum_input(plan, scans, config.input)
    log(f"input: {plan.describe()} in {count(len(listing.files), f'{listing.format} file')}")
    columns = columns_of(scans, listing.format)
    _log_unused(config, listing, columns, chat, log)
    if earlier is None and (remark := unused_chat_template(chat, config, listing.format)):
        log(remark)
    chat = used_chat_template(chat, config, listing.format, scans, log)
    run_fingerprint = fingerprint(
        config,
        model.decode,
        model.folder,
        dtype,
        plan,
        chat,
        implementation=model.config.implementation,
        prefill=model.prefill,
    )
    began = started_at(earlier)
    prompter = Prompter.of(config.input, listing.format, chat, datetime.fromtimestamp(began, UTC), columns=columns)
    if earlier is None:
        _log_doubtful_prompts(plan, config, model, prompter, is_chat=chat is not None, log=log)
    return PlannedRun(
        config=config,
        model=model,
        dtype=dtype,
        folder=folder,
        earlier=earlier,
        input=plan,
        entries=entries,
        pool=pool,
        fingerprint=run_fingerprint,
        id_sum=id_sum,
        is_finished=is_finished,
        started_at=began,
        prompter=prompter,
        endpoint=shared,
    )


def _log_unused(config: JobConfig, listing: Listing, columns: set[str], chat: ChatTemplate | None, log: Log) -> None:
    """Names what the configuration or the input has and the run does not read."""
    remarks = [
        *unknown_names(config.input, columns),
        unused_sampling(columns, listing.format, config.input),
        unread_partitions(listing, columns),
        unread_kwargs(chat, config),
    ]
    for remark in remarks:
        if remark is not None:
            log(remark)


def _log_doubtful_prompts(
    plan: InputPlan, config: JobConfig, model: ResolvedModel, prompter: Prompter | None, *, is_chat: bool, log: Log
) -> None:
    """Says what looks wrong in the first prompts."""
    if is_chat:
        remark = remark_on_last_messages(plan, config.input)
    else:
        remark = remark_on_bos(plan, config.input, prompter, model.bos_text)
    if remark is not None:
        log(remark)


def started_at(earlier: RunState | None) -> float:
    """When the run began, in epoch seconds; now for a new one."""
    return earlier["sessions"][0]["started_at"] if earlier is not None and earlier["sessions"] else time.time()


def check_asked_columns(plan: InputPlan, config: JobConfig) -> None:
    """Raises ConfigError if the input has a column with the name of one that the run adds."""
    names = asked_of(config).names
    if taken := [name for name in names if name in plan.extra_schema.names]:
        raise ConfigError(
            "input.path", f"the input has a column {taken[0]!r}, which this run writes itself; rename it in the input"
        )


def earlier_dtype(earlier: RunState | None) -> str | None:
    """The type that the run in the folder decodes in; None for a new run."""
    return None if earlier is None else str(earlier["fingerprint"]["model.dtype"])


def resolve_run_dtype(
    config: JobConfig, model: ResolvedModel, dtype_of_earlier_run: str | None, cluster: Cluster, pool: Pool
) -> str:
    """The type that all workers decode in; ConfigError where a worker could not load the model in it.

    `auto` is the type of the earlier run that is resumed, or else the best type of the nodes that decode. The nodes
    are queried only where their answer matters.
    """
    model_config, device = config.model, "cuda" if pool.num_gpus else "cpu"
    name: str = model_config.dtype
    if name == "auto" and dtype_of_earlier_run is not None:
        name = dtype_of_earlier_run
    is_exact = config.sampling.deterministic and bool(model.decode.get("lossless"))
    must_query_nodes = (
        name == "auto"
        or model_config.quantization is not None
        or is_exact
        or config.actors.require_kernels
        or bool(os.environ.get(VARIABLE))
    )
    nodes = find_backends(cluster, pool.num_cpus) if device == "cpu" and must_query_nodes else ()
    dtype = resolve_dtype(name, device, nodes)
    not_quantized = reason_against(model_config.quantization, nodes, dtype)
    check_quantization(model_config.quantization, model.config, dtype, device, not_quantized)
    check_kv_cache_dtype(model_config.kv_cache_dtype, model.config, dtype, device)
    lacking = reason_for_torch(nodes, dtype)
    check_exact_drafts(model.decode, config.sampling.deterministic, model.config, device, lacking)
    if config.actors.require_kernels and lacking is not None:
        raise ConfigError("actors.require_kernels", lacking)
    return dtype


def find_chat_template(config: JobConfig, model: ResolvedModel) -> ChatTemplate | None:
    """The template of `input.chat_template`, or the checkpoint's; None if there is none, and none is needed."""
    given, own = config.input.chat_template, config.model.tokenizer
    try:
        source = resolve_source(own, "model.tokenizer") if own else model.folder
        found = load_chat_template(source, model.config.tokenizer_rules, None if given == "auto" else given)
    except ValueError as error:
        if given == "auto" and not config.input.is_chat:
            return None
        raise ConfigError("input.chat_template", str(error)) from error
    if found is None and config.input.is_chat:
        asked = "input.chat" if config.input.chat else "input.messages_column"
        raise ConfigError(
            "input.chat_template", f"{asked} needs a chat template, and the checkpoint has none; {REMEDY}"
        )
    return found


def used_chat_template(
    chat: ChatTemplate | None, config: JobConfig, format: str, scans: Sequence[FileScan], log: Log
) -> ChatTemplate | None:
    """`chat`, or None if no prompt is rendered with it."""
    chats = sum(scan.num_chats for scan in scans)
    if format == "openai_batch" and chats and chat is None:
        if chats == sum(scan.num_documents for scan in scans):
            raise ConfigError(
                "input.chat_template",
                f"every line is a chat, and the checkpoint has no chat template that can be used; {REMEDY}",
            )
        why = "the checkpoint has no template that can be used"
        log(f"input.chat_template: {count(chats, 'chat')} will fail, since {why}; {REMEDY}")
    return chat if chats or config.input.is_chat else None


def unread_kwargs(chat: ChatTemplate | None, config: JobConfig) -> str | None:
    """A remark on variables that the chat template does not read."""
    unread = [] if chat is None else chat.unread(config.input.chat_template_kwargs)
    if not unread:
        return None
    return f"input.chat_template_kwargs: the chat template does not read {', '.join(unread)}, which changes nothing"


def unused_chat_template(chat: ChatTemplate | None, config: JobConfig, format: str) -> str | None:
    """A hint if the model has a chat template (`chat`, from `find_chat_template`), prompts are used verbatim, and the
    configuration does not say that this is intended. It is for new runs, since a run cannot change it later."""
    is_meant = "chat" in config.input.model_fields_set or config.input.is_chat or config.model.adapter is not None
    return None if chat is None or is_meant or format == "openai_batch" else UNUSED
