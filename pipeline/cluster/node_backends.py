"""The back ends of a cluster's nodes, which are asked, since the driver's CPU says nothing about theirs.

One type for all workers of a run: bfloat16 where every node's back end has it, so that a mixed pool decodes alike. A
back end that the user forces reaches the workers with the environment (`cluster.start_ray`). Left out: GPUs, and which
back ends there are (`skipdecode.backends.choice`).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.cluster.pool import Cluster
from pipeline.config.job import ConfigError
from skipdecode.backends import choice
from skipdecode.backends.choice import BackendError, Choice
from skipdecode.config.model import Quantization

TIMEOUT_S = 300  # a node may compile its kernels first, beside a start of torch


@dataclass(frozen=True)
class NodeBackend:
    """The back end of a worker on that node, or why there is none."""

    node: str
    """Its host name."""
    backend: Choice | None
    problem: str = ""


def find_backends(cluster: Cluster, num_cpus: float) -> tuple[NodeBackend, ...]:
    """Back ends of all nodes that can hold an actor of `num_cpus`, or of this process if it embeds Ray. Compiles them.

    ConfigError where a forced back end cannot run on one of them. Nodes that join later are not known here.
    """
    found = (look(),) if cluster.is_embedded else _ask_nodes(num_cpus)
    for one in found:
        if one.backend is None:
            raise ConfigError("", f"{one.problem} (on {one.node})" if len(found) > 1 else one.problem)
    return found


def resolve_dtype(name: str, device: str, nodes: Sequence[NodeBackend]) -> str:
    """`auto` resolved once, so that all workers and all sessions of a run decode in the same type."""
    if name != "auto":
        return name
    backends = [node.backend for node in nodes if node.backend is not None]
    has_bfloat16 = device == "cuda" or (bool(backends) and all(one.dtype == "bfloat16" for one in backends))
    return "bfloat16" if has_bfloat16 else "float32"


def reason_against(quantization: Quantization | None, nodes: Sequence[NodeBackend], dtype: str) -> str | None:
    """Why the CPU of some worker cannot have weights quantized like this beside numbers of that type, and on which
    node; None where all of them can."""
    for node in nodes:
        if node.backend is not None and (problem := node.backend.lacks(quantization)) is not None:
            return f"{problem} (on {node.node})"
    return reason_for_torch(nodes, dtype) if quantization == "int4" else None


def reason_for_torch(nodes: Sequence[NodeBackend], dtype: str) -> str | None:
    """Why some worker would use torch for products of that type, and on which node; None where all have kernels."""
    for node in nodes:
        backend = node.backend  # with kernels it multiplies float32, and bfloat16 where that is its own type
        multiplies = ("float32", backend.dtype) if backend is not None and backend.name != "torch" else ()
        if backend is not None and dtype not in multiplies:
            return f"the back end {backend.name} (on {node.node}) has no kernels for {dtype}"
    return None


def look() -> NodeBackend:
    """The back end of this process."""
    try:
        return NodeBackend(os.uname().nodename, choice.choose())
    except BackendError as error:
        return NodeBackend(os.uname().nodename, None, str(error))


def _ask_nodes(num_cpus: float) -> tuple[NodeBackend, ...]:
    """Nodes that go while they are asked are left out, as they decode nothing."""
    remote_look = ray.remote(num_cpus=0, max_retries=2)(look)
    deadline, found = time.monotonic() + TIMEOUT_S, list[NodeBackend]()
    refs = [
        remote_look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) >= num_cpus
    ]
    for ref in refs:
        try:
            found.append(ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1)))
        except ray.exceptions.GetTimeoutError as error:
            raise ConfigError(
                "", f"a node did not say within {TIMEOUT_S} s what it decodes with; start again"
            ) from error
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:  # its node is gone
            continue
    if not found:
        raise ConfigError("", "no node that could decode says with what; is the cluster still there? start again")
    return tuple(sorted(found, key=lambda one: one.node))
