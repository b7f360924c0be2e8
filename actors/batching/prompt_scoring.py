"""Prompts that are scored at full depth: beside the answers of a batch, or alone where no tokens are asked for."""

import time
from collections.abc import Sequence
from dataclasses import replace

from skipdecode.engine.batch_stats import BatchStats
from skipdecode.engine.generate import BatchResult
from skipdecode.engine.logprobs import score_prompts
from skipdecode.engine.request import Completion, Request, refuse_too_long
from skipdecode.model.decoder import Decoder

SCORED_TOKENS = 2048  # go through the model at once; the states of all of them are in memory


def is_scored_alone(request: Request) -> bool:
    """Whether nothing is to be generated."""
    return request.sampling.max_new_tokens == 0


def with_scores(
    model: Decoder, requests: Sequence[Request], completions: Sequence[Completion], together: bool
) -> list[Completion]:
    """The completions with the scores of their prompts, where these are asked for.

    `together`: several prompts go through the model at once. Else a prompt's bits depend on nothing but itself.
    """
    done = list(completions)
    asking = sorted(
        (row for row, request in enumerate(requests) if request.score_prompt),
        key=lambda row: len(requests[row].prompt_tokens),
    )
    while asking:
        longest = len(requests[asking[-1]].prompt_tokens)
        count = max(1, SCORED_TOKENS // longest) if together else 1
        rows, asking = asking[-count:], asking[:-count]
        num_top = max(requests[row].top_logprobs or 0 for row in rows)
        scores = score_prompts(model, [requests[row].prompt_tokens for row in rows], num_top)
        for row, scored in zip(rows, scores, strict=True):
            own = requests[row].top_logprobs or 0
            cut = [replace(one, top=one.top[:own]) for one in scored]
            done[row] = replace(done[row], prompt_logprobs=cut)
    return done


def scored(
    model: Decoder, requests: Sequence[Request], result: BatchResult, together: bool
) -> tuple[list[Completion], float]:
    """The answers of a batch with their prompts' scores, where these are asked for beside tokens, and the seconds that
    these took. `together` as in `with_scores`."""
    if is_scored_alone(requests[0]):
        return result.completions, 0.0
    begun = time.perf_counter()
    completions = with_scores(model, requests, result.completions, together)
    return completions, time.perf_counter() - begun


def score_alone(model: Decoder, requests: Sequence[Request], together: bool) -> BatchResult:
    """Of rows that get no tokens: their scores, and what these cost."""
    refuse_too_long(requests, model.config.max_position_embeddings)
    begun = time.perf_counter()
    nothing = [Completion([], "length", 0, 0) for _ in requests]
    completions = with_scores(model, requests, nothing, together)
    lengths = [len(request.prompt_tokens) for request in requests]
    stats = BatchStats(len(requests), max(lengths), sum(lengths), prefill_s=time.perf_counter() - begun)
    return BatchResult(completions, stats)
