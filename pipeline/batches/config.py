"""The sections `storage` and `batches` of the server's configuration, and the configuration of a batch's run."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.job import ActorsConfig, Section

DAY_S = 24 * 3600
Positive = Annotated[int, Field(ge=1)]


class StorageSection(Section):
    path: Annotated[str, Field(min_length=1)] | None = None
    """Where files and batches are kept: a folder or a URI that all replicas reach. null: there are no `/v1/files` and
    `/v1/batches`."""
    max_file_bytes: Positive = 200 << 20
    """The most bytes of an uploaded file; OpenAI's limit."""
    max_lines: Positive = 50_000
    """The most lines of a file; OpenAI's limit."""
    max_stored_bytes: Positive = 20 << 30
    """The most bytes that the files and batches of one client (an API key) may take together."""
    expires_after_s: Annotated[int, Field(ge=3600)] = 30 * DAY_S
    """Age at which files are deleted, and batches after their end. An upload or a batch may ask for less."""


class BatchActors(ActorsConfig):
    background: bool = True
    """Whether the workers of batches leave the CPUs to the endpoint, and take what is left."""


class BatchesSection(Section):
    max_running: Positive = 1
    """How many batches run at a time; others wait, and clients take turns."""
    max_waiting: Positive = 100
    """The most batches of one client that have not ended; more get 429."""
    turn_s: Annotated[float, Field(gt=0)] = 900
    """Seconds after which a batch makes room for one of another client that waits, and waits itself."""
    workers: Literal["own", "shared"] = "own"
    """Who decodes. own: workers of each batch, which load the model again. shared: the endpoint's replicas, in places
    of their batches that no request wants; not with `engine.scheduler: cohort`, and only with a `decode` that gives all
    rows one schedule."""
    max_prefill_tokens: Positive = 128
    """With `workers: shared`, the most prompt tokens of batches in one step, for which a request that arrives meanwhile
    has to wait. A longer prompt has a step of its own."""
    actors: BatchActors = BatchActors()
    """The workers of a batch, as for `generate`. With `workers: shared` they decode what replicas cannot, and of their
    sizes only `window_batches` counts: the batches of rows that a replica is given at a time."""
