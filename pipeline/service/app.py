"""The Ray Serve application, `import_path: pipeline.service.app:build_app`; its `args` are a `ServeConfig`.

Each replica of `Completions` is a process with a FastAPI ingress and an engine thread that owns the model, so the
requests of a replica share its batches. With a storage there is a second deployment, `Batches`, of one replica: the
queue of OpenAI batches, which run in processes of their own.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import ray
from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle

from actors.generator_config import GeneratorConfig
from actors.memory import freeze_gc
from pipeline.batches.run_config import job_settings
from pipeline.batches.runner import BatchRunner
from pipeline.batches.storage import Storage
from pipeline.cluster.node_backends import look, reason_for_torch
from pipeline.config.job import ConfigError, JobConfig, SamplingConfig, build_config
from pipeline.formatting import Json
from pipeline.generate.sharing import model_digest
from pipeline.resolve_model import (
    ResolvedModel,
    adapter_path,
    check_exact_drafts,
    check_kv_cache_dtype,
    check_model,
    check_quantization,
    refuse_wrapped,
    worker_path,
)
from pipeline.service.auth import digest, read_keys
from pipeline.service.background import BackgroundRows
from pipeline.service.config import BATCHES, DEPLOYMENT, DRAIN_S, ServeConfig
from pipeline.service.endpoint import Endpoint, EndpointSpec
from pipeline.service.metrics import BatchMetrics, RayMetrics, scrape
from pipeline.service.routes import create_app
from pipeline.stages.answer_box import Delivery
from pipeline.stages.endpoint_model import EndpointTerms
from skipdecode.backends.choice import VARIABLE
from skipdecode.backends.device import choice_on
from skipdecode.backends.host_memory import num_cores
from skipdecode.checkpoint.hub import pin, resolve_source
from skipdecode.config.model import ON_CPUS
from skipdecode.engine.continuous_batch import check_continuous
from skipdecode.engine.request import Request
from skipdecode.model.devices import dtype_name
from skipdecode.schedules.from_config import make_schedule

LOOK_S = 2.0  # between two looks whether a batch still waits for its rows
STEP_S = 0.5  # between two looks at the storage
# After each layer the engine's thread takes Python's lock again. By default the event loop, which sends what the last
# step made, may keep it for 5 ms, and nothing would be decoded meanwhile.
SWITCH_S = 0.0002


@serve.deployment(
    name=DEPLOYMENT,
    max_ongoing_requests=4096,  # the limit is the engine's own queue, which answers 429 with Retry-After
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=DRAIN_S,
    logging_config={"enable_access_log": False},
)
@serve.ingress()
class Completions:
    def __init__(self, spec: EndpointSpec, batches: DeploymentHandle | None = None) -> None:
        """`batches`: the queue of batches, bound here so that Serve deploys it; it is called by nobody."""
        if spec.generator.num_threads is None:
            reserved = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
            spec = replace(spec, generator=replace(spec.generator, num_threads=replica_threads(num_cores(), reserved)))
        self.endpoint = Endpoint(spec)
        self.metrics = RayMetrics(self.endpoint)
        self._windows: dict[str, tuple[ActorHandle, asyncio.Task[None]]] = {}
        """Windows of batches that are decoded here, with the `AnswerBox` of each."""
        freeze_gc()
        sys.setswitchinterval(SWITCH_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.endpoint, self.metrics.answered, partial(scrape, serve.get_replica_context().app_name))

    def check_health(self) -> None:
        """Called by Ray every two seconds; raises if the engine is dead, and Ray replaces the replica."""
        self.metrics.update()
        self.endpoint.check()

    def drain(self) -> int:
        """Refuses new requests with 503 from now on; returns how many earlier ones are still being answered."""
        self.endpoint.is_draining = True
        return self.endpoint.num_responses

    def background_terms(self) -> EndpointTerms:
        """What decides whether rows of a batch may be decoded here."""
        generator, config = self.endpoint.generator, self.endpoint.config
        chosen = choice_on(generator.device)
        return {
            "model": self.endpoint.spec.model_digest,
            "dtype": dtype_name(generator.dtype),
            "batch_size": config.engine.batch_size,
            "layers": generator.model.config.num_hidden_layers,
            "device": str(generator.device),
            "backend": {"name": chosen.name, "reason": chosen.reason},
        }

    async def decode_in_background(
        self, answers: ActorHandle, key: str, requests: Sequence[Request], expected: EndpointTerms
    ) -> None:
        """Takes a window of a batch, whose answers will be in that `AnswerBox`, unless it is draining or another
        replica has taken it. It refuses all rows if it has another model or dtype than `expected`, as after a
        deployment while the batch runs. EngineDead."""
        self.endpoint.check()
        if self.endpoint.is_draining or not await answers.claim.remote(key, ray.get_runtime_context().current_actor):
            return
        terms = self.background_terms()
        if (terms["model"], terms["dtype"]) != (expected["model"], expected["dtype"]):
            await answers.put.remote(key, Delivery([None] * len(requests)))
            return
        rows = BackgroundRows(self.endpoint.thread, requests)
        self._windows[key] = answers, asyncio.create_task(self._deliver(rows, answers, key))

    async def _deliver(self, rows: BackgroundRows, answers: ActorHandle, key: str) -> None:
        """Has the rows decoded for as long as the batch waits for them, and hands their answers over. What an error
        leaves is for the batch's own workers: a row of these may be the reason, so no other replica gets it."""
        try:
            await asyncio.to_thread(rows.submit)
            while not await rows.wait(LOOK_S) and await answers.is_open.remote(key):
                pass
        except Exception as error:  # EngineDead, for one
            logging.getLogger("ray.serve").warning("batches: rows are left to workers of the batch: %r", error)
        rows.cancel()
        del self._windows[key]
        with suppress(ray.exceptions.RayActorError):  # its driver has ended
            await answers.put.remote(key, Delivery(rows.answers))

    def __del__(self) -> None:
        """Called by Serve when it stops a replica: what was not answered is given back. Not so if the engine has ended:
        `_deliver` hears of that before Serve does, which looks three times."""
        for key, (answers, _) in list(getattr(self, "_windows", {}).items()):
            answers.put.remote(key, Delivery(None))


@serve.deployment(
    name=BATCHES,
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=2,
    graceful_shutdown_timeout_s=60,
    logging_config={"enable_access_log": False},
)
class Batches:
    def __init__(self, config: ServeConfig) -> None:
        self._stops = threading.Event()
        log = logging.getLogger("ray.serve").info
        address = ray.get_runtime_context().gcs_address
        application = serve.get_replica_context().app_name
        endpoint = (application, DEPLOYMENT) if config.batches.workers == "shared" else ()
        self._runner = BatchRunner(config.storage, config.batches, log, {"RAY_ADDRESS": address}, endpoint=endpoint)
        self._metrics = BatchMetrics()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """One thread for all: drivers end when the thread that started them does not feed them any more."""
        while not self._stops.wait(STEP_S):
            try:
                self._runner.step()
            except Exception:  # the storage may be back in a moment
                logging.getLogger("ray.serve").exception("batches: a look at the storage failed")
            self._metrics.update(self._runner)
        self._runner.stop()

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the queue of batches has ended")

    def __del__(self) -> None:
        """Called by Serve when the application stops."""
        self._stops.set()
        self._thread.join()


def build_app(args: dict[str, Json]) -> serve.Application:
    """Builds the application for `serve deploy` and `serve run`; ConfigError names the key at fault."""
    return bind_application(make_spec(build_config(ServeConfig, args)))


def bind_application(spec: EndpointSpec, options: Mapping[str, Json] | None = None) -> serve.Application:
    """The deployments, bound; `options` of `Completions`. Ray's own errors of bad options pass through."""
    queue = [] if spec.config.storage.path is None else [Batches.bind(spec.config)]  # type: ignore[attr-defined]
    return Completions.options(**(options or {})).bind(spec, *queue)  # type: ignore[attr-defined]


def replica_threads(num_cores: int, num_cpus: float) -> int:
    """torch threads of a replica that reserves `num_cpus` of a node's `num_cores`; Ray's default of 1 means all."""
    own = min(int(num_cpus), num_cores) if num_cpus > 1 else num_cores
    return max(1, own - 1)


def why_other_bits(dtype: str) -> str | None:
    """Why CPU replicas would multiply in torch with that type, as far as this machine can tell; None otherwise."""
    if dtype == "float16":
        return "kernels for CPUs have no float16"
    if not os.environ.get(VARIABLE):
        return None
    here = look()
    own = "float32" if here.backend is None else here.backend.dtype
    return here.problem or reason_for_torch([here], own if dtype == "auto" else dtype)


def make_spec(config: ServeConfig, made_key: str | None = None) -> EndpointSpec:
    """The checked settings of a replica. Errors are raised here, since Ray restarts a failing replica for ever.

    `made_key`: the API key of a server that has none configured.
    """
    sampling = SamplingConfig(max_new_tokens=config.sampling.max_new_tokens)
    job = JobConfig(model=config.model, decode=config.decode, prefill=config.prefill, sampling=sampling)
    model = check_model(job, logging.getLogger("ray.serve").warning)
    device, dtype = "auto", config.model.dtype
    quantization, kv_cache_dtype = config.model.quantization, config.model.kv_cache_dtype
    if quantization is not None or kv_cache_dtype != "auto":  # without a kernel for it, replicas would fail to start
        device = "cpu" if quantization in ON_CPUS else "cuda"
        if dtype == "auto" and quantization != "int4":  # which takes whatever type replicas have kernels for
            dtype = "bfloat16"
        check_quantization(quantization, model.config, "bfloat16" if dtype == "auto" else dtype, device, lacking=None)
        check_kv_cache_dtype(kv_cache_dtype, model.config, dtype, device)
    if config.sampling.deterministic and model.decode.get("lossless"):  # drafts are exact on CPUs only
        device = "cpu"
        logging.getLogger("ray.serve").warning(
            "decode.lossless with sampling.deterministic: replicas decode on CPUs; GPUs that they reserve stay idle"
        )
        check_exact_drafts(model.decode, True, model.config, device, why_other_bits(dtype))
    if config.sampling.deterministic:
        refuse_wrapped(model.config, "sampling.deterministic", "a fixed shape of batches")
    shares = config.batches.workers == "shared"
    if config.engine.scheduler == "continuous" or shares:
        if config.sampling.deterministic:
            key, other = ("batches.workers", "own") if shares else ("engine.scheduler", "cohort")
            wrong = "shared" if shares else "continuous"
            raise ConfigError(
                "sampling.deterministic",
                f"needs fixed batch shapes, which {key}={wrong} does not have; use {key}={other}",
            )
        try:
            check_continuous(make_schedule(model.decode, num_layers=model.config.num_hidden_layers, max_new_tokens=16))
        except ValueError as error:
            raise ConfigError.parse(error) from error
    if shares:
        check_sharing(config, model)
    if (path := config.storage.path) is not None:
        Storage(path).check()
        own = path if "://" in path else os.path.abspath(os.path.expanduser(path))
        config = config.model_copy(update={"storage": config.storage.model_copy(update={"path": own})})
    tokenizer = config.model.tokenizer
    generator = GeneratorConfig(
        source=worker_path(model.source, model.folder),
        tokenizer=tokenizer and pin(tokenizer, resolve_source(tokenizer, "model.tokenizer")),
        adapter=adapter_path(config.model.adapter, model),
        decode=model.decode,
        prefill=model.prefill,
        implementation=model.config.implementation,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        num_threads=config.engine.num_threads,  # null: decided in the replica, which knows its node
        batch_size=config.engine.batch_size,
        length_buckets=config.engine.length_buckets,
        deterministic=config.sampling.deterministic,
        shares_prefixes=config.decode.prefix == "auto",
        memory_share=config.engine.memory_share,
        has_graphs=config.engine.scheduler != "continuous" and not shares,
    )
    keys = read_keys(config.auth) if made_key is None else (digest(made_key),)
    digest_of_model = model_digest(config.model, model) if shares and config.storage.path is not None else ""
    return EndpointSpec(config, generator, keys, job_settings(config), digest_of_model)


def check_sharing(config: ServeConfig, model: ResolvedModel) -> None:
    """ConfigError if rows of batches cannot join the batches of the endpoint."""
    if config.engine.scheduler == "cohort":
        raise ConfigError(
            "batches.workers",
            "shared needs a batch that rows join at any step, which engine.scheduler=cohort does not have; use "
            "engine.scheduler=continuous, or batches.workers=own",
        )
    if model.decode.get("lossless"):  # whose rows all share one schedule
        return
    num_layers = model.config.num_hidden_layers
    short, long = (make_schedule(model.decode, num_layers=num_layers, max_new_tokens=n) for n in (16, 17))
    if short != long:
        raise ConfigError(
            "batches.workers",
            "shared needs one schedule for all rows, and without decode.horizon each max_tokens has its own; set "
            "decode.horizon, or batches.workers=own",
        )
