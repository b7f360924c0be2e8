"""The sampling parameters of a row. Tokens are chosen from logits in `skipdecode.model.sampler`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How a row is continued, and what is returned beside its tokens."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens are returned with the log-probability of each new token; None: neither is."""
    prompt_logprobs: bool = False
    """Also score the prompt's tokens, at full depth. With `max_new_tokens` 0 the scores are the whole answer."""
