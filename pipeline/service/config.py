"""The configuration of the server: `args` of the application in a Ray Serve configuration file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, field_validator

from pipeline.batches.config import BatchesSection, StorageSection
from pipeline.config.job import (
    ConfigError,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    ReasoningParser,
    Section,
    build_config,
)
from pipeline.config.tree import apply_overrides
from skipdecode.cost.gpu_specs import MEMORY_SHARE

DEPLOYMENT = "Completions"
BATCHES = "Batches"
DRAIN_S = 120.0  # the default of limits.request_timeout_s
Positive = Annotated[int, Field(ge=1)]


class DefaultSampling(Section):
    """Defaults for what a request does not set; those of OpenAI."""

    max_new_tokens: Positive = 16
    """Maximum number of tokens of an answer (`max_tokens` of a request)."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this much probability; 1: all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    deterministic: bool = False
    """Fixed batch shapes: tokens depend on model, configuration, prompt, id and seed alone, in bfloat16 too."""


class AnswerSection(Section):
    reasoning_parser: ReasoningParser | None = None
    """think: what a model writes between `<think>` and `</think>` before it answers is the `reasoning_content` of a
    chat's message, and `content` is the answer alone. null: the text stays whole."""


class EngineSection(Section):
    scheduler: Literal["auto", "cohort", "continuous"] = "auto"
    """continuous: requests join and leave a batch at any step. cohort: requests that wait together form a batch, whose
    steps a GPU replays as CUDA graphs. auto: continuous on CPUs and with `batches.workers: shared`, else cohort; cohort
    where `decode.ffn_skip` by row or `sampling.deterministic` needs it."""
    batch_size: Positive = 32
    """Rows of a cohort, or of a continuous batch."""
    memory_share: Annotated[float, Field(gt=0.0, le=0.95)] = MEMORY_SHARE
    """Share of a GPU's memory for weights and caches. On CPUs half of the free memory is used."""
    max_cohorts: Positive = 8
    """Maximum number of cohorts that are decoded in turns; with `continuous`, of batches (one per schedule)."""
    max_prefill_tokens: Positive = 4096
    """Maximum number of prompt tokens of new requests in one step."""
    length_buckets: Annotated[tuple[Positive, ...], Field(min_length=1)] = (32, 64, 128, 256, 512, 1024, 2048)
    """Prompt lengths in tokens; the rows of a cohort come from one bucket."""
    num_threads: Positive | None = None
    """torch threads of a replica; null: one less than it reserves (`ray_actor_options.num_cpus`), or than its node has
    cores if it reserves one CPU or less. The one left is for HTTP."""

    @field_validator("length_buckets")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError(f"must be strictly increasing, got {list(value)}")
        return value


class LimitsSection(Section):
    max_waiting: Positive = 256
    """Maximum number of waiting requests; more get 429."""
    max_prompts: Positive = 128
    """Maximum number of prompts in one request."""
    max_client_prompts: Positive | None = None
    """Maximum number of prompts in progress for one client (an API key, or an address without keys); more get 429. A
    request that is being read counts as one. null: no limit."""
    max_body_bytes: Positive = 4 << 20
    """Maximum size of a request body; larger ones get 413."""
    max_reading_bytes: Positive = 256 << 20
    """Maximum size of all request bodies that are being read at a time, half of it for one client; beyond it requests
    get 429."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120
    """Time limit from the arrival of the headers to the last token; then 408."""
    stream_events_per_s: Annotated[float, Field(gt=0)] = 150
    """Maximum rate of events of all streams of a replica together; with more streams, each event carries more tokens.
    The first token of a stream is sent at once."""
    stall_s: Annotated[float, Field(gt=0)] = 60
    """An engine whose step takes longer counts as dead; raised if prompts of `engine.max_prefill_tokens` need more."""


class AuthSection(Section):
    api_keys_env: Annotated[str, Field(min_length=1)] = "SKIPDECODE_API_KEYS"
    """Environment variable with the API keys, separated by commas; read where the application is built."""
    api_keys_file: str | None = None
    """File with more keys, one per line."""
    open_on_loopback: bool = False
    """Whether programs on this machine are answered without a key if none is configured. false: `skipdecode serve`
    makes a key and prints it; `serve deploy` and `serve run` do not start without keys."""


class ServeConfig(Section):
    """`args` of the application."""

    model: ModelConfig = ModelConfig()
    model_name: Annotated[str, Field(min_length=1)] | None = None
    """The name clients use; null: the last part of model.source."""
    decode: DecodeConfig = DecodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    sampling: DefaultSampling = DefaultSampling()
    output: AnswerSection = AnswerSection()
    engine: EngineSection = EngineSection()
    limits: LimitsSection = LimitsSection()
    auth: AuthSection = AuthSection()
    storage: StorageSection = StorageSection()
    batches: BatchesSection = BatchesSection()

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.source.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class ServeFile:
    """A Serve configuration file with one application."""

    args: ServeConfig
    name: str
    route_prefix: str
    http: "HttpOptions"
    proxy_location: str | None
    deployment: Mapping[str, JsonValue]
    """Options of the deployment, without its name."""

    @property
    def drain_s(self) -> float:
        """Seconds that requests in progress have to end when the server stops."""
        asked = self.deployment.get("graceful_shutdown_timeout_s")
        return float(asked) if isinstance(asked, int | float) else DRAIN_S


class HttpOptions(Section):
    """Ray Serve's own options; `skipdecode serve` uses two of them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    host: str = "127.0.0.1"
    """Address on which the proxies listen."""
    port: int = 8000
    """Port on which they listen."""


class ServeApplication(Section):
    name: str = "skipdecode"
    """Of the application on the cluster."""
    route_prefix: str = "/"
    """Path under which it answers."""
    import_path: Literal["pipeline.service.app:build_app"] = "pipeline.service.app:build_app"
    """Where Ray Serve finds the application."""
    runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """`serve deploy` alone applies it."""
    args: ServeConfig = ServeConfig()
    deployments: tuple[dict[str, JsonValue], ...] = ()
    """One at most: options of the deployment `Completions`, as Ray Serve has them."""


class ServeTree(Section):
    """The part of Ray's schema that `skipdecode serve` applies; `serve deploy` applies all of it."""

    proxy_location: str | None = None
    """Where Ray Serve's proxies run."""
    http_options: HttpOptions = HttpOptions()
    """Host and port of the proxies, as Ray Serve has them."""
    logging_config: dict[str, JsonValue] = Field(default_factory=dict)
    """`serve deploy` alone applies it."""
    applications: Annotated[tuple[ServeApplication, ...], Field(min_length=1, max_length=1)] = (ServeApplication(),)


def load_serve_file(tree: dict[str, JsonValue], overrides: Sequence[tuple[str, JsonValue]] = ()) -> ServeFile:
    """Checks a parsed Serve configuration, with dotted `overrides` of the application's `args`; ConfigError."""
    applications = tree.get("applications") or [{}]
    if isinstance(applications, list) and isinstance(first := applications[0], dict):
        args = first.get("args") or {}
        if isinstance(args, dict):
            apply_overrides(args, overrides)
            # checked separately first, so that an error names `engine.batch_size` without `applications.0.args.`
            build_config(ServeConfig, args)
        tree = tree | {"applications": [first | {"args": args}, *applications[1:]]}
    checked = build_config(ServeTree, tree)
    application = checked.applications[0]
    _refuse_not_applied(checked)
    deployment = dict(application.deployments[0]) if application.deployments else {}
    deployment.pop("name", None)
    return ServeFile(
        application.args,
        application.name,
        application.route_prefix,
        checked.http_options,
        checked.proxy_location,
        deployment,
    )


def _refuse_not_applied(tree: ServeTree) -> None:
    """ConfigError for settings in the file that `skipdecode serve` would ignore."""
    application = tree.applications[0]
    for key, value in (
        ("logging_config", tree.logging_config),
        ("applications.0.runtime_env", application.runtime_env),
    ):
        if value:
            raise ConfigError(
                key, "only `serve deploy` and `serve run` apply it, `skipdecode serve` does not; remove it"
            )
    if len(application.deployments) > 1:
        raise ConfigError("applications.0.deployments.1", f"there is one deployment, {DEPLOYMENT}")
    for deployment in application.deployments:
        if (name := deployment.get("name", DEPLOYMENT)) != DEPLOYMENT:
            raise ConfigError("applications.0.deployments.0.name", f"must be {DEPLOYMENT}, got {name!r}")
