"""`EndpointModel`: in place of `ModelThread` where an endpoint decodes the rows of a run (`batches.workers: shared`).

A window goes to one replica of the endpoint, whose engine decodes its rows in places that no request wants
(`actors.serving`), and comes back whole. The model is loaded here only for rows that no replica may or can decode:
those of a window whose replica died meanwhile, suspects of having ended a worker, and rows that a replica refuses. So a
row that ends its process ends one replica, and after that the worker, as in any run.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.generator import Answer, WindowResult
from actors.generator_config import GeneratorConfig
from pipeline.cluster.worker_records import BackendRecord, ModelRecord
from pipeline.fault_injection import fault_point
from pipeline.stages.answer_box import Delivery
from pipeline.stages.model_thread import ModelThread
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion

T = TypeVar("T")
logger = logging.getLogger(__name__)

HAND_OVER_S = 60.0  # for a replica to take a window
LOOK_S = 5.0  # between two looks whether the replica lives
RETRY_S = 1.0  # before a window is offered again: a replica that has ended takes seconds to be replaced


@dataclass(frozen=True)
class EndpointName:
    """A deployment of Ray Serve."""

    application: str
    deployment: str

    def handle(self) -> DeploymentHandle:
        return serve.get_deployment_handle(self.deployment, self.application)


class EndpointTerms(TypedDict):
    """What a replica says of itself."""

    model: str
    """`generate.sharing.model_digest` of what it has loaded."""
    dtype: str
    batch_size: int
    """Rows of its batch."""
    layers: int
    """Of its model."""
    device: str
    backend: BackendRecord


@dataclass(frozen=True)
class SharedEndpoint:
    """An endpoint that decodes the rows of a run."""

    name: EndpointName
    terms: EndpointTerms
    num_replicas: int
    """When the run began."""
    answers: ActorHandle
    """`AnswerBox`"""


class EndpointModel:
    """What `WindowDecoder` needs of a model, by way of an endpoint."""

    def __init__(
        self, worker: str, endpoint: SharedEndpoint, config: GeneratorConfig, report_exit: Callable[[str], None]
    ) -> None:
        """`config`, `report_exit`: as of `ModelThread`, for rows that are decoded here."""
        self._worker = worker
        self._handle, self._terms, self._answers = endpoint.name.handle(), endpoint.terms, endpoint.answers
        self._config, self._report_exit = config, report_exit
        self._num_windows = 0

    def record(self) -> ModelRecord:
        """How the replicas decode."""
        backend, config = self._terms["backend"], self._config
        return {
            "load_s": 0.0,
            "device": f"endpoint ({self._terms['device']})",
            "dtype": config.precision(self._terms["dtype"]),
            "backend": {
                "name": backend["name"],
                "reason": f"rows join the batches of the endpoint (batches.workers=shared); {backend['reason']}",
            },
            "why_slow": None,
        }

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The requests, which are not divided here."""
        return [list(requests)]

    def check(self) -> None:
        """As `ModelThread.check`, by a model that is loaded here."""
        self._with_model(lambda model: model.check())

    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        """One answer per request, all of them in the end: the other arguments are for a model of this process."""
        started_at, made = time.time(), self._by_endpoint(requests)
        left = [row for row, answer in enumerate(made) if answer is None]
        result = self.decode_alone([requests[row] for row in left]) if left else WindowResult([])
        if len(left) < len(requests):
            result.batches.append(self._record_of(started_at, requests, made))
        own = iter(result.answers)
        result.answers = [next(own) if answer is None else answer for answer in made]
        return result

    def decode_alone(self, requests: Sequence[Request]) -> WindowResult:
        """By a model that is loaded here: a row may end its process."""
        for request in requests:
            fault_point(f"decode alone {request.id}")
        return self._with_model(lambda model: model.decode(requests, may_measure=False))

    def _with_model(self, work: Callable[[ModelThread], T]) -> T:
        """Loads the model, and drops it again: the machine may have memory for one beside those of the replicas."""
        while not ray.get(self._answers.may_load.remote(self._worker)):
            time.sleep(RETRY_S)
        try:
            return work(ModelThread(self._config, self._report_exit))
        finally:
            self._answers.has_dropped.remote(self._worker)

    def _by_endpoint(self, requests: Sequence[Request]) -> "Sequence[Answer | None]":
        """The answers of a replica; None for rows that it has refused, or all if it has died."""
        while True:
            key = uuid.uuid4().hex
            ray.get(self._answers.open.remote(key))
            try:
                self._offer(key, requests)
                replica: ActorHandle | None = ray.get(self._answers.taker.remote(key))
                delivery = None if replica is None else self._await_answers(key, replica)
            except ray.exceptions.RayActorError:
                return [None] * len(requests)
            finally:
                self._answers.close.remote(key)
            if delivery is not None and delivery.answers is not None:
                return delivery.answers
            time.sleep(RETRY_S)

    def _offer(self, key: str, requests: Sequence[Request]) -> None:
        """Calls a replica, which claims the window. What becomes of the call does not tell whether one has."""
        try:
            call = self._handle.decode_in_background.remote(self._answers, key, requests, self._terms)
            call.result(timeout_s=HAND_OVER_S)
        except (ray.exceptions.RayTaskError, RayServeException, TimeoutError) as error:
            # it starts or stops, or its engine has ended
            logger.warning("a call that offers a window to the endpoint has failed: %s", error)

    def _await_answers(self, key: str, replica: ActorHandle) -> Delivery:
        """What the replica has made of the window that it has claimed. RayActorError if it has died."""
        while True:
            delivery: Delivery | None = ray.get(self._answers.take.remote(key, LOOK_S))
            if delivery is not None:
                return delivery
            try:
                ray.get(replica.__ray_ready__.remote(), timeout=HAND_OVER_S)
            except ray.exceptions.GetTimeoutError:  # Ray Serve ends a replica that does not answer
                continue

    def _record_of(
        self, started_at: float, requests: Sequence[Request], made: "Sequence[Answer | None]"
    ) -> dict[str, object]:
        """What is known of the rows as a batch. Its steps had other rows, too, so no time is theirs alone."""
        pairs = [(r, a) for r, a in zip(requests, made, strict=True) if isinstance(a, Completion)]
        number, self._num_windows = self._num_windows, self._num_windows + 1
        unknown = (
            "prompt_columns", "prompt_padding", "decode_steps", "row_steps", "layer_row_steps", "cache_bytes",
            "prefix_tokens_saved",
        )  # fmt: skip
        return {
            **dict.fromkeys(unknown, 0),
            "batch": number,
            "started_at": started_at,
            "rows": len(pairs),
            "layers": self._terms["layers"],
            "input_tokens": sum(len(request.prompt_tokens) for request, _ in pairs),
            "output_tokens": sum(len(answer.tokens) for _, answer in pairs),
            "layers_run": sum(answer.layers_run for _, answer in pairs),
            "ffns_run": sum(answer.ffns_run for _, answer in pairs),
            "prefill_s": 0.0,
            "decode_s": 0.0,
        }
