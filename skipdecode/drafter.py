"""What skipped passes draft by: layers and head of a model, with weights of half the bytes where there are such.

A draft of few rows waits for weights and little else. Full depth verifies it, so its weights may be rounded: bfloat16
in place of float32, int8 in place of bfloat16 (`Backend.narrowed`). Norms, biases, keys and values are the model's own.
Copies are made of what drafts run alone, before the first of them. Compare QuantSpec (arXiv 2502.10424), which drafts
by int4 weights of all layers.

B rows, D width.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skipdecode.backends.backend import Packed
from skipdecode.backends.device import backend_on
from skipdecode.backends.memory import available_bytes
from skipdecode.placing import Placement
from skipdecode.short_head import ShortHead

if TYPE_CHECKING:
    from skipdecode.decoder import Decoder


ROOM = 1 / 4  # of the memory that nobody needs, for copies; caches may have as much


class Drafter:
    """Of one model, which it is a part of; `skipdecode.layer_loop` runs it as it runs the model."""

    added = None
    """Drafts have their own keys and values in every layer."""

    def __init__(self, model: "Decoder") -> None:
        self._model, self._backend = model, backend_on(model.device)
        self.layers = model.layers
        self._tried: set[int] = set()  # layers, of which there are copies where there can be
        self._head: Packed | None = None

    @property
    def placement(self) -> Placement | None:
        return self._model.placement

    def rotations_on(self, device: torch.device) -> Tensor | None:
        return self._model.rotations_on(device)

    @property
    def weight_itemsize(self) -> int:
        """Bytes that a draft reads per weight."""
        packed = self._model.layers[0].fc2.packed
        narrow = None if packed is None else self._backend.narrow_itemsize(packed)
        return self._model.weight_itemsize if narrow is None else narrow

    def prepare(self, layers: Iterable[int], *, with_head: bool) -> bool:
        """Copies what drafts of these `layers` will run, and the head `with_head`, unless that was done before or there
        is no room. Whether anything was left to do."""
        missing = set(layers) - self._tried
        needs_head = with_head and self._head is None and self._model.packed_head is not None
        if not missing and not needs_head:
            return False
        self._tried |= missing
        if needs_head:
            self._head = self._model.packed_head
        config = self._model.config
        weights = sum(linear.in_features * linear.out_features for i in missing for linear in self.layers[i].linears)
        weights += config.vocab_size * config.embed_dim * needs_head
        if weights * self.weight_itemsize > ROOM * available_bytes():
            return True
        for i in missing:
            self.layers[i] = self.layers[i].narrowed(self.rotations_on(self._model.device_of(i))) or self.layers[i]
        if needs_head and self._head is not None:
            self._head = self._backend.narrowed(self._head) or self._head
        return True

    def likeliest(self, h: Tensor, short: ShortHead | None = None) -> Tensor:
        """As `Decoder.likeliest`: [B, D] -> [B] int64."""
        if short is None and self._head is not None:
            return self._head.likeliest(self._model.head_states(h))
        return self._model.likeliest(h, short)
