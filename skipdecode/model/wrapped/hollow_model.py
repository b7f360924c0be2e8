"""transformers' model around its layers: embedding, what it hands to each layer, final norm and head.

The model's own `forward` runs around a stack of stubs. In front of the layers each stub notes what its layer is given:
the states that reach the first are the embedding, with the scales, learned positions and norms of its family. Behind
them a stub gives our states back, and the model's own norm, head, soft cap and logit scale follow. So nothing here
knows how any family is wired.

B rows, T tokens, D width, V vocabulary, L layers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Arguments(NamedTuple):
    """What the model hands to one layer beside the states."""

    positional: Sequence[Any]
    named: Mapping[str, Any]


class Stub(nn.Module):
    """Stands for a layer: `instead` is called with what the layer is given. Attributes are the layer's."""

    def __init__(self, layer: nn.Module, instead: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # past nn.Module, for which it would be a submodule
        self.__dict__["instead"] = instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        return self.__dict__["instead"](*positional, **named)


class HollowModel:
    """Of a `...ForCausalLM`, whose layers are `layers`. ValueError if they are not wired one behind the other."""

    def __init__(self, model: Any, num_layers: int) -> None:
        self._model = model
        self._base, self._name = _find_stack(model, num_layers)
        self.layers: list[nn.Module] = list(self._base.get_submodule(self._name).children())
        self._seen: list[tuple[Tensor, Arguments]] = []
        self._states: Tensor | None = None
        self._gives_tuples = False
        self._newest: tuple[Tensor, Sequence[Arguments]] | None = None  # positions, and the arguments for them
        self._recorders = nn.ModuleList(Stub(layer, self._note) for layer in self.layers)
        self._returner = nn.ModuleList([Stub(self.layers[0], self._give_back)])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, D]. Position -1 is padding."""
        self._seen = []
        self._around(
            self._recorders,
            lambda: self._base(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),  # without one, positions of padding mean packed sequences
                position_ids=positions.clamp(min=0),
                use_cache=False,
            ),
        )
        states = [h for h, _ in self._seen]
        if not self._gives_tuples and len(states) > 1 and states[1].shape != states[0].shape:
            self._gives_tuples = True  # the first of what a layer returns was taken, so layers return tuples
            return self.embed(tokens, positions)
        if len(states) != len(self.layers) or any(h is not states[0] for h in states[1:]):
            raise ValueError("something happens to the states between its layers")
        if states[0].shape[:-1] != tokens.shape:
            raise ValueError(f"its states are {list(states[0].shape)} for tokens {list(tokens.shape)}")
        self._newest = positions, [arguments for _, arguments in self._seen]
        self._seen = []
        return states[0]

    def arguments(self, positions: Tensor) -> Sequence[Arguments]:
        """[L] what the layers are given for tokens at `positions` [B, T]."""
        if self._newest is None or self._newest[0] is not positions:
            with torch.no_grad():  # of arguments, so that recomputing a layer saves the tensors that its first call did
                self.embed(torch.zeros_like(positions), positions)
        assert self._newest is not None
        return self._newest[1]

    def newest_arguments(self, number: int) -> Arguments:
        """What layer `number` was given last, for whatever tokens."""
        assert self._newest is not None, "before any token"
        return self._newest[1][number]

    def find_head(self) -> tuple[nn.Module, str] | None:
        """The module that has the LM head, and its name there; None if it is no `nn.Linear`."""
        head = self._model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return None
        return next(
            (owner, name) for owner in self._model.modules() for name, one in owner.named_children() if one is head
        )

    def has_plain_head(self) -> bool:
        """True if logits are the product of the LM head with states and nothing else, such as a bias or a soft cap."""
        head = self._model.get_output_embeddings()
        logits = head.weight.new_ones(1, 1, head.out_features)
        hook = head.register_forward_hook(lambda *_: logits)
        try:
            made = self._logits(head.weight.new_zeros(1, 1, head.in_features))
        finally:
            hook.remove()
        return head.bias is None and made is logits and bool((logits == 1).all())

    def head(self, h: Tensor) -> Tensor:
        """States [..., D] behind the last layer -> logits [..., V]."""
        logits = self._logits(h.reshape(1, -1, h.shape[-1]))
        return logits.view(*h.shape[:-1], logits.shape[-1])

    def _logits(self, h: Tensor) -> Tensor:
        """[1, N, D] -> [1, N, V]"""
        self._states = h
        ids = torch.zeros(h.shape[:2], dtype=torch.int64, device=h.device)
        made = self._around(
            self._returner,
            lambda: self._model(
                input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.zeros_like(ids), use_cache=False
            ),
        )
        self._states = None
        logits: Tensor = made.logits
        return logits

    def _around(self, stack: nn.ModuleList, call: Callable[[], Any]) -> Any:
        """What `call` gives with `stack` in place of the layers."""
        real = self._base._modules[self._name]
        self._base._modules[self._name] = stack
        try:
            return call()
        finally:
            self._base._modules[self._name] = real

    def _note(self, h: Tensor | None = None, *positional: Any, **named: Any) -> Any:
        if h is None:
            h = named.pop("hidden_states")
        self._seen.append((h, Arguments(positional, named)))
        return (h,) if self._gives_tuples else h

    def _give_back(self, *_: Any, **__: Any) -> Any:
        return (self._states,) if self._gives_tuples else self._states


def _find_stack(model: nn.Module, num_layers: int) -> tuple[nn.Module, str]:
    """The module that has the layers, and their name there."""
    found = [
        (owner, name)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        what = "no list" if not found else f"{len(found)} lists"
        raise ValueError(f"it has {what} of {num_layers} layers (num_hidden_layers)")
    owner, name = found[0]
    if missing := {"input_ids", "attention_mask", "position_ids"} - inspect.signature(owner.forward).parameters.keys():
        raise ValueError(f"its layers are in {type(owner).__name__}, which takes no {min(missing)}")
    return owner, name
