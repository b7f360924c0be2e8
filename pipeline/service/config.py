"""What an endpoint can be told: `args` of the application in a Serve configuration file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, field_validator

from pipeline.config.job import ConfigError, DecodeConfig, ModelConfig, PrefillConfig, Section, build_config
from pipeline.config.tree import apply_overrides
from skipdecode.cost.gpu_specs import MEMORY_SHARE

DEPLOYMENT = "Completions"
DRAIN_S = 120.0  # the default of limits.request_timeout_s
Positive = Annotated[int, Field(ge=1)]


class DefaultSampling(Section):
    """What a request gets that does not say; as OpenAI has them."""

    max_new_tokens: Positive = 16
    """Tokens of an answer at most (`max_tokens` of a request)."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw from the smallest set of tokens with this much probability; 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    deterministic: bool = False
    """Fixed batch shapes: tokens depend on model, configuration, prompt, id and seed alone, in bfloat16 too."""


class EngineSection(Section):
    scheduler: Literal["cohort", "continuous"] = "cohort"
    """cohort: requests that wait together share positions. continuous: they join and leave one batch at any step."""
    batch_size: Positive = 32
    """Rows of a cohort, or of a continuous batch."""
    memory_share: Annotated[float, Field(gt=0.0, le=0.95)] = MEMORY_SHARE
    """Of a GPU's memory, what a replica takes for weights and caches. Hosts give half of what is free."""
    max_cohorts: Positive = 8
    """Cohorts that take turns; under `continuous`, batches (one per schedule)."""
    max_prefill_tokens: Positive = 4096
    """Prompt tokens that newcomers may bring in one turn."""
    length_buckets: Annotated[tuple[Positive, ...], Field(min_length=1)] = (32, 64, 128, 256, 512, 1024, 2048)
    """Prompt lengths, in tokens; rows of one cohort are of one bucket."""
    num_threads: Positive | None = None
    """torch threads of a replica; null: what it reserves (`ray_actor_options.num_cpus`), or the cores of its node where
    it reserves one CPU or less; but one, which HTTP needs."""

    @field_validator("length_buckets")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError(f"must be strictly increasing, got {list(value)}")
        return value


class LimitsSection(Section):
    max_waiting: Positive = 256
    """Requests that may wait to start; beyond, 429."""
    max_prompts: Positive = 128
    """Prompts of one request."""
    max_client_prompts: Positive | None = None
    """Prompts of one client (an API key; without keys, an address) that wait or are answered at a time; beyond, 429.
    null: as many as there is room for."""
    max_body_bytes: Positive = 4 << 20
    """Of one request; beyond, 413."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120
    """From the arrival of the headers to the last token; then 408."""
    stream_events_per_s: Annotated[float, Field(gt=0)] = 150
    """Events of all streams of a replica together; with more streams, each event carries more tokens. The first token
    of a stream never waits."""
    stall_s: Annotated[float, Field(gt=0)] = 60
    """A step that takes longer counts as a dead engine; more where prompts of `engine.max_prefill_tokens` need it."""


class AuthSection(Section):
    api_keys_env: Annotated[str, Field(min_length=1)] = "SKIPDECODE_API_KEYS"
    """Environment variable with the keys that are let in, separated by commas; read where the application is built."""
    api_keys_file: str | None = None
    """Or a file with one key per line."""
    open_on_loopback: bool = True
    """Without keys: whether programs on this machine are answered. false: no keys, no start."""


class ServeConfig(Section):
    """`args` of the application."""

    model: ModelConfig = ModelConfig()
    model_name: Annotated[str, Field(min_length=1)] | None = None
    """The name clients use; null: the last part of model.source."""
    decode: DecodeConfig = DecodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    sampling: DefaultSampling = DefaultSampling()
    engine: EngineSection = EngineSection()
    limits: LimitsSection = LimitsSection()
    auth: AuthSection = AuthSection()

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
        """How long requests that are being answered have when the endpoint ends."""
        asked = self.deployment.get("graceful_shutdown_timeout_s")
        return float(asked) if isinstance(asked, int | float) else DRAIN_S


class HttpOptions(Section):
    """Those of Ray Serve, of which `jobs.serve` knows two."""

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
    """As much of Ray's own schema as `jobs.serve` applies; `serve deploy` knows the rest."""

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
            # checked by itself first, so that an error names `engine.batch_size`, not `applications.0.args.engine...`
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
    """ConfigError for what the file says and `jobs.serve` would leave out without a word."""
    application = tree.applications[0]
    for key, value in (
        ("logging_config", tree.logging_config),
        ("applications.0.runtime_env", application.runtime_env),
    ):
        if value:
            raise ConfigError(key, "`serve deploy` and `serve run` apply it, jobs.serve does not; remove it")
    if len(application.deployments) > 1:
        raise ConfigError("applications.0.deployments.1", f"there is one deployment, {DEPLOYMENT}")
    for deployment in application.deployments:
        if (name := deployment.get("name", DEPLOYMENT)) != DEPLOYMENT:
            raise ConfigError("applications.0.deployments.0.name", f"must be {DEPLOYMENT}, got {name!r}")
