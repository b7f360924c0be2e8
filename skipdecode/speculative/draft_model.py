"""What skipped passes draft by: layers and head of a model, with weights of half the bytes where there are such.

A draft of few rows waits for weights and little else. Full depth verifies it, so its weights may be rounded: bfloat16
in place of float32, int8 in place of bfloat16 (`Backend.narrowed`). Norms, biases, keys and values are the model's own.
Copies are made of what drafts run alone, before the first of them. Compare QuantSpec (arXiv 2502.10424), which drafts
by int4 weights of all layers.

B rows, D width.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skipdecode.backends.backend import Packed
from skipdecode.backends.device import backend_on
from skipdecode.backends.host_memory import available_bytes
from skipdecode.model.pipeline_parallel import Placement
from skipdecode.speculative.draft_lm_head import ShortHead

if TYPE_CHECKING:
    from skipdecode.model.decoder import Decoder


ROOM = 1 / 4  # of the memory that nobody needs, for all copies; the cache of a batch may have as much


class Drafter:
    """Of one model, which it is a part of; `skipdecode.model.layer_loop` runs it as it runs the model."""

    added = None
    """Drafts have their own keys and values in every layer."""

    def __init__(self, model: "Decoder") -> None:
        self._of = weakref.ref(model)  # which holds this one: without a circle its memory is free at once
        self._backend = backend_on(model.device)
        self.layers = model.layers
        self._tried: set[int] = set()  # layers, of which there are copies where there can be
        self._head: Packed | None = None
        self._num_copied = 0  # weights

    @property
    def _model(self) -> "Decoder":
        model = self._of()
        assert model is not None, "a part of a model that is gone"
        return model

    @property
    def placement(self) -> Placement | None:
        return self._model.placement

    def rotary_table_on(self, device: torch.device) -> Tensor | None:
        return self._model.rotary_table_on(device)

    @property
    def weight_itemsize(self) -> int:
        """Bytes that a draft reads per weight."""
        return self._narrow_itemsize or self._model.weight_itemsize

    @property
    def _narrow_itemsize(self) -> int | None:
        packed = self._model.layers[0].fc2.packed
        return None if packed is None else self._backend.narrow_itemsize(packed)

    def prepare(self, layers: Iterable[int], *, with_head: bool) -> bool:
        """Copies what drafts of these `layers` will run, and the head `with_head`, as far as that was not done before
        and there is room. Whether anything was left to do."""
        missing, head = sorted(set(layers) - self._tried), self._model.packed_head
        needs_head = with_head and self._head is None and head is not None
        if not (missing or needs_head):
            return False
        self._tried |= set(missing)
        if needs_head:
            self._head = head
        if self._narrow_itemsize is None:
            return False
        for i in missing:
            if self._has_room(sum(linear.in_features * linear.out_features for linear in self.layers[i].linears)):
                rotary_table = self.rotary_table_on(self._model.device_of(i))
                self.layers[i] = self.layers[i].narrowed(rotary_table) or self.layers[i]
        config = self._model.config
        if needs_head and head is not None and self._has_room(config.vocab_size * config.embed_dim):
            self._head = self._backend.narrowed(head) or head
        return True

    def _has_room(self, num_weights: int) -> bool:
        """Counts them, if so."""
        copied = self.weight_itemsize * self._num_copied
        if copied + self.weight_itemsize * num_weights > ROOM * (available_bytes() + copied):
            return False
        self._num_copied += num_weights
        return True

    @property
    def num_outputs(self) -> int | None:
        """Tokens that drafts choose among by a copy of the head, which is all; None: there is no copy."""
        is_copied = self._head is not None and self._head is not self._model.packed_head
        return self._model.config.vocab_size if is_copied else None

    def argmax(self, h: Tensor, short: ShortHead | None = None) -> Tensor:
        """As `Decoder.argmax`: [B, D] -> [B] int64."""
        if short is None and self._head is not None:
            return self._head.argmax(self._model.head_states(h))
        return self._model.argmax(h, short)

    def logits(self, h: Tensor, short: ShortHead | None = None) -> Tensor:
        """Of all tokens, or of those of `short` in their order: [B, D] -> [B, n]."""
        if short is not None:
            return short.logits(self._model.head_states(h))
        return self._model.head(h) if self._head is None else self._head(self._model.head_states(h), None)
