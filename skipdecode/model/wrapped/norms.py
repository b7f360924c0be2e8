"""Norms of a model of transformers as what they compute, which is found by running them.

D width.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_EPSILON = 0.1
USUAL_EPSILONS = (1e-5, 1e-6)
"""Which some modules do not keep in an attribute."""
TOLERANCE = 1e-5
"""Of the largest output, in float32."""


class Norm(nn.Module):
    """A LayerNorm or an RMS norm over the last dimension."""

    def __init__(
        self, kind: Literal["layer", "rms"], epsilon: float, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """`weight`, `bias` [D]: None for 1 and 0."""
        super().__init__()
        self.kind, self.epsilon = kind, epsilon
        self.weight, self.bias = (
            None if own is None else nn.Parameter(own, requires_grad=False) for own in (weight, bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return F.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.epsilon)

    def like(self, width: int, generator: torch.Generator) -> "Norm":
        """The same norm of another width with random weights in float32, where it has weights."""
        weight, bias = (
            None if own is None else torch.rand(width, generator=generator) + 0.5 for own in (self.weight, self.bias)
        )
        return Norm(self.kind, self.epsilon, weight, bias)


def norm_of(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module is for states [..., D], with weights in its type; None if it is none."""
    own = dict(module.named_parameters())
    if any(parameter.shape != (width,) for parameter in own.values()) or len(own) > 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, width, generator=generator)
    x[1] *= 1e-3  # so small that the epsilon matters
    try:
        made = copy.deepcopy(module).float()(x)
    except Exception:  # it takes something else
        return None
    if not (isinstance(made, Tensor) and made.shape == x.shape):
        return None
    found = next((norm for norm in _candidates(module, list(own.values())) if _is_close(norm(x), made)), None)
    return found if found is None or not own else found.to(next(iter(own.values())).dtype)


def _candidates(module: nn.Module, own: Sequence[Tensor]) -> Iterator[Norm]:
    """Norms in float32 that the module may be, which has the parameters `own`."""
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    epsilons = [value for value in (*numbers, *USUAL_EPSILONS) if 0 < value < LARGEST_EPSILON]
    vectors = [parameter.detach().float() for parameter in own]
    for epsilon in dict.fromkeys(epsilons):
        for weight in (vectors[0], 1.0 + vectors[0]) if vectors else (None,):  # the second in Gemma and Nemotron
            yield Norm("layer", epsilon, weight, *vectors[1:])
            if len(vectors) < 2:
                yield Norm("rms", epsilon, weight)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    """In each row, so that those of small states count as well."""
    apart = (found - wanted).abs().amax(dim=-1) / wanted.abs().amax(dim=-1)
    return bool((apart <= TOLERANCE).all())  # not where one is NaN
