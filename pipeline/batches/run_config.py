"""Builds the configuration of a batch's run from the server's configuration and the batch."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.batches.config import BatchesSection
from pipeline.batches.storage import ClientStorage, StoredBatch
from pipeline.config.job import DecodeConfig, JobConfig, ModelConfig, PrefillConfig, Section, build_config


class _Limits(Protocol):
    max_body_bytes: int


class ServerSettings(Protocol):
    """The part of the server's configuration (`pipeline.service.config.ServeConfig`) that decides its batches."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def decode(self) -> DecodeConfig: ...
    @property
    def prefill(self) -> PrefillConfig: ...
    @property
    def sampling(self) -> Section: ...
    @property
    def output(self) -> Section: ...
    @property
    def batches(self) -> BatchesSection: ...
    @property
    def limits(self) -> Any: ...


def job_settings(server: ServerSettings) -> dict[str, Any]:
    """The sections of `JobConfig` for batches of this server, without the paths and the time that each has.

    A line that sets no sampling parameters gets those of the endpoint, and seed 0; bad lines never end a run early.
    """
    return {
        "model": {key: _absolute(value) for key, value in server.model.model_dump(mode="json").items()},
        "decode": server.decode.model_dump(mode="json", exclude_unset=True),
        "prefill": server.prefill.model_dump(mode="json"),
        "sampling": server.sampling.model_dump(mode="json"),
        "output": server.output.model_dump(mode="json"),
        "actors": server.batches.actors.model_dump(mode="json"),
        "baseline": {"fraction": 0.0},
        "limits": {"max_failed_rows": 1.0, "max_line_bytes": server.limits.max_body_bytes},
    }


def _absolute(value: Any) -> Any:
    """A path of this machine as every process has it; anything else as it is."""
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) and os.path.exists(value) else value


def job_config(own: ClientStorage, record: StoredBatch, window_s: float) -> JobConfig:
    """The configuration of the batch's run, which may take `window_s` from now on."""
    job: Mapping[str, Any] = record["job"]
    return build_config(
        JobConfig,
        {
            **job,
            "input": {"path": [own.input_path(record["id"])], "format": "openai_batch"},
            "output": {
                **job.get("output", {}),
                "path": own.run_path(record["id"]),
                "if_exists": "resume",
                "model_name": record["model"],
            },
            "limits": {**job["limits"], "window_s": max(window_s, 0.001)},
        },
    )
