"""The types of actor handles say what the actors behind them can do: no type checker looks through Ray."""

from typing import Any, get_args, get_type_hints

import pytest

from actors.generator import Answer
from pipeline.cluster.ray_handles import AttemptTrackerHandle, CollectorHandle, LeftoversHandle
from pipeline.report.collector import MetricsCollector
from pipeline.stages.attempt_tracker import AttemptTracker
from pipeline.stages.work_stealing import Leftovers
from skipdecode.engine.request import Request

HEAVY = {"Answer": Answer, "Request": Request}  # what the modules import for the type checker alone


def public_methods(actor: type) -> set[str]:
    return {name for name, member in vars(actor).items() if callable(member) and not name.startswith("_")}


@pytest.mark.parametrize(
    ("handle", "actor"),
    [(AttemptTrackerHandle, AttemptTracker), (LeftoversHandle, Leftovers), (CollectorHandle, MetricsCollector)],
    ids=lambda kind: kind.__name__,
)
def test_a_handle_names_the_methods_of_its_actor_with_their_types(handle: Any, actor: Any) -> None:
    named = {name: member for name, member in vars(handle).items() if isinstance(member, property)}
    assert named.keys() == public_methods(actor)
    for name, member in named.items():
        arguments, result = get_args(get_type_hints(member.fget, localns=HEAVY)["return"])
        *expected, returned = get_type_hints(getattr(actor, name), localns=HEAVY).values()
        assert (list(arguments), result) == (expected, returned), name
