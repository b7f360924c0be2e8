"""Runs whose rows an endpoint decodes in its own batches (`batches.workers: shared`): whether it can, and the pool.

Workers of such a run load no model. Each has one window at the endpoint, so several are needed to keep a replica's
batch full while one of them takes its answers home and gets the next window.
"""

import hashlib
import json

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from pipeline.cluster.pool import STAGE_CPUS, Cluster, Pool
from pipeline.config.job import ConfigError, JobConfig, ModelConfig
from pipeline.formatting import Log
from pipeline.resolve_model import ResolvedModel
from pipeline.stages.answer_box import start_answer_box
from pipeline.stages.endpoint_model import EndpointName, EndpointTerms, SharedEndpoint
from pipeline.store.digest import digest_adapter, digest_files
from skipdecode.checkpoint.hub import resolve_source

WINDOWS_PER_REPLICA = 3  # one in its batch, one that waits there, one on its way
WORKER_CPUS = STAGE_CPUS / 5  # a worker waits
ASK_S = 60.0


def model_digest(config: ModelConfig, model: ResolvedModel) -> str:
    """Equal where two processes that load the model give a row the same tokens, their dtype being the same."""
    tokenizer = config.tokenizer
    parts = {
        "decode": model.decode,
        "prefill": model.prefill,
        "implementation": model.config.implementation,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "files": digest_files(model.folder),
        "adapter": None if model.adapter is None else digest_adapter(model.adapter),
        "tokenizer": tokenizer and digest_files(resolve_source(tokenizer, "model.tokenizer")),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_endpoint(
    name: EndpointName, config: JobConfig, model: ResolvedModel, earlier_dtype: str | None, log: Log
) -> SharedEndpoint | None:
    """The endpoint, if it gives rows the tokens that the run's own workers would give them; None if not, and `log` is
    told why. ConfigError if it does not answer."""
    try:
        found: list[EndpointTerms] = name.handle().broadcast("background_terms").results(timeout_s=ASK_S)
    except (RayError, RayServeException, TimeoutError) as error:
        raise ConfigError("actors", f"the endpoint {name.application} does not answer: {error}") from error
    dtype = earlier_dtype or (found[0]["dtype"] if config.model.dtype == "auto" else config.model.dtype)
    digest = model_digest(config.model, model)
    if any(terms["model"] != digest for terms in found):
        reason = "the endpoint serves another model or schedule than this run began with"
    elif any(terms["dtype"] != dtype for terms in found):
        reason = f"the endpoint decodes in {found[0]['dtype']}, this run in {dtype}"
    else:
        return SharedEndpoint(name, found[0], len(found), start_answer_box())
    log(f"workers: own ones decode, since {reason}")
    return None


def shared_pool(endpoint: SharedEndpoint, cluster: Cluster) -> Pool:
    """The workers of a run that the endpoint decodes for."""
    size = WINDOWS_PER_REPLICA * endpoint.num_replicas
    return Pool(size, size, WORKER_CPUS, 0.0, num_threads=max(1, cluster.num_cores // size))


def sized(config: JobConfig, endpoint: SharedEndpoint) -> JobConfig:
    """The configuration with the endpoint's batch size in place of `auto`."""
    if config.actors.batch_size != "auto":
        return config
    actors = config.actors.model_copy(update={"batch_size": endpoint.terms["batch_size"]})
    return config.model_copy(update={"actors": actors})
